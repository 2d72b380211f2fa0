"""The dialect of OpenAI's Responses API: the bodies that create a response."""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from handlers.chat.checks import check_texts, is_bool, is_int, is_unicode, names
from handlers.chat.commands import (
    Ask,
    Command,
    Generate,
    OpenAndAsk,
    QueueResponse,
    ResolveInput,
    Respond,
    RespondInConversation,
    RunResponse,
    opening_of,
)
from handlers.chat.dialects.background_form import BackgroundForm
from handlers.chat.dialects.reasoning_fields import REASONING_WANTED, is_reasoning, read_reasoning
from handlers.chat.dialects.response_form import PreparedForm, ResponseForm
from handlers.chat.dialects.turns import check_session_limit
from handlers.chat.grammar_fields import read_text_format
from handlers.chat.items import NOTHING, Item, References, Referred, check_results, images_in, parse_input, read_items
from handlers.chat.messages import SYSTEM, Message, TextPart, joined
from handlers.chat.parameters import OPENAI_NAMES, Parameters, draw_seed, read_openai_parameters
from handlers.chat.queued_response import QueuedResponse
from handlers.chat.template_variables import TEMPLATE_FIELD
from handlers.chat.tools import TOOL_FIELDS, list_offered, read_tools
from handlers.errors import InvalidRequest, ResponseUnknown
from handlers.requests.incoming import Incoming
from handlers.settings.request import RequestSettings
from torchmoor.wire import headers as wire
from torchmoor.wire.response_ids import Place, read_conversation_id, read_response_id
from torchmoor.wire.sampling_parameters import TOP_TOKENS

MAX_LABEL_CHARS = 256
MAX_PAIRS, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512  # limits of metadata: OpenAI's
TEXT_FORMAT = {"type": "text"}

_OTHERWISE = ("max_new_tokens", "logit_bias", "top_n_tokens")  # have another name in this API, or are not supported
_PARAMETERS = {
    **{name: field for name, field in OPENAI_NAMES.items() if field not in _OTHERWISE},
    "max_output_tokens": "max_new_tokens",
}
_LABELS = ("user", "safety_identifier", "prompt_cache_key")
_UNUSED = {"stream_options", "prompt_cache_retention", "prompt_cache_options"}  # no effect, except `prewarm`
_UNUSED |= {"client_metadata"}  # of the Codex CLI, which sends it with each request
LOGPROBS = "message.output_text.logprobs"
_INCLUDED = {LOGPROBS, "reasoning.encrypted_content", "message.input_image.image_url"}  # the others have no effect
_INCLUDED |= {"file_search_call.results", "web_search_call.results", "web_search_call.action.sources"}
_INCLUDED |= {"code_interpreter_call.outputs", "computer_call_output.output.image_url"}

# Fields with few valid values: the check, and the description of valid values for an error.
_CHECKED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "background": (is_bool, "true or false"),
    "generate": (is_bool, "true or false"),
    "max_tool_calls": (lambda v: is_int(v) and v >= 1, "a whole number, 1 or more"),
    "reasoning": (is_reasoning, REASONING_WANTED),
    "service_tier": (lambda v: v in ("auto", "default"), "auto or default"),
    "store": (is_bool, "true or false"),
    "stream": (is_bool, "true or false"),
    "text": (lambda v: _is_text(v), "an object with a format, and no verbosity but medium"),
    "top_logprobs": (lambda v: is_int(v) and v in TOP_TOKENS, TOP_TOKENS.wanted),
    "truncation": (lambda v: v in ("auto", "disabled"), "auto or disabled"),
}
_FIELDS = {"model", "input", "instructions", "previous_response_id", "conversation", "metadata", "include"}
_FIELDS |= {TEMPLATE_FIELD, *TOOL_FIELDS, *_LABELS, *_UNUSED}


