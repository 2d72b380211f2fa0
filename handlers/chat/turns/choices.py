"""Several answers to one request without a session, each sampled by itself: to one prompt, or to several.

The first answer to a prompt computes it. With its first token the prompt's other answers begin, which find it in the KV
cache. Each answer is a generation with a reply of its own, whose stream is read into the client's. The request fails as
a whole: if one answer fails, the others are stopped. Another worker cannot continue such a stream.
"""

import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from handlers.chat.commands import Generate
from handlers.chat.forms import ChoicesForm, Summary, Token
from handlers.chat.images.store import Image
from handlers.chat.turns.completion import Completion
from handlers.chat.turns.generation_parts import GenerationParts
from handlers.chat.turns.question import Prompt
from handlers.errors import HandlerError
from handlers.requests.reply import JSON, PendingReply, ReplyPieces
from torchmoor.wire.receipt import GENERATED_TOKENS

_ALL = 1 << 62  # bytes of a choice's stream that are taken at once
_SEED_BYTES = 7


class Choices:
    """Generates the answers to one request, and passes them to its reply."""

    def __init__(self, parts: GenerationParts, request: Generate, reply: PendingReply) -> None:
        self._request = request
        self._reply = reply
        form: Any = request.form
        self.form: ChoicesForm = form
        self._lock = threading.RLock()
        texts = (request.prompt, *request.more_prompts)
        requests = [replace(request, prompt=text, more_prompts=()) for text in texts]
        self._prompts = [
            _SharedPrompt(self, parts, each, reply, number * request.num_choices)
            for number, each in enumerate(requests)
        ]
        self._answers = [answer for prompt in self._prompts for answer in prompt.answers]
        self._headers: dict[str, str] | None = None  # of the first answer that begins
        self._num_ended = 0
        self._is_over = False

    def start(self) -> None:
        """Begin. An error of the first answer to any prompt fails the request."""
        self._reply.on_cancel(self._stop)
        for answer in self._answers:
            answer.on_end(partial(self._on_end, answer))
        for prompt in self._prompts:
            if not self._is_over:
                prompt.start()

    def begin(self, headers: Mapping[str, str]) -> None:
        """Begin the client's stream with the first token of any answer, unless the request has failed."""
        with self._lock:
            if self._headers is None and not self._is_over:
                self._headers = dict(headers)
                if self._request.is_streaming:
                    self._reply.begin(headers, self.form.error, self._pass_on)

    def announce(self) -> None:
        """Note that one of the answers has more text."""
        if self._request.is_streaming:
            self._reply.announce()

    # The pump's thread, and those that end answers

    def _pass_on(self) -> None:
        """Move what the answers have written to the client's stream."""
        with self._lock:
            for answer in self._answers:
                taken = answer.take(_ALL) if answer.is_streaming else None
                if isinstance(taken, ReplyPieces) and taken.data:
                    self._reply.write(taken.data)

    def _on_end(self, answer: "_ChoiceReply") -> None:
        """End the request with its last answer, or with the first one that fails."""
        with self._lock:
            if self._is_over:
                return
            error = answer.error
            if error is None:
                self._pass_on()
            self._num_ended += 1
            self._is_over = error is not None or self._num_ended == len(self._answers)
            if not self._is_over:
                return
            summaries = [each.form.summary for each in self._answers]
        if error is not None:
            self._fail(error)
        else:
            self._finish([each for each in summaries if each is not None])

    def _finish(self, summaries: list[Summary]) -> None:
        if self._request.is_streaming:
            self._reply.write(self.form.end(summaries), is_end=True)
            return
        num_tokens = sum(each.num_tokens for each in summaries)
        headers = {**(self._headers or {}), **JSON, GENERATED_TOKENS: str(num_tokens)}
        self._reply.finish(headers, self.form.whole_of(summaries))

    def _fail(self, error: HandlerError) -> None:
        self._stop(error)
        for prompt in self._prompts:
            prompt.abandon()
        self._reply.fail(error)

    def _stop(self, error: HandlerError) -> None:
        """Stop all answers."""
        for answer in self._answers:
            answer.cancel(error)


