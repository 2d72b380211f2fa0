"""Fields of requests and answers that OpenAI's chat completions and completions have in common, and their checks."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handlers.chat.checks import is_int, is_unicode, names, read_flag
from handlers.chat.forms import UTF8_EVENTS, Summary, Token, encode
from handlers.chat.parameters import NEUTRAL_OF_VLLM, OPENAI_NAMES, Neutral
from handlers.errors import HandlerError, InvalidRequest
from handlers.requests.incoming import Incoming
from handlers.settings.request import RequestSettings
from torchmoor.wire import headers as wire

MAX_NAME_CHARS = 256
IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key"}  # a client's own labels
DONE = b"data: [DONE]\n\n"  # the end of a complete stream


def refuse_unsupported(given: Mapping[str, Any], fields: set[str], neutral: Neutral, what: str) -> None:
    """Raise InvalidRequest for an unknown field, or an unsupported one with a value that would have an effect.

    neutral: the unsupported fields besides NEUTRAL_OF_VLLM. what: the kind of body, for the message.
    """
    neutral = {**NEUTRAL_OF_VLLM, **neutral}
    for name, (is_neutral, wanted) in neutral.items():
        if name in given and not is_neutral(given[name]):
            raise InvalidRequest(f"'{name}' must be {wanted}", param=name)
    unknown = set(given) - fields - IGNORED - set(neutral) - set(OPENAI_NAMES)
    if unknown:
        raise InvalidRequest(f"{what} have no field {names(unknown)} here", param=min(unknown)[:MAX_NAME_CHARS])


def read_num_choices(given: Mapping[str, Any], settings: RequestSettings, num_prompts: int = 1) -> int:
    """Return how many answers to each prompt a request asks for."""
    number = given.get("n", 1)
    if not is_int(number) or not 1 <= number <= settings.max_choices:
        raise InvalidRequest(
            f"'n' must be a whole number from 1 to {settings.max_choices} (handler.request.max_choices)", param="n"
        )
    if number * num_prompts > settings.max_answers:
        raise InvalidRequest(
            f"a request may have {settings.max_answers} answers (handler.request.max_answers), not {num_prompts} * "
            f"{number}: the number of prompts times 'n'",
            param="n",
        )
    return number


def make_answer_id(prefix: str, incoming: Incoming) -> str:
    """Make the id from the proxy's id of the request, so that an answer can be found in the logs."""
    return f"{prefix}-{incoming.headers.get(wire.REQUEST_ID) or uuid.uuid4()}"


def read_model(given: Mapping[str, Any], incoming: Incoming) -> str:
    """Return the model's name as the client wrote it, for the answer. The proxy has already chosen the model."""
    if "model" not in given and incoming.headers.get(wire.NEEDS_MODEL):
        raise InvalidRequest("you must provide a model parameter: the endpoint's name as 'model'", param="model")
    model = given.get("model") or incoming.caller.endpoint or "default"
    if not isinstance(model, str) or len(model) > MAX_NAME_CHARS or not is_unicode(model):
        raise InvalidRequest(f"'model' must be a text of at most {MAX_NAME_CHARS} characters", param="model")
    return model


def read_usage(given: Mapping[str, Any], is_streaming: bool) -> dict[str, bool]:
    """Return the fields of an OpenAIAnswer that say which chunks of a stream have its usage."""
    options = given.get("stream_options")
    if options is None:
        return {}
    if not isinstance(options, dict) or not is_streaming:
        raise InvalidRequest("'stream_options' must be an object, and needs 'stream': true", param="stream_options")
    options = {name: value for name, value in options.items() if value is not None}
    unknown = set(options) - {"include_usage", "include_obfuscation", "continuous_usage_stats"}
    if unknown:
        raise InvalidRequest(f"stream_options has no field {names(unknown)}", param="stream_options")
    has_usage, is_running = read_flag(options, "include_usage"), read_flag(options, "continuous_usage_stats")
    return {"has_usage": has_usage, "has_running_usage": has_usage and is_running}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIAnswer(ABC):
    """What both APIs write alike: the fields that each object of an answer begins with, errors, and a stream's end.

    created: seconds since 1970. service_tier: None unless the request names one. has_usage: a stream ends with a
    chunk that counts tokens. has_running_usage: the chunks before it count those of their choice so far. index: the
    choice's. num_prompts: how many the request has; each has as many choices. chunk_kind: the type of a stream's
    objects. Implements `ChoicesForm`.
    """

    id: str
    created: int
    model: str
    fingerprint: str | None = None
    service_tier: str | None = None
    has_usage: bool = False
    has_running_usage: bool = False
    has_logprobs: bool = False
    index: int = 0
    num_prompts: int = 1

    content_type = UTF8_EVENTS
    chunk_kind = ""

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            **({"service_tier": self.service_tier} if self.service_tier else {}),
        }

    @abstractmethod
    def begin(self) -> bytes: ...

    @abstractmethod
    def part(self, token: Token, summary: Summary | None) -> bytes: ...

    @abstractmethod
    def whole_of(self, summaries: Sequence[Summary]) -> bytes: ...

    def token(self, token: Token, summary: Summary | None) -> bytes:
        data = self.part(token, summary)
        return data if summary is None else data + self.end([summary])

    def end(self, summaries: Sequence[Summary]) -> bytes:
        usage = {**self.head(self.chunk_kind), "choices": [], "usage": self.count_tokens(summaries)}
        return (write_event(usage) if self.has_usage else b"") + DONE

    def whole(self, summary: Summary) -> bytes:
        return self.whole_of([summary])

    def write_chunk(self, choice: Mapping[str, Any], token: Token | None, summary: Summary | None) -> bytes:
        """Encode a chunk of a stream with one choice.

        token: the last one of the choice so far, if it has begun. summary: comes with the choice's last token.
        """
        value = {**self.head(self.chunk_kind), "choices": [choice]}
        if self.has_usage:
            value["usage"] = None
            if summary is not None and self.has_running_usage:  # a stored answer counts no tokens
                value["usage"] = _count(summary.num_prompt_tokens, summary.num_tokens)
            elif token is not None and self.has_running_usage:
                value["usage"] = _count(token.num_prompt_tokens, token.number)
        return write_event(value)

    def count_tokens(self, summaries: Sequence[Summary]) -> dict[str, Any]:
        """Return the `usage` of a request, which counts each prompt once. summaries: one per choice."""
        firsts = summaries[:: len(summaries) // self.num_prompts]
        prompts, answers = sum(each.num_prompt_tokens for each in firsts), sum(each.num_tokens for each in summaries)
        num_reasoning = sum(each.message.num_reasoning_tokens for each in summaries if each.message is not None)
        num_cached = sum(each.num_cached_tokens for each in firsts)
        return {
            **_count(prompts, answers),
            "prompt_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": prompts - num_cached},
            "completion_tokens_details": {"reasoning_tokens": num_reasoning},
        }

    def error(self, error: HandlerError) -> bytes:
        """Encode an error event, without the final DONE, so that a partial answer never looks complete."""
        return b"data: " + error.body() + b"\n\n"


def read_answer(prefix: str, given: Mapping[str, Any], incoming: Incoming) -> dict[str, Any]:
    """Return the fields of an OpenAIAnswer but has_logprobs. prefix: begins the answer's id."""
    return {
        "id": make_answer_id(prefix, incoming),
        "created": int(incoming.received_at),
        "model": read_model(given, incoming),
        "fingerprint": incoming.fingerprint,
        "service_tier": "default" if "service_tier" in given else None,
        **read_usage(given, read_flag(given, "stream")),
    }


def _count(num_prompt: int, num_answer: int) -> dict[str, Any]:
    return {"prompt_tokens": num_prompt, "completion_tokens": num_answer, "total_tokens": num_prompt + num_answer}


def write_event(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def name_finish_reason(summary: Summary) -> str:
    """Return OpenAI's finish_reason: "stop" for the end token and for a stop string."""
    return "length" if summary.finish_reason == "length" else "stop"
