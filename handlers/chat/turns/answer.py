"""Writes an answer to the client: its receipt, its tokens and its end.

The engine's thread only adds tokens. Their text is made by the thread that needs it (the pump's for a stream, a
worker's for the end), so the engine's next step does not wait. Only an answer that may end at a stop string or after
its first call is converted to text on the engine's thread.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

from handlers.chat.answer_parts import AnswerMessage, AnswerPart, AnswerReader
from handlers.chat.commands import Ask, Generate
from handlers.chat.feed import FollowedForm
from handlers.chat.forms import ResponseDraft, Summary, Token
from handlers.chat.turns.detokenizer import Detokenizer
from handlers.engine.contract import FinishReason, TokenEvent
from handlers.errors import TurnConflict
from handlers.models.answer_style import AnswerStyle
from handlers.models.prompt_format import PromptFormat
from handlers.requests.continuation import AnswerStart, Continuation, GivenToken, write_note
from handlers.requests.reply import JSON, PendingReply
from torchmoor.wire import headers as wire
from torchmoor.wire.receipt import CACHE_TIER, GENERATED_TOKENS


class TokenText(NamedTuple):
    """The text that a token completes, the token's own text, and the parts that are certain with it; see Token."""

    text: str
    own_text: str
    parts: Sequence[AnswerPart] | None


