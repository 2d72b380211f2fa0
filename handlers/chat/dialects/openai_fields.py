"""What OpenAI's chat completions and completions share: fields of requests and of answers, and their checks."""

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from handlers.chat.checks import is_unicode, names
from handlers.chat.forms import Summary, encode
from handlers.chat.parameters import OPENAI_NAMES, check_parameter
from handlers.errors import HandlerError, InvalidRequest
from handlers.requests import Incoming
from torchmoor.wire import headers as wire

MAX_NAME_CHARS = 256
EFFORTS = (None, "none", "minimal", "low", "medium", "high", "xhigh")
SUMMARIES = (None, "auto", "concise", "detailed")
REASONING_WANTED = "an object with an effort and a summary"
IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key"}  # a client's own labels
DONE = b"data: [DONE]\n\n"  # the end of a complete stream

Neutral = Mapping[str, tuple[Callable[[Any], bool], str]]
"""Fields that are not supported: which values have no effect, and how an error describes these."""


def refuse_unsupported(given: Mapping[str, Any], fields: set[str], neutral: Neutral, what: str) -> None:
    """Raise InvalidRequest for an unknown field, or for one of `neutral` with another value. what: the bodies' name."""
    for name, (is_neutral, wanted) in neutral.items():
        if name in given and not is_neutral(given[name]):
            raise InvalidRequest(f"'{name}' must be {wanted}", param=name)
    unknown = set(given) - fields - IGNORED - set(neutral) - set(OPENAI_NAMES)
    if unknown:
        raise InvalidRequest(f"{what} have no field {names(unknown)} here", param=min(unknown)[:MAX_NAME_CHARS])


def read_flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"'{name}' must be true or false", param=name)
    return value


def make_answer_id(prefix: str, incoming: Incoming) -> str:
    """Make the id from the proxy's id of the request, so that an answer can be found in the logs."""
    return f"{prefix}-{incoming.headers.get(wire.REQUEST_ID) or uuid.uuid4()}"


def read_model(given: Mapping[str, Any], incoming: Incoming) -> str:
    """Return the model's name that the client used. The routing has chosen the model already."""
    if "model" not in given and incoming.headers.get(wire.NEEDS_MODEL):
        raise InvalidRequest("you must provide a model parameter: the endpoint's name as 'model'", param="model")
    model = given.get("model") or incoming.caller.endpoint or "default"
    if not isinstance(model, str) or len(model) > MAX_NAME_CHARS or not is_unicode(model):
        raise InvalidRequest(f"'model' must be a text of at most {MAX_NAME_CHARS} characters", param="model")
    return model


def read_include_usage(given: Mapping[str, Any], is_streaming: bool) -> bool:
    """Return whether a stream has to end with its usage."""
    options = given.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or not is_streaming:
        raise InvalidRequest("'stream_options' must be an object, and needs 'stream': true", param="stream_options")
    options = {name: value for name, value in options.items() if value is not None}
    unknown = set(options) - {"include_usage", "include_obfuscation"}
    if unknown:
        raise InvalidRequest(f"stream_options has no field {names(unknown)}", param="stream_options")
    return read_flag(options, "include_usage")


def read_sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of Parameters that OpenAI's names give."""
    values: dict[str, Any] = {}
    for called, name in OPENAI_NAMES.items():
        if called in given:
            value = [given[called]] if name == "stop" and isinstance(given[called], str) else given[called]
            values[name] = check_parameter(name, value, f"'{called}'")
            if name == "max_new_tokens":
                values["length_field"] = called
    return values


def is_reasoning(given: Any) -> bool:
    """Return whether a value is OpenAI's `reasoning`: an effort and a kind of summary."""
    return (
        isinstance(given, dict)
        and set(given) <= {"effort", "summary"}
        and given.get("effort") in EFFORTS
        and given.get("summary") in SUMMARIES
    )


def find_reasoning(given: Mapping[str, Any]) -> str:
    """Return the field in which a request asks for reasoning; empty if none does. How much is the model's own choice.

    given: a request whose fields `is_reasoning` has checked.
    """
    reasoning = given.get("reasoning", {})
    if reasoning.get("summary") is not None or reasoning.get("effort") not in (None, "none"):
        return "reasoning"
    return "" if given.get("reasoning_effort") in (None, "none") else "reasoning_effort"


def write_event(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def write_error(error: HandlerError) -> bytes:
    """Encode an error without DONE, so that half an answer never looks complete."""
    return b"data: " + error.body() + b"\n\n"


def name_finish_reason(summary: Summary) -> str:
    """Return OpenAI's word: the model's own end and a stop string are both "stop"."""
    return "length" if summary.finish_reason == "length" else "stop"


def write_usage(summary: Summary) -> dict[str, Any]:
    prompt, answer = summary.num_prompt_tokens, summary.num_tokens
    num_reasoning = 0 if summary.message is None else summary.message.num_reasoning_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": summary.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
    }
