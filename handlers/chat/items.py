"""Items of OpenAI's Responses API: a client's input and a model's output, as stored, as shown and as rendered."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from handlers.chat.checks import check_unicode, names
from handlers.chat.images.schemes import ADDRESS_FORM, DATA, find_scheme, is_address
from handlers.chat.messages import (
    ASSISTANT,
    TOOL,
    USER,
    ImagePart,
    ImageReference,
    KeptImage,
    Message,
    Part,
    TextPart,
    ToolCall,
    images_of,
    joined,
    read_call,
)
from handlers.chat.output_items import write_output_text
from handlers.chat.tools import join_name
from handlers.errors import ContextTooLong, InvalidRequest

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_COMPACTIONS = ("compaction", "compaction_summary")
_REFERENCE = "item_reference"
RESULTS = ("function_call_output", "custom_tool_call_output")
_PHASES = ("commentary", "final_answer")
_DETAILS = ("auto", "low", "high", "original")
_FIELDS = {"type", "id", "role", "status", "content", "phase"}
_UNREAD_FIELDS = {"internal_chat_message_metadata_passthrough"}  # of the Codex CLI, which adds it to any item
_MAX_URL_CHARS = 2048  # characters of an image's address; longer ones are cut


@dataclass(frozen=True, slots=True)
class Item:
    """An item. value: as it is stored and shown, without its id. message: for the chat template."""

    value: dict[str, Any]
    message: Message


@dataclass(frozen=True, slots=True)
class References:
    """The stored objects that a request's items refer to by id: a compacted conversation, files, and items.

    field: of the request, which has the items.
    """

    field: str
    compaction: str
    files: tuple[str, ...]
    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Referred:
    """The contents of an input's References: the compacted items, the image of each file, and each item."""

    compacted: Sequence[Item] = ()
    files: Mapping[str, KeptImage] = field(default_factory=dict)
    items: Mapping[str, Item] = field(default_factory=dict)


NOTHING = Referred()


def find_references(given: Any, max_items: int, field: str = "input") -> References | None:
    """Return the stored objects that a request's items refer to, or None. Raises as `parse_input` does."""
    if not isinstance(given, list):
        return None
    _check_number(given, max_items, field)
    items = [item for item in given if isinstance(item, dict)]
    found: list[Any] = [item.get("encrypted_content") for item in items if item.get("type") in _COMPACTIONS]
    if len(found) > 1:
        raise InvalidRequest(f"'{field}' may have one compaction item: send only the last one", param=field)
    if found and not isinstance(found[0], str):
        raise InvalidRequest("a compaction item needs its encrypted_content", param=field)
    contents = [item.get(name) for item in items for name in ("content", "output")]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    files = _texts(part.get("file_id") for part in parts if part.get("type") == "input_image")
    named = _texts(item.get("id") for item in items if _is_reference(item))
    return References(field, found[0] if found else "", files, named) if found or files or named else None


def _is_reference(item: dict[str, Any]) -> bool:
    """Return whether an item is a reference: by its type, or because its only member is an id."""
    return item.get("type") == _REFERENCE or {name for name, value in item.items() if value is not None} == {"id"}


def _texts(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value for value in values if isinstance(value, str)))


def _check_number(given: Sequence[Any], max_items: int, field: str) -> None:
    if len(given) > max_items:
        error = ContextTooLong if field == "input" else InvalidRequest
        raise error(f"'{field}' has {len(given)} items, more than {max_items}", param=field)


def parse_input(given: Any, max_items: int, field: str = "input", referred: Referred = NOTHING) -> tuple[Item, ...]:
    """Read a request's items: a text or a list. Raises InvalidRequest, and ContextTooLong for a long `input`.

    `input` is a whole conversation, which may be shortened. Other fields add items: at most `max_items` per request.
    referred: the contents of its references.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise InvalidRequest(f"'{field}' must be a list of items", param=field, api_code="invalid_type")
    _check_number(given, max_items, field)
    items: list[Item] = []
    for i, item in enumerate(given):
        kind = item.get("type") if isinstance(item, dict) else None
        if isinstance(item, dict) and _is_reference(item):
            items.append(_find(item, f"{field}[{i}]", referred.items))
        elif kind in _COMPACTIONS:
            items += referred.compacted
        else:
            items.append(_item(item, f"{field}[{i}]", referred.files))
    return tuple(items)


def read_items(text: str) -> tuple[Item, ...]:
    """Read items that `write_items` has written; their images have no addresses. Raises InvalidRequest."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest("the items are not JSON") from None
    if not isinstance(given, list):
        raise InvalidRequest("the items are not a list")
    return tuple(_item(item, f"items[{i}]", None) for i, item in enumerate(given))


def write_items(items: Sequence[Item]) -> str:
    return json.dumps([item.value for item in items], ensure_ascii=False)


