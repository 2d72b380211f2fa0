"""Several answers to one request without a session: they share the prompt, and each is sampled by itself.

The first answer computes the prompt. With its first token the others begin, which find the prompt in the KV cache. Each
answer is a generation with a reply of its own, whose stream is read into the client's. The request fails as a whole: if
one answer fails, the others are stopped. Another worker cannot continue such a stream.
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
    """Generates the answers to one request, and passes them to its reply. prompt: set once it is composed."""

    def __init__(self, parts: GenerationParts, request: Generate, reply: PendingReply) -> None:
        self._parts = parts
        self._request = request
        self._reply = reply
        form: Any = request.form
        self.form: ChoicesForm = form
        self.prompt: Prompt | None = None
        self._lock = threading.RLock()
        self._replies = [_ChoiceReply(self, reply, number) for number in range(request.num_choices)]
        forms = [replace(form, index=i) for i in range(request.num_choices)]
        self._forms = [_ChoiceForm(each, is_written=request.is_streaming) for each in forms]
        self._first = _Choice(self, parts, self._request_of(0), self._replies[0])
        self._num_using = request.num_choices  # answers that may need the prompt's images
        self._headers: dict[str, str] = {}  # of the first answer
        self._num_ended = 0
        self._is_begun = False
        self._is_over = False

    def start(self) -> None:
        """Begin. Raises as `Completion.start`."""
        for each in self._replies:
            each.on_end(partial(self._on_end, each))
        self._first.start()
        self._reply.on_cancel(self._stop)

    def _request_of(self, index: int) -> Generate:
        """Make the request for one answer, with a seed of its own if the request has one."""
        parameters = self._request.parameters
        if index and parameters.seed is not None:
            derived = hashlib.blake2b(f"{parameters.seed} {index}".encode(), digest_size=_SEED_BYTES).digest()
            parameters = replace(parameters, seed=int.from_bytes(derived, "big"))
        return replace(self._request, parameters=parameters, form=self._forms[index], is_streaming=True, num_choices=1)

    def fetch(self, image: Image) -> bytes:
        """Return the bytes of one of the prompt's images, which came with the request."""
        return self._first.fetch_own(image)

    def end_use(self) -> None:
        """Count an answer that no longer needs the prompt's images."""
        with self._lock:
            self._num_using -= 1
            is_last = not self._num_using
        if is_last:
            self._first.release_own()

    # Beginning

    def begin(self, headers: Mapping[str, str]) -> None:
        """Let the other answers begin. The first answer has its first token, so the prompt is in the cache."""
        with self._lock:
            if self._is_begun:
                return
            self._is_begun = True
            self._headers = dict(headers)
            if self._request.is_streaming:
                self._reply.begin(headers, self.form.error, self._pass_on)
        try:
            self._parts.preparing.submit(self._reply.line, self._start_others)
        except RuntimeError:  # the worker is stopping, which ends the first answer, too
            self._abandon_others()

    def _start_others(self) -> None:
        for index, reply in list(enumerate(self._replies))[1:]:
            with reply.guarded():
                reply.raise_if_cancelled()
                # The prompt is there, with its images.
                _Choice(self, self._parts, self._request_of(index), reply).begin(is_slow=False, line=None)
                continue
            self.end_use()

    def _abandon_others(self) -> None:
        for _ in self._replies[1:]:
            self.end_use()

    def announce(self) -> None:
        """Note that one of the answers has more text."""
        if self._request.is_streaming:
            self._reply.announce()

    # The pump's thread, and those that end answers

    def _pass_on(self) -> None:
        """Move what the answers have written to the client's stream."""
        with self._lock:
            for reply in self._replies:
                taken = reply.take(_ALL) if reply.is_streaming else None
                if isinstance(taken, ReplyPieces) and taken.data:
                    self._reply.write(taken.data)

    def _on_end(self, reply: "_ChoiceReply") -> None:
        """End the request with its last answer, or with the first one that fails."""
        with self._lock:
            if self._is_over:
                return
            if reply.error is None:
                self._pass_on()
            self._num_ended += 1
            self._is_over = reply.error is not None or self._num_ended == len(self._replies)
            if not self._is_over:
                return
            summaries = [form.summary for form in self._forms]
        if reply.error is not None:
            self._fail(reply.error)
        else:
            self._finish([each for each in summaries if each is not None])

    def _finish(self, summaries: list[Summary]) -> None:
        if self._request.is_streaming:
            self._reply.write(self.form.end(summaries), is_end=True)
            return
        num_tokens = sum(each.num_tokens for each in summaries)
        headers = {**self._headers, **JSON, GENERATED_TOKENS: str(num_tokens)}
        self._reply.finish(headers, self.form.whole_of(summaries))

    def _fail(self, error: HandlerError) -> None:
        self._stop(error)
        with self._lock:
            is_begun, self._is_begun = self._is_begun, True
        if not is_begun:
            self._abandon_others()
        self._reply.fail(error)

    def _stop(self, error: HandlerError) -> None:
        """Stop all answers."""
        for reply in self._replies:
            reply.cancel(error)


class _Choice(Completion):
    """One answer. The first composes the prompt, the others use it."""

    def __init__(self, choices: Choices, parts: GenerationParts, request: Generate, reply: PendingReply) -> None:
        super().__init__(parts, request, reply)
        self._choices = choices

    def compose(self, raise_if_stopped: Callable[[], None]) -> Prompt:
        choices = self._choices
        if choices.prompt is None:
            choices.prompt = super().compose(raise_if_stopped)
        return choices.prompt

    def fetch(self, image: Image) -> bytes:
        return self._choices.fetch(image)

    def fetch_own(self, image: Image) -> bytes:
        return super().fetch(image)

    def release_own(self) -> None:
        """Release the images, which no answer needs now."""
        super()._release_images()

    def _release(self) -> None:
        self._cache.unpin()
        self._choices.end_use()


class _ChoiceForm:
    """Passes one answer's tokens to the request's form and keeps the answer's summary. Implements `AnswerForm`.

    is_written: the client gets a stream, too.
    """

    content_type = "text/event-stream"

    def __init__(self, form: ChoicesForm, *, is_written: bool) -> None:
        self.summary: Summary | None = None
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
    """The reply to one of the answers."""

    def __init__(self, choices: Choices, reply: PendingReply, number: int) -> None:
        super().__init__(reply.wake)
        self.choice = number
        self.request_id, self.inference_id, self.line = reply.request_id, reply.inference_id, reply.line
        self.received_at, self.adapter = reply.received_at, reply.adapter
        self._choices = choices
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
        self._choices.begin(headers)

    def announce(self) -> None:
        super().announce()
        self._choices.announce()
