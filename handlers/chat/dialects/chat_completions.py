"""The dialect of OpenAI's chat completions: bodies with `messages`, and their answers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handlers.chat.answer_parts import AnswerPart, CallArguments, CallStart, Content, Reasoning
from handlers.chat.checks import check_texts, check_unicode, is_unicode, names, read_flag
from handlers.chat.commands import Generate
from handlers.chat.dialects.completion_fields import (
    OpenAIAnswer,
    name_finish_reason,
    read_answer,
    read_num_choices,
    refuse_unsupported,
)
from handlers.chat.dialects.reasoning_fields import EFFORTS, REASONING_WANTED, is_reasoning, read_reasoning
from handlers.chat.forms import Summary, Token, encode
from handlers.chat.grammar_fields import read_response_format
from handlers.chat.images.schemes import ADDRESS_FORM, is_address
from handlers.chat.logprobs import show_score
from handlers.chat.messages import TOOL, USER, ImagePart, Message, Part, TextPart, ToolCall, read_call
from handlers.chat.parameters import Neutral, Parameters, read_openai_parameters
from handlers.chat.template_variables import TEMPLATE_FIELD
from handlers.chat.tools import TOOL_FIELDS, read_tools
from handlers.errors import ContextTooLong, InvalidRequest, UnsupportedMedia
from handlers.requests.incoming import Incoming
from handlers.settings.request import RequestSettings
from torchmoor.wire import headers as wire

CHUNK = "chat.completion.chunk"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

_NEUTRAL: Neutral = {
    "functions": (lambda v: v == [], "absent: use 'tools'"),
    "function_call": (lambda v: v == "none", "absent: use 'tool_choice'"),
    "prediction": (lambda v: isinstance(v, dict) and v.get("type") == "content", "a prediction of the content"),
    "modalities": (lambda v: v == ["text"], 'absent or ["text"]'),
    "store": (lambda v: v is False, "false: answers are not kept"),
    "service_tier": (lambda v: v in ("auto", "default"), "auto or default: there is one tier"),
    "verbosity": (lambda v: v == "medium", "absent or medium"),
    "guided_json": (lambda v: False, "absent: use 'response_format' of the type json_schema"),
    "guided_regex": (lambda v: False, "absent: use 'response_format' of the type regex, with a value"),
    "guided_choice": (lambda v: False, "absent: use 'response_format' of the type regex, with a value"),
    "guided_grammar": (lambda v: False, "absent: use 'response_format' of the type lark, with a value"),
    "structured_outputs": (lambda v: False, "absent: use 'response_format'"),
    "enable_thinking": (lambda v: False, "absent: use 'chat_template_kwargs'"),
    "thinking": (lambda v: False, "absent: use 'chat_template_kwargs' or 'reasoning_effort'"),
    "reasoning": (is_reasoning, REASONING_WANTED),
    "reasoning_effort": (lambda v: is_reasoning({"effort": v}), f"one of {', '.join(EFFORTS)}"),
}
_FIELDS = {"messages", "model", "n", "stream", "stream_options", "logprobs", "response_format"}
_FIELDS |= {TEMPLATE_FIELD, *TOOL_FIELDS}
_FIELDS |= {"prompt_cache_retention", "prompt_cache_options"}  # have no effect here
_FIELDS |= {"sagemaker_base_url"}  # LiteLLM's own setting, which it also sends
_MESSAGE_FIELDS = {"role", "content", "name"}
_MESSAGE_FIELDS |= {"id", "type", "metadata", "cache_control"}  # a client's own labels, which have no effect
_REASONING_FIELDS = ("reasoning_content", "reasoning")  # in requests; the second is vLLM's and huggingface_hub's
_UNREAD_FIELDS = {"annotations", "parsed"}  # of an answer that a client sends again; OpenAI's `parse` adds `parsed`
_OWN_MESSAGE_FIELDS = {  # of one role
    "assistant": {"tool_calls", "refusal", *_REASONING_FIELDS, *_UNREAD_FIELDS},
    "tool": {"tool_call_id"},
}


def parse_chat_completion(incoming: Incoming, body: dict[str, Any], settings: RequestSettings) -> Generate:
    """Read a body with `messages`. Raises InvalidRequest, ContextTooLong, which name the field."""
    given = {name: value for name, value in body.items() if value is not None}
    refuse_unsupported(given, _FIELDS, _NEUTRAL, "chat completions")
    is_streaming = read_flag(given, "stream")
    messages = _messages(given.get("messages"), settings)
    if not incoming.headers.get(wire.SESSION_ID):  # else the session has the calls
        _check_results(messages)
    form = ChatCompletionForm(
        **read_answer("chatcmpl", given, incoming),
        has_logprobs=read_flag(given, "logprobs"),
        has_tools=bool(given.get("tools")),
    )
    return Generate(
        caller=incoming.caller,
        prompt=None,
        messages=messages,
        parameters=_parameters(given),
        invocation_id=incoming.invocation_id,
        form=form,
        is_streaming=is_streaming,
        num_choices=read_num_choices(given, settings),
    )


def _parameters(given: dict[str, Any]) -> Parameters:
    values = read_openai_parameters(given)
    if values.get("top_n_tokens") and not given.get("logprobs"):
        raise InvalidRequest("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    if "response_format" in given:
        values["grammar"] = read_response_format(given["response_format"])
    values["tools"] = read_tools(given)
    return Parameters(**values, **read_reasoning(given))


def _messages(given: Any, settings: RequestSettings) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise InvalidRequest("'messages' must be a list of at least one message", param="messages")
    if len(given) > settings.max_messages:
        raise ContextTooLong(f"'messages' has {len(given)} messages, more than {settings.max_messages}")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(given))


def _check_results(messages: Sequence[Message]) -> None:
    """Raise InvalidRequest if a message is the result of a call that no earlier message makes."""
    called: set[str] = set()
    for index, message in enumerate(messages):
        called |= {call.id for call in message.calls}
        if message.role == TOOL and message.call_id not in called:
            where = f"messages[{index}].tool_call_id"
            raise InvalidRequest(f"{where} names no call of an earlier message's 'tool_calls'", param=where)


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    fields = {name for name, value in given.items() if value is not None and value != []}
    role = given.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    unknown = fields - _MESSAGE_FIELDS - _OWN_MESSAGE_FIELDS.get(role, set())
    if unknown:
        raise InvalidRequest(f"{where} has no field {names(unknown)} here", param=where)
    calls = _calls(given["tool_calls"], f"{where}.tool_calls") if "tool_calls" in fields else ()
    call_id = given.get("tool_call_id", "")
    if role == "tool" and (not isinstance(call_id, str) or not call_id or not is_unicode(call_id)):
        raise InvalidRequest(
            f"{where}.tool_call_id must name the call that this answers", param=f"{where}.tool_call_id"
        )
    reasoning = _reasoning(given, where)
    content = given.get("content")
    if not content and calls:
        return Message(_ROLES[role], (), calls, reasoning=reasoning)
    field = "refusal" if not content and "refusal" in fields else "content"
    return Message(_ROLES[role], _content(given.get(field), role, f"{where}.{field}"), calls, call_id, reasoning)


def _reasoning(given: dict[str, Any], where: str) -> str:
    """Return the reasoning before an assistant's text, under any of its names; empty without one."""
    texts = [_text(given.get(name) or "", f"{where}.{name}").text for name in _REASONING_FIELDS]
    return next(filter(None, texts), "")


