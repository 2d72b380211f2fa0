"""Forms of answers: the protocol that each dialect implements for streams and for whole answers.

A form is made for one request and knows the options of that request. The turn gives it tokens and a summary and does
not depend on the dialect.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from handlers.errors import HandlerError


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a stream. `text` is the text that is certain since the last token, often the token's own."""

    id: int
    text: str
    logprob: float
    is_special: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """The end of an answer. `text` is the answer alone; finish_reason is a value of the engine's FinishReason."""

    text: str
    finish_reason: str
    num_tokens: int
    num_prompt_tokens: int
    seed: int | None
    tokens: Sequence[Token] = ()

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


def encode(value: Any) -> bytes:
    """Encode a value as JSON on one line, in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