def parse_response(
    incoming: Incoming, body: dict[str, Any], settings: RequestSettings, referred: Referred
) -> Generate | OpenAndAsk | Respond | RespondInConversation | QueueResponse:
    """Read a body that creates a response. referred: the stored objects that its input refers to.

    Raises InvalidRequest, ContextTooLong, ResponseUnknown.
    """
    given = {name: value for name, value in body.items() if value is not None}
    _check_fields(given)
    items = parse_input(given.get("input", []), settings.max_messages, referred=referred)
    instructions = _read_instructions(given)
    parameters = _read_parameters(given)
    previous = _read_label(given, "previous_response_id")
    conversation = _read_conversation(given)
    has_output = _has_output(given)
    if not (items or previous or conversation or (instructions and not has_output)):
        raise missing_field("input")
    is_stored = given.get("store", True)
    if conversation and (previous or not is_stored):
        raise InvalidRequest(
            "'conversation' cannot be combined with 'previous_response_id' or with 'store': false",
            param="conversation",
            api_code="mutually_exclusive_parameters",
        )
    place = find_response(previous, "previous_response_id") if previous else read_conversation_id(conversation)
    make_form = BackgroundForm if given.get("background") else ResponseForm if has_output else PreparedForm
    form = make_form(
        _describe(given, parameters, incoming.received_at),
        items,
        instructions=instructions,
        after=None if conversation else 0 if place is None else place.number,
        may_drop=bool(referred.compacted) or given.get("truncation") == "auto",
        has_logprobs=LOGPROBS in given.get("include", ()),
        session_id=incoming.headers.get(wire.REQUEST_ID) or str(uuid.uuid4()),
    )
    ask = Ask(
        caller=incoming.caller,
        session_id="" if place is None else place.session_id,
        prompt_text="",
        images=images_in(items),
        parameters=parameters if has_output else replace(parameters, max_new_tokens=1, min_tokens=None),
        invocation_id=incoming.invocation_id,
        form=form,
        is_streaming=given.get("stream", False),
    )
    if given.get("background"):
        if not conversation:
            check_session_limit(incoming)
        return queue_response(ask, given, previous, conversation)
    if conversation:
        return RespondInConversation(ask=ask, conversation_id=conversation)
    if place is not None:
        may_open = wire.SESSION_LIMIT not in incoming.headers
        return Respond(ask=ask, previous=previous, is_stored=is_stored, may_open=may_open)
    if not is_stored:
        return generate(ask, instructions, ())
    check_session_limit(incoming)
    return OpenAndAsk(opening=opening_of(ask), ask=ask)


def generate(ask: Ask, instructions: Sequence[Message], earlier: Sequence[Item]) -> Generate:
    """Make the request for an answer that is not stored. earlier: the conversation. Raises InvalidRequest."""
    assert ask.draft is not None
    before = joined([item.message for item in earlier])
    check_results(ask.draft.items, [message.for_template() for message in before])
    messages = [*instructions, *joined([*before, *(item.message for item in ask.draft.items)])]
    return Generate(
        caller=ask.caller,
        prompt=None,
        messages=tuple(messages),
        parameters=ask.parameters,
        invocation_id=ask.invocation_id,
        form=ask.form,
        is_streaming=ask.is_streaming,
    )


def queue_response(ask: Ask, given: dict[str, Any], previous: str, conversation: str) -> QueueResponse:
    """Make the request for a response in the background. Raises InvalidRequest.

    An answer with sampling gets its seed here, so that it is the same each time it is generated.
    """
    if not given.get("store", True):
        raise InvalidRequest(
            "'background' cannot be combined with 'store': false",
            param="background",
            api_code="mutually_exclusive_parameters",
        )
    assert ask.draft is not None
    request = {name: value for name, value in given.items() if name not in {"input", "metadata", *_UNUSED}}
    if ask.parameters.is_sampling and ask.parameters.seed is None:
        request["seed"] = draw_seed()
    kept = {"request": request, "may_drop": ask.draft.may_drop}
    request_text = json.dumps(kept, ensure_ascii=False)
    return QueueResponse(ask=ask, previous=previous, conversation_id=conversation, request=request_text)


