"""The dialect of OpenAI's chat completions: bodies with `messages`, and their answers."""

import uuid
from dataclasses import dataclass
from typing import Any

from handlers.chat.checks import is_bool, is_unicode, names
from handlers.chat.commands import Generate
from handlers.chat.forms import Summary, Token, encode
from handlers.chat.messages import ImagePart, Message, Part, TextPart
from handlers.chat.parameters import OPENAI_NAMES, Parameters, check_parameter
from handlers.chat.pictures.addresses import is_address
from handlers.errors import ContextTooLong, HandlerError, InvalidRequest, UnsupportedMedia
from handlers.requests import Caller, Incoming
from handlers.settings import RequestSettings
from torchmoor.wire import headers as wire

MAX_NAME_CHARS = 256
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

# Fields that are not supported, with the values that have no effect.
_NEUTRAL: dict[str, tuple[Any, str]] = {
    "n": (lambda v: v == 1, "1: one answer is generated"),
    "presence_penalty": (lambda v: v == 0, "0"),
    "frequency_penalty": (lambda v: v == 0, "0"),
    "logit_bias": (lambda v: v == {}, "absent or empty"),
    "top_logprobs": (lambda v: v == 0, "absent or 0: only the chosen token is told"),  # prose: allow
    "tools": (lambda v: v == [], "absent: this server calls no tools"),
    "tool_choice": (lambda v: v == "none", "absent: this server calls no tools"),
    "functions": (lambda v: v == [], "absent: this server calls no functions"),
    "function_call": (lambda v: v == "none", "absent: this server calls no functions"),
    "parallel_tool_calls": (is_bool, "true or false"),
    "response_format": (lambda v: v == {"type": "text"}, 'absent or {"type": "text"}'),
    "modalities": (lambda v: v == ["text"], 'absent or ["text"]'),
    "store": (lambda v: v is False, "false: answers are not kept"),
    "service_tier": (lambda v: v in ("auto", "default"), "absent: there is one tier"),
}
_FIELDS = {"messages", "model", "stream", "stream_options", "logprobs"}
_IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key"}  # a client's own labels
_MESSAGE_FIELDS = {"role", "content", "name"}


def parse_chat_completion(incoming: Incoming, body: dict[str, Any], settings: RequestSettings, now: float) -> Generate:
    """Read a body with `messages`. Raises InvalidRequest, ContextTooLong, which name the field."""
    given = {name: value for name, value in body.items() if value is not None}
    _refuse_what_is_not_offered(given)
    is_streaming = _flag(given, "stream")
    form = OpenAIForm(
        id=_answer_id(incoming),
        created=int(now),
        model=_model(given, incoming.caller),
        has_usage=_has_usage(given, is_streaming),
        has_logprobs=_flag(given, "logprobs"),
    )
    return Generate(
        caller=incoming.caller,
        prompt=None,
        messages=_messages(given.get("messages"), settings),
        parameters=_parameters(given),
        invocation_id=incoming.invocation_id,
        form=form,
        is_streaming=is_streaming,
    )


def _refuse_what_is_not_offered(given: dict[str, Any]) -> None:
    for name, (is_neutral, wanted) in _NEUTRAL.items():
        if name in given and not is_neutral(given[name]):
            raise InvalidRequest(f"'{name}' must be {wanted}", param=name)
    unknown = set(given) - _FIELDS - _IGNORED - set(_NEUTRAL) - set(OPENAI_NAMES)
    if unknown:
        raise InvalidRequest(
            f"chat completions have no field {names(unknown)} here", param=min(unknown)[:MAX_NAME_CHARS]
        )


