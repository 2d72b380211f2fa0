"""JSON values of a stream, parsed in each dialect. Does not handle bytes.

* Text Generation Inference: `{"token": {"id", "text", "logprob", "special"}, "generated_text", "details"}`, where the
  last two are null before the end.
* LMI, newer: the same with `log_prob` and `special_token`; older: `{"outputs": ["text"]}`, without a last one.
* OpenAI: `{"choices": [{"delta": {"content"}, "logprobs", "finish_reason"}], "usage"}`, also `"text"` of plain
  completions.
* Whole answers of the same servers, for a request without streaming.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchmoor.clients.errors import ErrorInStream, UnreadableStream


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a question and its answer. prompt_tokens: None if the server does not report it."""

    prompt_tokens: int | None
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer as it arrives, often one token.

    finish_reason: as the server names it (`eos_token`, `length`, `stop_sequence`; OpenAI's `stop`), with the last text.
    """

    text: str = ""
    token_id: int | None = None
    logprob: float | None = None
    finish_reason: str | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A parsed value.

    is_end: the answer is complete. has_no_end: the dialect does not mark the end. whole: the whole text, for a reader
    that received no tokens of it.
    """

    piece: Piece
    is_end: bool = False
    has_no_end: bool = False
    whole: str | None = None


def read_value(value: Any) -> StreamEvent:
    """Parse a value. Raises ErrorInStream if it is an error, UnreadableStream if no dialect matches."""
    if isinstance(value, list) and len(value) == 1:  # a whole answer of Text Generation Inference
        value = value[0]
    if not isinstance(value, dict):
        raise UnreadableStream("the stream has a JSON value that is not an object")
    if value.get("error") is not None or value.get("object") == "error":
        raise _error(value)
    try:
        if "choices" in value:
            return _openai(value)
        if "token" in value or "generated_text" in value:
            return _generation(value)
        if "outputs" in value:
            (text,) = value["outputs"] or [""]
            return StreamEvent(Piece(_text(text)), has_no_end=True)
        if "response_text" in value:
            return StreamEvent(
                Piece(finish_reason=_details(value).get("finish_reason")), True, whole=value["response_text"]
            )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UnreadableStream("an event of the stream does not have the form of its dialect") from error
    known = "token, generated_text, outputs, choices or response_text"
    raise UnreadableStream(f"an event of the stream has none of {known}")


def _generation(value: dict[str, Any]) -> StreamEvent:
    token, details, whole = value.get("token") or {}, _details(value), value.get("generated_text")
    if details.get("finish_reason") == "error":  # LMI, when the model failed
        raise ErrorInStream("the model failed in mid-answer")
    is_special = token.get("special", token.get("special_token", False))
    token_id = token.get("id")
    if isinstance(token_id, list):  # early versions of LMI
        token_id = token_id[0]
    usage = None
    if isinstance(details.get("generated_tokens"), int):
        usage = Usage(details.get("input_length"), details["generated_tokens"])
    piece = Piece(
        text="" if is_special else _text(token.get("text")),
        token_id=token_id,
        logprob=token.get("logprob", token.get("log_prob")),
        finish_reason=details.get("finish_reason"),
        usage=usage,
    )
    return StreamEvent(piece, is_end=whole is not None, whole=None if token else _text(whole))


def _openai(value: dict[str, Any]) -> StreamEvent:
    usage = None
    if counts := value.get("usage"):
        usage = Usage(counts.get("prompt_tokens"), counts["completion_tokens"])
    choices = [choice for choice in value["choices"] if choice.get("index", 0) == 0]
    if not choices:
        return StreamEvent(Piece(usage=usage))
    choice = choices[0]
    reason = choice.get("finish_reason")
    if reason == "error":
        raise ErrorInStream("the model failed in mid-answer")
    if choice.get("message"):
        return StreamEvent(
            Piece(finish_reason=reason, usage=usage), is_end=True, whole=_text(choice["message"]["content"])
        )
    text = choice["delta"].get("content") if choice.get("delta") else choice.get("text")
    scores = (choice.get("logprobs") or {}).get("content") or []  # of chat completions
    logprob = scores[0].get("logprob") if len(scores) == 1 else None
    piece = Piece(_text(text), logprob=logprob, finish_reason=reason, usage=usage)
    return StreamEvent(piece, is_end=reason is not None)


def _details(value: dict[str, Any]) -> dict[str, Any]:
    return value.get("details") or {}


def _text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(type(value))
    return value


def _error(value: dict[str, Any]) -> ErrorInStream:
    error = value.get("error") or value
    if not isinstance(error, dict):
        return ErrorInStream(str(error), kind=value.get("error_type"), status=_status(value.get("code")))
    code = error.get("code")
    kind = code if isinstance(code, str) else error.get("type")
    return ErrorInStream(str(error.get("message", "")), kind=kind, status=_status(code))


def _status(code: Any) -> int | None:
    return code if isinstance(code, int) else None