def resume_response(command: RunResponse, queued: QueuedResponse, session_id: str) -> Ask:
    """Make the turn of a response in the background. Raises InvalidRequest."""
    kept = json.loads(queued.event.answer)
    given = kept["request"]
    form = BackgroundForm(
        json.loads(queued.event.response),
        read_items(queued.event.question),
        instructions=_read_instructions(given),
        after=None if queued.entry else queued.number - 1,
        may_drop=kept["may_drop"],
        has_logprobs=LOGPROBS in given.get("include", ()),
    )
    form.place(session_id, queued.number)
    return Ask(
        caller=command.caller,
        session_id=session_id,
        prompt_text="",
        images=(),  # the session has them
        parameters=_read_parameters(given),
        invocation_id=command.invocation_id,
        form=form,
        is_streaming=False,
        queued=queued,
    )


def find_response(text: str, param: str | None) -> Place:
    """Read the id of a response. param: the field that has it, if any. Raises ResponseUnknown."""
    place = read_response_id(text)
    if place is None:
        raise unknown_response(text, param)
    return place


def unknown_response(text: str, param: str | None = None) -> ResponseUnknown:
    """Return OpenAI's error for a response that is not stored. param: the field with its id, if any."""
    if param is None:
        return ResponseUnknown(f"Response with id '{text[:MAX_LABEL_CHARS]}' not found.", api_code="not_found")
    message = f"Previous response with id '{text[:MAX_LABEL_CHARS]}' not found."
    return ResponseUnknown(message, param=param, api_code="previous_response_not_found")


def missing_field(name: str) -> InvalidRequest:
    return InvalidRequest(f"Missing required parameter: '{name}'.", param=name, api_code="missing_required_parameter")


def unknown_field(name: str) -> InvalidRequest:
    name = name[:MAX_LABEL_CHARS]
    return InvalidRequest(f"Unknown parameter: '{name}'.", param=name, api_code="unknown_parameter")


def resolve(incoming: Incoming, references: References | None, resume: Callable[[Referred], Command]) -> Command:
    """Make the command of a body whose items may refer to stored objects."""
    if references is None:
        return resume(NOTHING)
    return ResolveInput(caller=incoming.caller, references=references, resume=resume)


def _check_fields(given: dict[str, Any]) -> None:
    unknown = set(given) - _FIELDS - set(_CHECKED) - set(_PARAMETERS)
    if unknown:
        raise unknown_field(min(unknown))
    if "model" not in given:
        raise missing_field("model")
    for name, value in given.items():
        if name != "input":  # whose texts are checked when it is read
            check_texts(value, f"'{name}'", name)
    for name, (is_valid, wanted) in _CHECKED.items():
        if name in given and not is_valid(given[name]):
            raise InvalidRequest(f"'{name}' must be {wanted}", param=name, api_code="unsupported_value")
    included = given.get("include", [])
    if not isinstance(included, list) or not all(isinstance(each, str) for each in included):
        raise InvalidRequest("'include' must be a list of texts", param="include", api_code="invalid_type")
    others = set(included) - _INCLUDED
    if others:
        raise InvalidRequest(
            f"'include' may have {', '.join(sorted(_INCLUDED))}, not {names(others)}",
            param="include",
            api_code="unsupported_value",
        )


def _has_output(given: dict[str, Any]) -> bool:
    """Return False if only the prompt is to be computed, for a later response. Raises InvalidRequest."""
    options = given.get("prompt_cache_options")
    has_output = given.get("generate", True) and not (isinstance(options, dict) and options.get("prewarm") is True)
    if not has_output and given.get("background"):
        raise InvalidRequest(
            "'background' cannot be combined with 'generate': false or 'prewarm': true",
            param="background",
            api_code="mutually_exclusive_parameters",
        )
    return bool(has_output)


def _is_text(given: Any) -> bool:
    return (
        isinstance(given, dict) and set(given) <= {"format", "verbosity"} and given.get("verbosity") in (None, "medium")
    )


def _read_label(given: dict[str, Any], name: str) -> str:
    value = given.get(name, "")
    if not isinstance(value, str) or len(value) > MAX_LABEL_CHARS or not is_unicode(value):
        raise InvalidRequest(f"'{name}' must be a text of at most {MAX_LABEL_CHARS} characters", param=name)
    return value


def _read_conversation(given: dict[str, Any]) -> str:
    """Return the id of the conversation, empty without one."""
    value = given.get("conversation", "")
    return _read_label({"conversation": value.get("id") if isinstance(value, dict) else value}, "conversation")