def messages_of(items: Sequence[Item], num_images: int) -> list[dict[str, Any]]:
    """Make the messages for the chat template.

    num_images: the turn's. Images that no item contains were added before the turn: they precede the first question.
    """
    messages = [message.for_template() for message in joined([item.message for item in items])]
    num_added = num_images - sum(part["type"] == "image" for each in messages for part in each["content"])
    if num_added > 0:
        question = next((each for each in messages if each["role"] == "user"), None)
        if question is None:
            question = {"role": "user", "content": []}
            messages.append(question)
        question["content"] = [{"type": "image"}] * num_added + question["content"]
    return messages


def images_in(items: Sequence[Item]) -> tuple[ImageReference, ...]:
    """List the images of the items, in order."""
    return images_of([part for item in items for part in item.message.parts])


def text_of(items: Sequence[Item]) -> str:
    """Return the texts of the items, joined."""
    return "".join(part.text for item in items for part in item.message.parts if isinstance(part, TextPart))


def _item(given: Any, where: str, files: Mapping[str, KeptImage] | None) -> Item:
    """Read an item.

    files: images by the id of their file; None for a stored item, whose images have no addresses.
    """
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where} must be an object", param=where, api_code="invalid_type")
    given = {name: value for name, value in given.items() if value is not None and name not in _UNREAD_FIELDS}
    kind = given.get("type", "message")
    if isinstance(kind, str) and kind in RESULTS:
        return _result(given, where, files)
    if isinstance(kind, str) and kind in _OTHERS:
        return _OTHERS[kind](given, where)
    if kind != "message":
        shown = names([kind])
        raise InvalidRequest(f"{where}: items of type {shown} are not supported here", param=where)
    return _message(given, where, files)


def _message(given: dict[str, Any], where: str, files: Mapping[str, KeptImage] | None) -> Item:
    _check_fields(given, _FIELDS, where)
    role, phase = given.get("role"), given.get("phase")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    if phase is not None and (role != "assistant" or phase not in _PHASES):
        raise InvalidRequest(
            f"{where}.phase must be {' or '.join(_PHASES)}, of an assistant's message", param=f"{where}.phase"
        )
    status = _read_status(given, where)
    parts = _parts(given.get("content"), role, f"{where}.content", files)
    value = {"type": "message", "role": role, "status": status, "content": [shown for _, shown in parts]}
    if phase is not None:
        value["phase"] = phase
    return Item(value, Message(_ROLES[role], tuple(part for part, _ in parts)))


def _find(given: dict[str, Any], where: str, items: Mapping[str, Item]) -> Item:
    """Return the item that a reference names. items: by id."""
    _check_fields({name: value for name, value in given.items() if value is not None}, {"type", "id"}, where)
    return items[_text(given.get("id"), f"{where}.id")]


def _check_fields(given: dict[str, Any], known: set[str], where: str) -> None:
    unknown = set(given) - known
    if unknown:
        raise InvalidRequest(
            f"Unknown parameter: '{where}.{min(unknown)[:40]}'.", param=where, api_code="unknown_parameter"
        )


def _read_status(given: dict[str, Any], where: str) -> str:
    status = given.get("status", "completed")
    if status not in ("completed", "incomplete", "in_progress"):
        raise InvalidRequest(f"{where}.status must be completed or incomplete", param=f"{where}.status")
    return str(status)


def _call(given: dict[str, Any], where: str) -> Item:
    """Read a call that the model made. A tool in a namespace has the name by which the model calls it."""
    is_custom = given["type"] == "custom_tool_call"
    texts = ("call_id", "name", "input" if is_custom else "arguments")
    known = {"type", "id", "status", "namespace", "parsed_arguments", *texts}  # OpenAI's `parse` adds parsed_arguments
    _check_fields(given, known, where)
    status = _read_status(given, where)
    call_id, name, text = (_text(given.get(each), f"{where}.{each}") for each in texts)
    namespace = _text(given.get("namespace", ""), f"{where}.namespace")
    value = {"type": given["type"], "status": status, "call_id": call_id, "name": name, texts[2]: text}
    value |= {"namespace": namespace} if namespace else {}
    called = join_name(namespace, name)
    call = ToolCall(call_id, called, {"input": text}) if is_custom else read_call(call_id, called, text)
    return Item(value, Message(ASSISTANT, (), (call,)))


def _result(given: dict[str, Any], where: str, files: Mapping[str, KeptImage] | None) -> Item:
    """Read the result of a call. files: as for `_item`."""
    _check_fields(given, {"type", "id", "call_id", "output", "status"}, where)
    call_id, status = _text(given.get("call_id"), f"{where}.call_id"), _read_status(given, where)
    output = given.get("output")
    parts = _parts(output, TOOL, f"{where}.output", files)
    shown = output if isinstance(output, str) else [part for _, part in parts]
    value = {"type": given["type"], "status": status, "call_id": call_id, "output": shown}
    return Item(value, Message(TOOL, tuple(part for part, _ in parts), call_id=call_id))