def _content(given: Any, role: str, where: str) -> tuple[Part, ...]:
    if isinstance(given, str):
        return (_text(given, where),)
    if not isinstance(given, list) or not given:
        raise InvalidRequest(f"{where} must be a text or a list of parts", param=where)
    return tuple(_part(part, role, f"{where}[{i}]") for i, part in enumerate(given))


def _calls(given: Any, where: str) -> tuple[ToolCall, ...]:
    """Read the calls of an assistant's message."""
    if not isinstance(given, list):
        raise InvalidRequest(f"{where} must be a list", param=where)
    return tuple(_call(call, f"{where}[{index}]") for index, call in enumerate(given))


def _call(given: Any, where: str) -> ToolCall:
    own = given if isinstance(given, dict) else {}
    kind = "custom" if own.get("type") == "custom" else "function"
    called = own.get(kind)
    if not isinstance(called, dict) or not isinstance(own.get("id"), str):
        raise InvalidRequest(f"{where} must be an object with 'id' and '{kind}'", param=where)
    read = _custom_call if kind == "custom" else _function_call
    return read(own["id"], called, where)


def _custom_call(call_id: str, custom: dict[str, Any], where: str) -> ToolCall:
    name, text = custom.get("name"), custom.get("input")
    if not isinstance(name, str) or not isinstance(text, str):
        raise InvalidRequest(f"{where}.custom must have a name, and an input as a text", param=f"{where}.custom")
    check_texts([call_id, name, text], where, where)
    return ToolCall(call_id, name, {"input": text})