class _SharedPrompt:
    """The answers to one prompt. prompt: set once it is composed. first_index: of the first answer, in the request."""

    def __init__(
        self, choices: Choices, parts: GenerationParts, request: Generate, reply: PendingReply, first_index: int
    ) -> None:
        self.prompt: Prompt | None = None
        self._choices = choices
        self._parts = parts
        self._line = reply.line
        self._lock = threading.Lock()
        self.answers = [_ChoiceReply(choices, self, request, reply, first_index, i) for i in range(request.num_choices)]
        self.first = _Choice(self, parts, self.answers[0])  # has the prompt's images
        self._num_using = request.num_choices  # answers that may need the prompt's images
        self._is_begun = False

    def start(self) -> None:
        with self.answers[0].guarded():
            self.first.start()

    def end_use(self) -> None:
        """Count an answer that no longer needs the prompt's images."""
        with self._lock:
            self._num_using -= 1
            is_last = not self._num_using
        if is_last:
            self.first.release_images()

    def begin(self, headers: Mapping[str, str]) -> None:
        """Let the other answers begin. The first answer has its first token, so the prompt is in the cache."""
        if not self._try_begin():
            return
        self._choices.begin(headers)
        try:
            self._parts.preparing.submit(self._line, self._start_others)
        except RuntimeError:  # the worker is stopping, which ends the first answer, too
            self._end_others()

    def _try_begin(self) -> bool:
        """Return True for the first call alone."""
        with self._lock:
            is_first, self._is_begun = not self._is_begun, True
        return is_first

    def _start_others(self) -> None:
        for answer in self.answers[1:]:
            with answer.guarded():
                answer.raise_if_cancelled()
                choice = _Choice(self, self._parts, answer)
                choice.begin(is_slow=False, line=None)  # the prompt is there, with its images
                continue
            self.end_use()

    def abandon(self) -> None:
        """Begin no further answers."""
        if self._try_begin():
            self._end_others()

    def _end_others(self) -> None:
        for _ in self.answers[1:]:
            self.end_use()


class _Choice(Completion):
    """Generates one answer. The first one to a prompt composes it, the others use it."""

    def __init__(self, shared: _SharedPrompt, parts: GenerationParts, reply: "_ChoiceReply") -> None:
        super().__init__(parts, reply.request, reply)
        self._shared = shared

    def compose(self, raise_if_stopped: Callable[[], None]) -> Prompt:
        shared = self._shared
        if shared.prompt is None:
            shared.prompt = super().compose(raise_if_stopped)
        return shared.prompt

    def fetch(self, image: Image) -> bytes:
        return Completion.fetch(self._shared.first, image)

    def _release(self) -> None:
        self._cache.unpin()
        self._shared.end_use()


class _ChoiceForm:
    """Passes one answer's tokens to the request's form and keeps the answer's summary. Implements `AnswerForm`.

    is_written: the client gets a stream, too.
    """

    def __init__(self, form: ChoicesForm, *, is_written: bool) -> None:
        self.summary: Summary | None = None
        self.content_type = form.content_type
        self._form = form
        self._is_written = is_written
        self._tokens: list[Token] = []

    def begin(self) -> bytes:
        return self._form.begin() if self._is_written else b""

    def token(self, token: Token, summary: Summary | None) -> bytes:
        if not self._is_written:
            self._tokens.append(token)
        if summary is not None:
            self.summary = replace(summary, tokens=self._tokens)
        return self._form.part(token, summary) if self._is_written else b""

    def error(self, error: HandlerError) -> bytes:
        """Write nothing: the request's own form does it."""
        return b""

    def whole(self, summary: Summary) -> bytes:
        raise AssertionError("a choice is streamed")


class _ChoiceReply(PendingReply):
    """The reply to one of the answers, with its own request and form.

    number: of the answer among its prompt's, each with its own seed.
    """

    def __init__(
        self,
        choices: Choices,
        prompt: _SharedPrompt,
        request: Generate,
        reply: PendingReply,
        first_index: int,
        number: int,
    ) -> None:
        super().__init__(reply.wake)
        self.choice = first_index + number
        form: Any = request.form
        self.form = _ChoiceForm(replace(form, index=self.choice), is_written=request.is_streaming)
        parameters = request.parameters
        if number and parameters.seed is not None:
            derived = hashlib.blake2b(f"{parameters.seed} {number}".encode(), digest_size=_SEED_BYTES).digest()
            parameters = replace(parameters, seed=int.from_bytes(derived, "big"))
        self.request = replace(request, parameters=parameters, form=self.form, is_streaming=True, num_choices=1)
        self.request_id, self.inference_id, self.line = reply.request_id, reply.inference_id, reply.line
        self.received_at, self.adapter = reply.received_at, reply.adapter
        self._choices = choices
        self._prompt = prompt
        self._whole_reply = reply

    @property
    def deadline(self) -> float:
        return self._whole_reply.deadline

    def shorten_deadline(self, deadline: float) -> float:
        """Shorten the deadline of the whole request, which the pump watches."""
        return self._whole_reply.shorten_deadline(deadline)

    def begin(
        self,
        headers: Mapping[str, str],
        encode_error: Callable[[HandlerError], bytes],
        fill: Callable[[], None] = lambda: None,
        *,
        is_marked: bool = False,
    ) -> None:
        super().begin(headers, encode_error, fill)
        self._prompt.begin(headers)

    def announce(self) -> None:
        super().announce()
        self._choices.announce()