class AnswerWriter:
    """Writes an answer in its dialect's form, as a stream or whole.

    receipt: response headers with the answer's cost, sent with the first byte. start: another worker needs it to
    continue the stream; None if that is impossible. num_prompt_tokens: of the whole prompt, set before the engine adds
    tokens. The form of an answer that clients follow is a `FollowedForm`.
    """

    def __init__(self, reply: PendingReply, request: Ask | Generate, model: PromptFormat) -> None:
        self.receipt: dict[str, str] = {}
        self.start: AnswerStart | None = None
        self.num_prompt_tokens = 0
        self._reply = reply
        self._form = form = request.form
        self._notes_logprobs = isinstance(form, ResponseDraft) and form.has_logprobs
        self._eos_token_ids = model.eos_token_ids
        self._is_streaming = request.is_streaming
        queued = request.queued if isinstance(request, Ask) else None
        self._feed = None if queued is None else queued.feed
        parameters = request.parameters
        self._detokenizer = Detokenizer(model.tokenizer, parameters.stop, parameters.min_tokens or 0)
        tools = parameters.tools
        self._has_tools = tools is not None
        self._custom = () if tools is None else tools.custom
        # An answer that must call is ended by its grammar.
        self._ends_after_call = tools is not None and not (tools.is_parallel or tools.must_call)
        self._is_read_at_once = bool(parameters.stop) or self._ends_after_call
        self._name = _name_answer(request, reply)
        self._make_reader: Callable[[], AnswerReader] | None = None
        self._reader: AnswerReader | None = None
        self._encoding = threading.Lock()  # one thread at a time takes tokens from `_added`, and writes them
        self._added: deque[tuple[TokenEvent, TokenText | None]] = deque()  # tokens and their text, if it is known
        self._last: tuple[TokenEvent, TokenText | None] | None = None
        self._is_begun = False
        self._num_tokens = 0  # of the answer so far
        self._num_chars = 0  # number of characters of the tokens' own texts so far

    def read_as(self, style: AnswerStyle) -> None:
        """Split the answer into parts by its style, if it can have parts besides content. Call before adding tokens."""
        if self._has_tools or style.thought is not None:
            self._make_reader = partial(
                AnswerReader, style, has_tools=self._has_tools, name=self._name, custom=self._custom
            )
            self._reader = self._make_reader()

    def resume(self, given: Continuation) -> None:
        """Continue a stream after the tokens that its client has. Raises TurnConflict if they end the answer."""
        self.start = given.start
        with self._encoding:
            self._is_begun = given.has_begun
            if given.has_begun:
                self._form.begin()
            for token in given.tokens:
                self._form.token(self._token(TokenEvent(token.id, token.logprob, top=token.top), None), None)
        if self._is_ended_by_text:
            raise TurnConflict("the answer that is to be continued has ended")

    def add(self, event: TokenEvent) -> FinishReason | None:
        """Add a token. Return the finish reason if it is the last. Engine thread."""
        reason = event.finish_reason
        text = self._decode(event) if self._is_read_at_once else None
        if self._is_ended_by_text:
            reason = FinishReason.STOP
        if reason is None:
            self._added.append((event, text))
        else:
            self._last = event, text
        return reason

    @property
    def _is_ended_by_text(self) -> bool:
        """Whether the text so far ends the answer: with a stop string, or with the only call that it may have."""
        has_call = self._ends_after_call and self._reader is not None and self._reader.has_whole_call
        return has_call or self._detokenizer.is_stopped

    def show(self) -> None:
        """Notify a stream's reader of the added tokens. Engine thread."""
        if self._is_streaming:
            self._begin()
            self._reply.announce()
        elif self._feed is not None:
            self._feed.announce()

    @property
    def is_begun(self) -> bool:
        """Return whether the client may have received a part of the answer, from this worker or from another."""
        return self._is_begun or self._reply.is_streaming

    def begin_feed(self) -> None:
        """Let clients follow the answer from now on, if they may. Its form has a restored answer, if there is one."""
        if self._feed is not None:
            self._feed.begin(self._followed_form, self._feed_added)

    @property
    def _followed_form(self) -> FollowedForm:
        return cast(FollowedForm, self._form)

    def _feed_added(self) -> None:
        """Pass what was added on to the clients that follow."""
        assert self._feed is not None
        with self._encoding:
            self._feed.add(self._followed_form, self._take_added())

    def read_rest(self) -> tuple[str, list[Token]]:
        """Return the whole text and the tokens that are not streamed yet. Call this after the last token."""
        assert self._last is not None
        if self._reply.is_streaming:
            self._write_added()
        elif self._feed is not None:
            self._feed_added()
        tokens = [*self._take_added(), self._token(*self._last, is_last=True)]
        return self._detokenizer.text, tokens

    @property
    def message(self) -> AnswerMessage | None:
        """The answer by its parts so far."""
        return None if self._reader is None else self._reader.message

    def end(self, token: Token, summary: Summary) -> None:
        """Send the last token and the end of the stream, or the whole answer."""
        if self._is_streaming:
            self._begin()
            self._write_added()
            note = str(summary.num_tokens) if self.start is not None else ""
            self._reply.write(self._form.token(token, summary), note, is_end=True)
        else:
            num_tokens = {GENERATED_TOKENS: str(summary.num_tokens)}
            headers = {**JSON, **self.receipt, **num_tokens}
            self._reply.finish(headers, self._form.whole(summary))
            if self._feed is not None:
                self._feed.end(token)

    def end_with(self, text: str) -> None:
        """Send a stored answer, or the rest of it.

        Raises TurnConflict if the client has received the start of another answer.
        """
        is_shown = self.is_begun or self._feed is not None
        shown = self._detokenizer.shown if is_shown else ""
        if not is_shown and self._make_reader is not None:
            self._reader = self._make_reader()  # the other one may have read an answer that was not sent
        form = self._form
        if not (form.has_begun_as_restored() if isinstance(form, ResponseDraft) else text.startswith(shown)):
            raise TurnConflict("another answer to this question has been recorded; send it again to get that answer")
        self.receipt[CACHE_TIER] = "answer"
        reason = FinishReason.EOS.value
        summary = Summary(text=text, finish_reason=reason, num_tokens=0, num_prompt_tokens=0, seed=None)
        rest, parts = text.removeprefix(shown), None
        if self._reader is not None:
            parts = [*self._reader.read(rest), *self._reader.finish()]
            summary = replace(summary, message=self._reader.message)
        self.begin_feed()
        number = self._num_tokens + 1
        self.end(Token(0, rest, 0.0, False, parts, offset=len(shown), own_text=rest, number=number), summary)

    def _begin(self) -> None:
        if not self._reply.is_streaming:
            headers = {"Content-Type": self._form.content_type, **self.receipt}
            if self.start is not None:
                headers[wire.CONTINUABLE] = self.start.encode()
            self._reply.begin(headers, self._form.error, self._write_added, is_marked=self.start is not None)

    def _write_added(self) -> None:
        """Write the added tokens, preceded by the form's beginning if they are the first."""
        with self._encoding:
            is_first, self._is_begun = not self._is_begun, True
            parts = [self._form.begin()] if is_first else []
            tokens = self._take_added()
            parts += [self._form.token(token, None) for token in tokens]
            self._reply.write(b"".join(parts), self._note(tokens, is_first=is_first))

    def _note(self, tokens: Sequence[Token], *, is_first: bool) -> str:
        """Return what another worker needs of these tokens; empty if none can continue the answer."""
        if self.start is None:
            return ""
        given = [GivenToken(each.id, each.logprob, tuple((one.id, one.logprob) for one in each.top)) for each in tokens]
        return write_note(given, is_first=is_first, has_logprobs=self._notes_logprobs)

    def _take_added(self) -> list[Token]:
        added = [self._added.popleft() for _ in range(len(self._added))]
        return [self._token(*item) for item in added]

    def _token(self, event: TokenEvent, decoded: TokenText | None, *, is_last: bool = False) -> Token:
        assert event.token_id is not None
        text, own_text, parts = decoded or self._decode(event)
        if is_last and self._reader is not None and parts is not None:
            parts = [*parts, *self._reader.finish()]
        top = [
            Token(token, "", logprob, token in self._eos_token_ids, own_text=self._detokenizer.text_of(token))
            for token, logprob in event.top
        ]
        offset, self._num_chars = self._num_chars, self._num_chars + len(own_text)
        self._num_tokens += 1
        return Token(
            event.token_id,
            text,
            event.logprob,
            event.token_id in self._eos_token_ids,
            parts,
            top=top,
            offset=offset,
            own_text=own_text,
            number=self._num_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
        )

    def _decode(self, event: TokenEvent) -> TokenText:
        assert event.token_id is not None
        text, own_text = self._detokenizer.push(event.token_id), self._detokenizer.added
        if event.finish_reason is not None:
            text, own_text = text + self._detokenizer.finish(), own_text + self._detokenizer.added
        return TokenText(text, own_text, None if self._reader is None else self._reader.read(text))


def _name_answer(request: Ask | Generate, reply: PendingReply) -> str:
    """Return a name for the answer. All attempts of one request have the same name."""
    if isinstance(request, Ask) and request.queued is not None:  # another attempt is another request
        return f"{request.session_id} {request.queued.number}"
    return f"{reply.received_at} {reply.choice}"