def _function_call(call_id: str, function: dict[str, Any], where: str) -> ToolCall:
    name, arguments = function.get("name"), function.get("arguments") or ""
    check_texts([call_id, name, arguments], where, where)
    if isinstance(arguments, dict):  # OpenAI's clients send a text
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(name, str) or not isinstance(arguments, str):
        where += ".function"
        raise InvalidRequest(f"{where} must have a name, and arguments as a text or an object", param=where)
    return read_call(call_id, name, arguments)


def _part(given: Any, role: str, where: str) -> Part:
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    if given.get("type") == "text":
        return _text(given.get("text"), f"{where}.text")
    if given.get("type") == "refusal" and role == "assistant":
        return _text(given.get("refusal"), f"{where}.refusal")
    if (kind := given.get("type")) in ("input_audio", "audio_url", "video_url"):
        allowed = "texts and images, which may be a video's frames" if kind == "video_url" else "texts and images"
        raise UnsupportedMedia(f"{where}: {kind} is not supported: a message may have {allowed}", param=where)
    if given.get("type") != "image_url":
        raise InvalidRequest(f"{where}.type must be text or image_url", param=f"{where}.type")
    if role not in (USER, TOOL):
        raise InvalidRequest(f"{where}: only messages of a user or a tool may have images", param=where)
    image = given.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str) or not is_address(url):
        where += ".image_url.url"
        raise InvalidRequest(f"{where} must be {ADDRESS_FORM}", param=where)
    return ImagePart(url)


def _text(given: Any, where: str) -> TextPart:
    if not isinstance(given, str):
        raise InvalidRequest(f"{where} must be a text", param=where)
    check_unicode(given, where, where)
    return TextPart(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletionForm(OpenAIAnswer):
    """Encodes `chat.completion.chunk` events that end with `data: [DONE]`, or one `chat.completion`."""

    chunk_kind = CHUNK
    has_tools: bool = False  # the answer may have no text; the Vercel AI SDK begins a text even for an empty one

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": None if self.has_tools else ""})

    def part(self, token: Token, summary: Summary | None) -> bytes:
        deltas = [{"content": token.text}] if token.parts is None else [_delta(part) for part in token.parts]
        if token.parts is None and not token.text:
            deltas = []
        if self.has_logprobs and not deltas:
            deltas = [{"content": ""}]
        logprobs = self._logprobs([token])
        data = b"".join(
            self._chunk(delta, token, summary, logprobs=None if n else logprobs) for n, delta in enumerate(deltas)
        )
        return data if summary is None else data + self._chunk({}, token, summary, _finish_reason(summary))

    def whole_of(self, summaries: Sequence[Summary]) -> bytes:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "refusal": None, "annotations": [], **_whole_message(summary)},
                "logprobs": self._logprobs(summary.tokens),
                "finish_reason": _finish_reason(summary),
            }
            for index, summary in enumerate(summaries)
        ]
        return encode({**self.head("chat.completion"), "choices": choices, "usage": self.count_tokens(summaries)})

    def _chunk(
        self,
        delta: Mapping[str, Any],
        token: Token | None = None,
        summary: Summary | None = None,
        finish_reason: str | None = None,
        *,
        logprobs: Any = None,
    ) -> bytes:
        choice = {"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self.write_chunk(choice, token, summary)

    def _logprobs(self, tokens: Any) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None
        return {"content": [show_score(token.score) for token in tokens], "refusal": None}


def _finish_reason(summary: Summary) -> str:
    reason, message = name_finish_reason(summary), summary.message
    has_calls = message is not None and message.calls and not message.is_call_cut
    return "tool_calls" if reason == "stop" and has_calls else reason


def _whole_message(summary: Summary) -> dict[str, Any]:
    message = summary.message
    if message is None:
        return {"content": summary.text}
    calls = [{"id": call.id, **_show_call(call.name, call.arguments, call.is_custom)} for call in message.calls]
    found: dict[str, Any] = {"content": message.content or (None if calls else "")}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if calls:
        found["tool_calls"] = calls
    return found


def _show_call(name: str, text: str, is_custom: bool) -> dict[str, Any]:
    """Return a call without its id. text: its arguments, or a custom tool's input."""
    if is_custom:
        return {"type": "custom", "custom": {"name": name, "input": text}}
    return {"type": "function", "function": {"name": name, "arguments": text}}


def _delta(part: AnswerPart) -> dict[str, Any]:
    match part:
        case CallStart(index, call_id, name, is_custom):
            return {"tool_calls": [{"index": index, "id": call_id, **_show_call(name, "", is_custom)}]}
        case CallArguments(index, text, is_custom):
            more = {"custom": {"input": text}} if is_custom else {"function": {"arguments": text}}
            return {"tool_calls": [{"index": index, **more}]}
        case Reasoning(text):
            return {"reasoning_content": text}
        case Content(text):
            return {"content": text}
