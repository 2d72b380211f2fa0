"""Forms of answers: the protocol that each dialect implements for streams and for whole answers.

A form is created for one request with that request's options. The turn passes it tokens and a summary, and does not
depend on the dialect.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from handlers.chat.answer_parts import AnswerMessage, AnswerPart
from handlers.chat.items import Item
from handlers.chat.logprobs import TokenScore
from handlers.chat.messages import Message
from handlers.errors import HandlerError

UTF8_EVENTS = "text/event-stream; charset=utf-8"  # as OpenAI sends it: without a charset, requests reads ISO 8859-1
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # json.dumps would make one per token


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a stream.

    text: the text that has become certain with this token; with stop strings, it may begin or end elsewhere than the
    token's own text, and ends before the stop string. own_text: the token's own text, even of a stop string.
    parts: the parts of the answer that have become certain; None if the answer has only content, which is `text`. top:
    the likeliest tokens at this position, with their own texts, if the request asks for them. offset: number of
    characters of the own texts before this token. number: its place in the answer, from 1. num_prompt_tokens: of the
    whole prompt.
    """

    id: int
    text: str
    logprob: float
    is_special: bool
    parts: Sequence[AnswerPart] | None = None
    top: "Sequence[Token]" = ()
    offset: int = 0
    own_text: str = ""
    number: int = 0
    num_prompt_tokens: int = 0

    @property
    def score(self) -> TokenScore:
        return [self.own_text, self.logprob, [[each.own_text, each.logprob] for each in self.top]]


@dataclass(frozen=True, slots=True)
class Summary:
    """The end of an answer. `text` is the answer alone; finish_reason is a value of the engine's FinishReason.

    message: the answer by its parts; None if it has content only.
    """

    text: str
    finish_reason: str
    num_tokens: int
    num_prompt_tokens: int
    seed: int | None
    tokens: Sequence[Token] = ()
    message: AnswerMessage | None = None
    num_cached_tokens: int = 0  # tokens of the prompt that were in the KV cache


class AnswerForm(Protocol):
    """Encodes an answer. A stream is `begin`, then `token` for each token; the last one comes with the summary."""

    @property
    def content_type(self) -> str:
        """The content type of a stream."""
        ...

    def begin(self) -> bytes:
        """Return the bytes that precede the first token."""
        ...

    def token(self, token: Token, summary: Summary | None) -> bytes: ...

    def error(self, error: HandlerError) -> bytes:
        """Encode the end of a stream that fails. Before a stream begins, an error is `HandlerError.body`."""
        ...

    def whole(self, summary: Summary) -> bytes:
        """Encode a whole answer as JSON."""
        ...


class ChoicesForm(AnswerForm, Protocol):
    """Encodes several answers to one request, each with its index."""

    def part(self, token: Token, summary: Summary | None) -> bytes:
        """Encode one more token of an answer. The answer's last token comes with its summary."""
        ...

    def end(self, summaries: Sequence[Summary]) -> bytes:
        """Encode the end of the stream, behind the last tokens of all answers."""
        ...

    def whole_of(self, summaries: Sequence[Summary]) -> bytes:
        """Encode all answers as JSON."""
        ...


@runtime_checkable
class ResponseDraft(AnswerForm, Protocol):
    """The form of a turn of the Responses API. It has the turn's input, too, and makes its record in the journal."""

    @property
    def items(self) -> tuple[Item, ...]: ...

    @property
    def has_logprobs(self) -> bool:
        """Whether the record has the log probabilities of the answer's tokens."""
        ...

    @property
    def instructions(self) -> tuple[Message, ...]:
        """Text that precedes the conversation in this turn's prompt only."""
        ...

    @property
    def after(self) -> int | None:
        """The number of the session's first entries that this turn follows; None for all entries."""
        ...

    @property
    def may_drop(self) -> bool:
        """Whether the oldest turns may be left out of a prompt that is too long."""
        ...

    def branch(self, num_turns: int) -> None:
        """Let the turn follow the `num_turns` turns that a new session has copied."""
        ...

    def place(self, session_id: str, number: int) -> None:
        """Set the session, and the turn's number in it."""
        ...

    def record(self, summary: Summary) -> tuple[str, str]:
        """Return the answer and the response for the journal."""
        ...

    def restore(self, answer: str, response: str) -> str:
        """Take the answer that `record` returned for the first attempt of this request. Return its text."""
        ...

    def has_begun_as_restored(self) -> bool:
        """Return whether the output so far is the start of the restored answer."""
        ...


def encode(value: Any) -> bytes:
    """Encode a value as JSON on one line, in UTF-8."""
    return _ENCODER.encode(value).encode()