def _reasoning(given: dict[str, Any], where: str) -> Item:
    """Read reasoning: its text, or its summary if there is no text."""
    _check_fields(given, {"type", "id", "summary", "content", "encrypted_content", "status"}, where)
    shown: dict[str, Any] = {"type": "reasoning", "status": _read_status(given, where)}
    for name, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        if name == "content" and name not in given:
            continue
        parts, at = given.get(name, []), f"{where}.{name}"
        if not isinstance(parts, list) or not all(isinstance(p, dict) and p.get("type") == kind for p in parts):
            raise InvalidRequest(f"{at} must be a list of parts of type {kind}", param=at)
        shown[name] = [{"type": kind, "text": _text(p.get("text"), f"{at}[{i}].text")} for i, p in enumerate(parts)]
    text = "\n\n".join(part["text"] for part in shown.get("content") or shown["summary"])
    return Item(shown, Message(ASSISTANT, (), reasoning=text))


_OTHERS = {"function_call": _call, "custom_tool_call": _call, "reasoning": _reasoning}


def check_results(items: Sequence[Item], earlier: Sequence[Mapping[str, Any]], field: str = "input") -> None:
    """Raise InvalidRequest if an item is the result of a call that no earlier item or message makes.

    earlier: messages for the chat template. field: the request's field with the items.
    """
    called = {call["id"] for message in earlier for call in message.get("tool_calls", ())}
    for item in items:
        called |= {call.id for call in item.message.calls}
        if item.message.role == TOOL and item.message.call_id not in called:
            shown = item.message.call_id[:64]
            raise InvalidRequest(f"No tool call found for function call output with call_id {shown}.", param=field)


def _parts(
    given: Any, role: str, where: str, files: Mapping[str, KeptImage] | None
) -> list[tuple[Part, dict[str, Any]]]:
    """Read a text or a list of parts."""
    if isinstance(given, str):
        given = [{"type": "output_text" if role == "assistant" else "input_text", "text": given}]
    if not isinstance(given, list) or not given:
        raise InvalidRequest(f"{where} must be a text or a list of parts", param=where)
    return [_part(part, role, f"{where}[{i}]", files) for i, part in enumerate(given)]


def _part(given: Any, role: str, where: str, files: Mapping[str, KeptImage] | None) -> tuple[Part, dict[str, Any]]:
    """Return a message's part, and the form in which it is shown."""
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    kind = given.get("type")
    if role == "assistant":
        return _answer_part(given, kind, where)
    if kind == "input_text":
        text = _text(given.get("text"), f"{where}.text")
        return TextPart(text), {"type": "input_text", "text": text}
    sees = role in (USER, TOOL)
    if kind == "input_image" and sees:
        return _image(given, where, files)
    wanted = "input_text or input_image" if sees else "input_text"
    raise InvalidRequest(f"{where}.type must be {wanted}", param=f"{where}.type", api_code="invalid_value")


def _answer_part(given: dict[str, Any], kind: Any, where: str) -> tuple[Part, dict[str, Any]]:
    if kind == "refusal":
        refusal = _text(given.get("refusal"), f"{where}.refusal")
        return TextPart(refusal), {"type": "refusal", "refusal": refusal}
    if kind != "output_text":
        raise InvalidRequest(
            f"{where}.type must be output_text or refusal", param=f"{where}.type", api_code="invalid_value"
        )
    text = _text(given.get("text"), f"{where}.text")
    return TextPart(text), write_output_text(text)


def _image(given: dict[str, Any], where: str, files: Mapping[str, KeptImage] | None) -> tuple[Part, dict[str, Any]]:
    detail, file = given.get("detail") or "auto", given.get("file_id")
    if detail not in _DETAILS:
        raise InvalidRequest(f"{where}.detail must be one of {', '.join(_DETAILS)}", param=f"{where}.detail")
    url = given.get("image_url") or ""
    shown = {"type": "input_image", "detail": detail, "file_id": file, "image_url": None}
    if files is not None and file is not None:
        if not isinstance(file, str) or file not in files or url:
            raise InvalidRequest(f"{where} must have image_url or the id of a file", param=f"{where}.file_id")
        return ImagePart(files[file]), shown
    if files is not None and (not isinstance(url, str) or not is_address(url)):
        where += ".image_url"
        raise InvalidRequest(f"{where} must be {ADDRESS_FORM}", param=where)
    if isinstance(url, str) and 0 < len(url) <= _MAX_URL_CHARS and find_scheme(url) != DATA:
        shown["image_url"] = url
    return ImagePart(url), shown


def _text(given: Any, where: str) -> str:
    if not isinstance(given, str):
        raise InvalidRequest(f"{where} must be a text", param=where, api_code="invalid_type")
    check_unicode(given, where, where)
    return given