def _read_instructions(given: dict[str, Any]) -> tuple[Message, ...]:
    text = given.get("instructions", "")
    if not isinstance(text, str) or not is_unicode(text):
        raise InvalidRequest("'instructions' must be a text", param="instructions", api_code="invalid_type")
    return (Message(SYSTEM, (TextPart(text),)),) if text else ()


def _read_parameters(given: dict[str, Any]) -> Parameters:
    values = {"length_field": "max_output_tokens", **read_openai_parameters(given, _PARAMETERS)}
    if given.get("text", {}).get("format") is not None:
        values["grammar"] = read_text_format(given["text"]["format"])
    if LOGPROBS in given.get("include", ()):
        values["top_n_tokens"] = given.get("top_logprobs", 0)
    values["tools"] = read_tools(given, is_flat=True)
    return Parameters(**values, **read_reasoning(given))


def read_metadata(given: dict[str, Any]) -> dict[str, str]:
    """Return the metadata of a body; null is the same as none. Raises InvalidRequest."""
    pairs = given.get("metadata")
    if pairs is None:
        return {}
    if not isinstance(pairs, dict):
        raise InvalidRequest("'metadata' must be an object", param="metadata")
    if (
        len(pairs) > MAX_PAIRS
        or any(len(key) > MAX_KEY_CHARS or not is_unicode(key) for key in pairs)
        or not all(isinstance(v, str) and len(v) <= MAX_VALUE_CHARS and is_unicode(v) for v in pairs.values())
    ):
        long = next((k for k, v in pairs.items() if isinstance(v, str) and len(v) > MAX_VALUE_CHARS), None)
        found = "" if long is None else f"; the value of {names([long])} has {len(pairs[long])}"
        raise InvalidRequest(
            f"'metadata' must have at most {MAX_PAIRS} pairs: keys of at most {MAX_KEY_CHARS} characters, and values "
            f"that are texts of at most {MAX_VALUE_CHARS}{found}",
            param="metadata",
        )
    return pairs


def _show_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    if tool["type"] == "namespace":
        return {**tool, "tools": [_show_tool(each) for each in tool["tools"]]}
    if tool["type"] == "custom":
        return {"description": None, "format": {"type": "text"}, **tool}
    return {"type": "function", "description": None, "parameters": None, **tool, "strict": bool(tool.get("strict"))}


def _describe(given: dict[str, Any], parameters: Parameters, received_at: float) -> dict[str, Any]:
    """Return the fields of the response object: the request's values, and OpenAI's defaults for the others."""
    temperature = parameters.temperature
    if not parameters.is_sampling:
        temperature = 0.0
    return {
        "created_at": int(received_at),
        "completed_at": None,
        "status": "queued" if given.get("background") else "in_progress",
        "background": given.get("background", False),
        "conversation": {"id": conversation} if (conversation := _read_conversation(given)) else None,
        "error": None,
        "frequency_penalty": parameters.frequency_penalty or 0.0,
        "incomplete_details": None,
        "instructions": given.get("instructions"),
        "max_output_tokens": parameters.max_new_tokens,
        "max_tool_calls": given.get("max_tool_calls"),
        "metadata": read_metadata(given),
        "model": _read_label(given, "model"),
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "presence_penalty": parameters.presence_penalty or 0.0,
        "previous_response_id": given.get("previous_response_id"),
        "prompt_cache_key": _read_label(given, "prompt_cache_key") or None,
        "reasoning": {"effort": None, "summary": None, **given.get("reasoning", {})},
        "safety_identifier": _read_label(given, "safety_identifier") or None,
        "service_tier": "default",
        "store": given.get("store", True),
        "temperature": 1.0 if temperature is None else temperature,
        "text": {"format": given.get("text", {}).get("format") or TEXT_FORMAT, "verbosity": "medium"},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": [_show_tool(tool) for tool in list_offered(given.get("tools", []))],
        "top_logprobs": given.get("top_logprobs", 0),
        "top_p": 1.0 if parameters.top_p is None else float(given["top_p"]),
        "truncation": given.get("truncation", "disabled"),
        "usage": None,
        "user": _read_label(given, "user") or None,
    }
