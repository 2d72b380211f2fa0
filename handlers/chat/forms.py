"""How an answer is written: one form for each dialect, for streams and for whole answers.

A form is made for one request and knows what that request asked of it; the turn gives it tokens and a summary, and
never looks at which form it is.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from handlers.errors import BadImage, BadInput, HandlerError, NoRoom
from torchmoor.wire.marked_text import ERROR_MARK

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Token:
    """One token as a stream shows it. `text` is what became certain with it, often but not always its own text."""

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
    """Bytes of an answer. A stream is `begin`, then `token` for each; the last comes with the summary, and ends it."""

    @property
    def content_type(self) -> str:
        """Of a stream."""
        ...

    @property
    def whole_content_type(self) -> str: ...

    def begin(self) -> bytes:
        """What stands before the first token."""
        ...

    def token(self, token: Token, summary: Summary | None) -> bytes: ...

    def error(self, error: HandlerError) -> bytes:
        """The end of a stream that cannot be finished. Before a stream, an error is `HandlerError.body`."""
        ...

    def whole(self, summary: Summary) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionForm:
    """Plain text, or `{"response_text": ...}`.

    text_before: the question, if the client wants it before the answer. has_details: tell of tokens, too.
    """

    text_before: str = ""
    has_details: bool = False

    content_type = "text/plain; charset=utf-8"
    whole_content_type = JSON

    def begin(self) -> bytes:
        return self.text_before.encode()

    def token(self, token: Token, summary: Summary | None) -> bytes:
        return token.text.encode()

    def error(self, error: HandlerError) -> bytes:
        return ERROR_MARK + error.body()

    def whole(self, summary: Summary) -> bytes:
        body: dict[str, object] = {"response_text": self.text_before + summary.text}
        if self.has_details:
            body["details"] = summary.details()
        return encode(body)


@dataclass(frozen=True, slots=True, kw_only=True)
class TgiForm:
    """Text Generation Inference: events `data:{"token", "generated_text", "details"}`, or a list of one object."""

    text_before: str = ""
    has_details: bool = False

    content_type = "text/event-stream"
    whole_content_type = JSON

    def begin(self) -> bytes:
        return b""

    def token(self, token: Token, summary: Summary | None) -> bytes:
        value = {
            "token": _tgi_token(token),
            "generated_text": None if summary is None else self.text_before + summary.text,
            "details": None if summary is None else summary.details(),
        }
        return event(value)

    def error(self, error: HandlerError) -> bytes:
        return event({"error": error.message, "error_type": _tgi_error_type(error)})

    def whole(self, summary: Summary) -> bytes:
        body: dict[str, object] = {"generated_text": self.text_before + summary.text}
        if self.has_details:
            tokens = [_tgi_token(token) for token in summary.tokens]
            body["details"] = {**summary.details(), "prefill": [], "tokens": tokens}
        return encode([body])


@dataclass(frozen=True, slots=True, kw_only=True)
class LmiForm:
    """Large Model Inference: one JSON object a line, `generated_text` and `details` in the last; or one object.

    are_outputs: the older lines, `{"outputs": ["text"]}`.
    """

    text_before: str = ""
    has_details: bool = False
    are_outputs: bool = False

    content_type = "application/jsonlines"
    whole_content_type = JSON

    def begin(self) -> bytes:
        if self.are_outputs and self.text_before:
            return _line({"outputs": [self.text_before]})
        return b""

    def token(self, token: Token, summary: Summary | None) -> bytes:
        if self.are_outputs:
            return _line({"outputs": [token.text]}) if token.text else b""
        value: dict[str, object] = {"token": _lmi_token(token)}
        if summary is not None:
            value["generated_text"] = self.text_before + summary.text
            value["details"] = summary.details()
        return _line(value)

    def error(self, error: HandlerError) -> bytes:
        return _line({"error": error.message, "code": error.status})

    def whole(self, summary: Summary) -> bytes:
        body: dict[str, object] = {"generated_text": self.text_before + summary.text}
        if self.has_details:
            body["details"] = {**summary.details(), "tokens": [_lmi_token(token) for token in summary.tokens]}
        return encode(body)


def encode(value: Any) -> bytes:
    """JSON on one line, as UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def event(value: Any) -> bytes:
    """A server-sent event as Text Generation Inference writes it, without a space: readers cut off five characters."""
    return b"data:" + encode(value) + b"\n\n"


def _line(value: Any) -> bytes:
    return encode(value) + b"\n"


def _tgi_token(token: Token) -> dict[str, object]:
    return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.is_special}


def _lmi_token(token: Token) -> dict[str, object]:
    return {"id": token.id, "text": token.text, "log_prob": token.logprob, "special_token": token.is_special}


def _tgi_error_type(error: HandlerError) -> str:
    """The words of that protocol, from which its clients choose their exceptions."""
    if isinstance(error, BadInput | BadImage):
        return "validation"
    return "overloaded" if isinstance(error, NoRoom) else "generation"