def _flag(given: dict[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"'{name}' must be true or false", param=name)
    return value


def _answer_id(incoming: Incoming) -> str:
    """Make the id from the proxy's id of the request, so that an answer can be found in the logs."""
    return f"chatcmpl-{incoming.headers.get(wire.REQUEST_ID) or uuid.uuid4()}"


def _model(given: dict[str, Any], caller: Caller) -> str:
    """Return the model's name that the client used. The routing has chosen the model already."""
    model = given.get("model") or caller.endpoint or "default"
    if not isinstance(model, str) or len(model) > MAX_NAME_CHARS or not is_unicode(model):
        raise InvalidRequest(f"'model' must be a text of at most {MAX_NAME_CHARS} characters", param="model")
    return model


def _has_usage(given: dict[str, Any], is_streaming: bool) -> bool:
    options = given.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or not is_streaming:
        raise InvalidRequest("'stream_options' must be an object, and needs 'stream': true", param="stream_options")
    options = {name: value for name, value in options.items() if value is not None}
    unknown = set(options) - {"include_usage", "include_obfuscation"}
    if unknown:
        raise InvalidRequest(f"stream_options has no field {names(unknown)}", param="stream_options")
    return _flag(options, "include_usage")


def _parameters(given: dict[str, Any]) -> Parameters:
    values: dict[str, Any] = {}
    for called, name in OPENAI_NAMES.items():
        if called in given:
            value = [given[called]] if name == "stop" and isinstance(given[called], str) else given[called]
            values[name] = check_parameter(name, value, f"'{called}'")
            if name == "max_new_tokens":
                values["length_field"] = called
    return Parameters(**values)


def _messages(given: Any, settings: RequestSettings) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise InvalidRequest("'messages' must be a list of at least one message", param="messages")
    if len(given) > settings.max_messages:
        raise ContextTooLong(f"'messages' has {len(given)} messages, more than {settings.max_messages}")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(given))


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    fields = {name for name, value in given.items() if value is not None and value != []}
    unknown = fields - _MESSAGE_FIELDS
    if unknown:
        raise InvalidRequest(f"{where} has no field {names(unknown)} here", param=where)
    role = given.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    content = given.get("content")
    where += ".content"
    if isinstance(content, str):
        return Message(_ROLES[role], (_text(content, where),))
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{where} must be a text or a list of parts", param=where)
    return Message(_ROLES[role], tuple(_part(part, role, f"{where}[{i}]") for i, part in enumerate(content)))


def _part(given: Any, role: str, where: str) -> Part:
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    if given.get("type") == "text":
        return _text(given.get("text"), f"{where}.text")
    if given.get("type") in ("input_audio", "audio_url", "video_url"):
        kind = str(given["type"])
        raise UnsupportedMedia(f"{where}: {kind} is not supported: a message may have texts and images", param=where)
    if given.get("type") != "image_url":
        raise InvalidRequest(f"{where}.type must be text or image_url", param=f"{where}.type")
    if role != "user":
        raise InvalidRequest(f"{where}: only a user's message may have images", param=where)
    image = given.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str) or not is_address(url):
        where += ".image_url.url"
        raise InvalidRequest(f"{where} must be an http(s) or s3 address or a data URL", param=where)
    return ImagePart(url)


def _text(given: Any, where: str) -> TextPart:
    if not isinstance(given, str):
        raise InvalidRequest(f"{where} must be a text", param=where)
    if not is_unicode(given):
        raise InvalidRequest(f"{where} must be valid Unicode: it has one half of a surrogate pair", param=where)
    return TextPart(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIForm:
    """Encodes `chat.completion.chunk` events that end with `data: [DONE]`, or one `chat.completion`.

    created: seconds since 1970. has_usage: a stream ends with a chunk that counts tokens.
    """

    id: str
    created: int
    model: str
    has_usage: bool = False
    has_logprobs: bool = False

    content_type = "text/event-stream"

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def token(self, token: Token, summary: Summary | None) -> bytes:
        data = b""
        if token.text or self.has_logprobs:
            data = self._chunk({"content": token.text}, logprobs=self._logprobs([token]))
        if summary is not None:
            data += self._chunk({}, finish_reason=_finish_reason(summary))
            if self.has_usage:
                data += _event({**self._head("chat.completion.chunk"), "choices": [], "usage": _usage(summary)})
            data += b"data: [DONE]\n\n"
        return data

    def error(self, error: HandlerError) -> bytes:
        """Encode an error without [DONE], so that half an answer never looks complete."""
        return b"data: " + error.body() + b"\n\n"

    def whole(self, summary: Summary) -> bytes:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": summary.text, "refusal": None},
            "logprobs": self._logprobs(summary.tokens),
            "finish_reason": _finish_reason(summary),
        }
        return encode({**self._head("chat.completion"), "choices": [choice], "usage": _usage(summary)})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, delta: dict[str, str], *, finish_reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        value = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self.has_usage:
            value["usage"] = None
        return _event(value)

    def _logprobs(self, tokens: Any) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None
        content = [
            {"token": t.text, "logprob": t.logprob, "bytes": list(t.text.encode()), "top_logprobs": []} for t in tokens
        ]
        return {"content": content, "refusal": None}


def _event(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def _finish_reason(summary: Summary) -> str:
    """Return OpenAI's word: the model's own end and a stop string are both "stop"."""
    return "length" if summary.finish_reason == "length" else "stop"


def _usage(summary: Summary) -> dict[str, int]:
    prompt, answer = summary.num_prompt_tokens, summary.num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
