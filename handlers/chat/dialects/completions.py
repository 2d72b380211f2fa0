"""The dialect of OpenAI's completions: bodies with a `prompt` that is continued as it is, and their answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handlers.chat.checks import is_unicode
from handlers.chat.commands import Generate
from handlers.chat.dialects.openai_fields import (
    DONE,
    Neutral,
    make_answer_id,
    name_finish_reason,
    read_flag,
    read_include_usage,
    read_model,
    read_sampling,
    refuse_unsupported,
    write_error,
    write_event,
    write_usage,
)
from handlers.chat.forms import Summary, Token, encode
from handlers.chat.parameters import Parameters, check_parameter
from handlers.errors import HandlerError, InvalidRequest
from handlers.requests import Incoming
from handlers.settings import RequestSettings

DEFAULT_TOKENS = 16  # OpenAI's
_FIELDS = {"prompt", "model", "stream", "stream_options", "logprobs"}

_NEUTRAL: Neutral = {
    "top_logprobs": (lambda v: False, "absent: completions have it as 'logprobs'"),
    "n": (lambda v: v == 1, "1: one answer is generated"),
    "best_of": (lambda v: v == 1, "1: one answer is generated"),
    "echo": (lambda v: v is False, "false"),
    "suffix": (lambda v: v == "", "absent"),
}


def parse_completion(incoming: Incoming, body: dict[str, Any], settings: RequestSettings, now: float) -> Generate:
    """Read a body with `prompt`. Raises InvalidRequest, which names the field."""
    given = {name: value for name, value in body.items() if value is not None}
    refuse_unsupported(given, _FIELDS, _NEUTRAL, "completions")
    is_streaming = read_flag(given, "stream")
    parameters = {"max_new_tokens": DEFAULT_TOKENS, "length_field": "max_tokens", **read_sampling(given)}
    if "logprobs" in given:
        parameters["top_n_tokens"] = check_parameter("top_n_tokens", given["logprobs"], "'logprobs'")
    return Generate(
        caller=incoming.caller,
        prompt=_read_prompt(given),
        messages=(),
        parameters=Parameters(**parameters),
        invocation_id=incoming.invocation_id,
        form=CompletionForm(
            id=make_answer_id("cmpl", incoming),
            created=int(now),
            model=read_model(given, incoming),
            fingerprint=incoming.fingerprint,
            has_usage=read_include_usage(given, is_streaming),
            has_logprobs="logprobs" in given,
        ),
        is_streaming=is_streaming,
    )


def _read_prompt(given: Mapping[str, Any]) -> str:
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        [prompt] = prompt
    if not isinstance(prompt, str) or not prompt:
        raise InvalidRequest(
            "'prompt' must be one text that is not empty; send a request for each prompt", param="prompt"
        )
    if not is_unicode(prompt):
        raise InvalidRequest("'prompt' must be valid Unicode: it has one half of a surrogate pair", param="prompt")
    return prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionForm:
    """Encodes `text_completion` objects: events that end with `data: [DONE]`, or one whole answer.

    created: seconds since 1970. has_usage: a stream ends with a chunk that counts tokens.
    """

    id: str
    created: int
    model: str
    fingerprint: str | None = None
    has_usage: bool = False
    has_logprobs: bool = False

    content_type = "text/event-stream"

    def begin(self) -> bytes:
        return b""

    def token(self, token: Token, summary: Summary | None) -> bytes:
        has_chunk = self.has_logprobs or bool(token.text)
        data = write_event(self._completion(token.text, tokens=[token])) if has_chunk else b""
        if summary is not None:
            data += write_event(self._completion("", name_finish_reason(summary)))
            if self.has_usage:
                data += write_event({**self._head(), "choices": [], "usage": write_usage(summary)})
            data += DONE
        return data

    def error(self, error: HandlerError) -> bytes:
        return write_error(error)

    def whole(self, summary: Summary) -> bytes:
        value = self._completion(summary.text, name_finish_reason(summary), summary.tokens)
        return encode({**value, "usage": write_usage(summary)})

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def _completion(self, text: str, finish_reason: str | None = None, tokens: Sequence[Token] = ()) -> dict[str, Any]:
        logprobs = _logprobs(tokens) if self.has_logprobs and tokens else None
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        value = {**self._head(), "choices": [choice]}
        return {**value, "usage": None} if self.has_usage else value


def _logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    """Return the tokens in four lists."""
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{each.text: each.logprob for each in token.top} for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }
