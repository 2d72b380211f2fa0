"""The three forms of a streamed answer: plain text, TGI's server-sent events, LMI's JSON lines."""

import json
from dataclasses import dataclass
from typing import Protocol

from handlers.chat.wire import StreamFormat
from handlers.errors import HandlerError

ERROR_SEPARATOR = b"\x1e"  # in a plain text stream, what follows it is not text but an error's JSON


@dataclass(frozen=True, slots=True)
class Token:
    """One token as a stream shows it. `text` is what became certain with it, often but not always its own text."""

    id: int
    text: str
    logprob: float
    is_special: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """The end of an answer."""

    text: str
    finish_reason: str
    num_tokens: int
    num_prompt_tokens: int
    seed: int | None

    def details(self) -> dict[str, object]:
        return {
            "finish_reason": self.finish_reason,
            "generated_tokens": self.num_tokens,
            "input_length": self.num_prompt_tokens,
            "seed": self.seed,
        }


class StreamWriter(Protocol):
    """Bytes of a stream. The last token comes with the summary, so that `generated_text` ends the stream as in TGI."""

    content_type: str

    def token(self, token: Token, summary: Summary | None) -> bytes: ...

    def error(self, error: HandlerError) -> bytes: ...


class PlainTextStream:
    content_type = "text/plain; charset=utf-8"

    def token(self, token: Token, summary: Summary | None) -> bytes:
        return token.text.encode()

    def error(self, error: HandlerError) -> bytes:
        return ERROR_SEPARATOR + error.body()


class TgiStream:
    """`data:{"token": ..., "generated_text": ..., "details": ...}` events."""

    content_type = "text/event-stream"

    def token(self, token: Token, summary: Summary | None) -> bytes:
        return _line(b"data:", _token_object(token, summary), b"\n\n")

    def error(self, error: HandlerError) -> bytes:
        return _line(b"data:", {"error": error.message, "error_type": error.code}, b"\n\n")


class LmiStream:
    """One JSON object a line, `generated_text` and `details` in the last."""

    content_type = "application/jsonlines"

    def token(self, token: Token, summary: Summary | None) -> bytes:
        value = _token_object(token, summary)
        if summary is None:
            del value["generated_text"], value["details"]
        return _line(b"", value, b"\n")

    def error(self, error: HandlerError) -> bytes:
        return _line(b"", {"error": error.message, "code": error.status}, b"\n")


def stream_writer(form: StreamFormat) -> StreamWriter:
    writers: dict[StreamFormat, type[PlainTextStream] | type[TgiStream] | type[LmiStream]] = {
        StreamFormat.TEXT: PlainTextStream,
        StreamFormat.TGI: TgiStream,
        StreamFormat.LMI: LmiStream,
    }
    return writers[form]()


def _token_object(token: Token, summary: Summary | None) -> dict[str, object]:
    return {
        "token": {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.is_special},
        "generated_text": None if summary is None else summary.text,
        "details": None if summary is None else summary.details(),
    }


def _line(prefix: bytes, value: object, suffix: bytes) -> bytes:
    return prefix + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + suffix
