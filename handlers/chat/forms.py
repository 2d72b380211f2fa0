"""Forms of answers: the protocol that each dialect implements for streams and for whole answers.

A form is made for one request and knows the options of that request. The turn gives it tokens and a summary and does
not depend on the dialect.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from handlers.chat.answer_parts import AnswerMessage, AnswerPart
from handlers.chat.items import Item
from handlers.chat.messages import Message
from handlers.errors import HandlerError

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # json.dumps would make one for each token


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a stream. `text` is the text that is certain since the last token, often the token's own.

    parts: what has become certain of the answer's parts; None if the answer has content only, which is the text.
    top: the likeliest tokens at its place, if the request asks for them; their texts are the tokens' own. offset: how
    many characters the answer has before it.
    """

    id: int
    text: str
    logprob: float
    is_special: bool
    parts: Sequence[AnswerPart] | None = None
    top: "Sequence[Token]" = ()
    offset: int = 0


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
    num_cached_tokens: int = 0  # of the prompt, which the KV cache had

    def details(self) -> dict[str, object]:
        return {
            "finish_reason": self.finish_reason,
            "generated_tokens": self.num_tokens,
            "input_length": self.num_prompt_tokens,
            "seed": self.seed,
        }


class AnswerForm(Protocol):
    """Encodes an answer. A stream is `begin`, then `token` for each token; the last one comes with the summary."""

    @property
    def content_type(self) -> str:
        """The content type of a stream."""
        ...

    def begin(self) -> bytes:
        """Encode what precedes the first token."""
        ...

    def token(self, token: Token, summary: Summary | None) -> bytes: ...

    def error(self, error: HandlerError) -> bytes:
        """Encode the end of a stream that fails. Before a stream begins, an error is `HandlerError.body`."""
        ...

    def whole(self, summary: Summary) -> bytes:
        """Encode a whole answer as JSON."""
        ...


class ResponseDraft(Protocol):
    """What a turn of the Responses API says, and how it is kept. Made for one request, like its form."""

    @property
    def items(self) -> tuple[Item, ...]: ...

    @property
    def instructions(self) -> tuple[Message, ...]:
        """What precedes the conversation in this turn's prompt, and in no other."""
        ...

    @property
    def after(self) -> int | None:
        """The number of the session's entries that the turn follows; None for all that there are."""
        ...

    @property
    def may_drop(self) -> bool:
        """Whether the oldest turns may be left out of a prompt that is too long."""
        ...

    def place(self, session_id: str, number: int) -> None:
        """Receive the session, and the turn's number in it."""
        ...

    def record(self, summary: Summary) -> tuple[str, str]:
        """Return the answer and the response as the journal keeps them."""
        ...

    def restore(self, answer: str, response: str) -> str:
        """Answer with what `record` returned when the request came first. Return the text."""
        ...


def encode(value: Any) -> bytes:
    """Encode a value as JSON on one line, in UTF-8."""
    return _ENCODER.encode(value).encode()
