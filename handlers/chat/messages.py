"""Messages of a conversation, and the images in a raw prompt."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from handlers.errors import InvalidRequest

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
MARKDOWN_IMAGE = "![]("  # Text Generation Inference's way to put an image into a prompt; its address and `)` follow
_MARKDOWN_IMAGE = re.compile(re.escape(MARKDOWN_IMAGE))
_MAX_HOST_CHARS = 512  # first characters of an address, which contain its scheme and host
_MARKDOWN_SCHEMES = ("http://", "https://", "data:image/")  # TGI's schemes; other texts in parentheses stay text


@dataclass(frozen=True, slots=True)
class KeptImage:
    """An image of one of the caller's sessions. Its bytes are read when they are needed, by `read`."""

    digest: str
    read: Callable[[], bytes] = field(repr=False, compare=False)


ImageReference = bytes | str | KeptImage  # an image's own bytes, an http(s) address, a data URL or base64 text


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    reference: ImageReference


Part = TextPart | ImagePart


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the assistant made. arguments: a JSON object."""

    id: str
    name: str
    arguments: dict[str, Any]

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def read_call(call_id: str, name: str, arguments: str) -> ToolCall:
    """Read a call that the model made. Arguments that are not a JSON object, such as cut ones, become one with them."""
    try:
        value = json.loads(arguments or "{}")
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        value = None
    return ToolCall(call_id, name, value if isinstance(value, dict) else {"arguments": arguments})


@dataclass(frozen=True, slots=True)
class Message:
    """A message. role: system, user, assistant or tool.

    calls: the assistant's. call_id: the call whose result a tool's message has. reasoning: before an assistant's text.
    """

    role: str
    parts: tuple[Part, ...]
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    reasoning: str = ""

    @property
    def num_chars(self) -> int:
        texts = sum(len(part.text) for part in self.parts if isinstance(part, TextPart))
        return texts + len(self.reasoning) + sum(len(str(call.arguments)) for call in self.calls)

    def for_template(self) -> dict[str, Any]:
        """Return the message for the chat template: its texts, and placeholders for its images."""
        content = [
            {"type": "text", "text": p.text} if isinstance(p, TextPart) else {"type": "image"} for p in self.parts
        ]
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.calls:
            message["tool_calls"] = [call.for_template() for call in self.calls]
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.call_id:
            message["tool_call_id"] = self.call_id
        return message


def joined(messages: Sequence[Message]) -> list[Message]:
    """Join successive messages of the assistant (reasoning, text, calls) into one."""
    found: list[Message] = []
    for each in messages:
        last = found[-1] if found else None
        is_more = last is not None and last.role == each.role == ASSISTANT and not each.reasoning
        if last is not None and is_more and ((not each.parts and each.calls) or not (last.parts or last.calls)):
            last = found.pop()
            each = replace(last, parts=(*last.parts, *each.parts), calls=(*last.calls, *each.calls))
        found.append(each)
    return found


def text_message(role: str, text: str, num_images: int = 0, call_id: str = "") -> dict[str, Any]:
    """Make a message of a session for the chat template, its images first."""
    images = [ImagePart("")] * num_images
    return Message(role, (*images, TextPart(text)), call_id=call_id).for_template()


def write_results(results: Sequence[Message]) -> str:
    """Encode the results of tools as a session's question: the call's id, the text, and the number of images if any."""
    rows: list[list[str | int]] = []
    for each in results:
        num_images = len(images_of(each.parts))
        text = "".join(part.text for part in each.parts if isinstance(part, TextPart))
        rows.append([each.call_id, text, *([num_images] if num_images else [])])
    return json.dumps(rows, ensure_ascii=False)


def result_messages(text: str, num_images: int) -> list[dict[str, Any]]:
    """Make messages for the chat template from `write_results`' text, each with its images first.

    num_images: the turn's. Images of no result were added before the turn: they precede the first one's.
    Raises InvalidRequest.
    """
    try:
        rows = [(call_id, result, counts or [0]) for call_id, result, *counts in json.loads(text)]
    except (ValueError, TypeError, RecursionError):
        raise InvalidRequest("the results of tools are not a list of pairs") from None
    if not rows or not all(isinstance(call_id, str) and isinstance(result, str) for call_id, result, _ in rows):
        raise InvalidRequest("the results of tools are not texts")
    if not all(len(counts) == 1 and isinstance(counts[0], int) and counts[0] >= 0 for _, _, counts in rows):
        raise InvalidRequest("the results of tools do not count their images")
    num_added = num_images - sum(count for _, _, (count,) in rows)
    if num_added < 0:
        raise InvalidRequest("the results of tools have other images")
    messages = []
    for call_id, result, (count,) in rows:
        messages.append(text_message(TOOL, result, count + num_added, call_id))
        num_added = 0
    return messages


def images_of(parts: Sequence[Part]) -> tuple[ImageReference, ...]:
    """List the images among the parts, in order."""
    return tuple(part.reference for part in parts if isinstance(part, ImagePart))


def has_markdown_image(prompt: str) -> bool:
    """Return whether a raw prompt may contain an image.

    The pattern skips to the next "!": 2 ms for 6 MB without any. `in` takes 18 ms, during which the worker's other
    threads wait.
    """
    return _MARKDOWN_IMAGE.search(prompt) is not None


def first_address(prompt: str) -> tuple[ImageReference, ...]:
    """Return the beginning of the first address in a raw prompt whose image must be downloaded, if there is one."""
    at = prompt.find(f"{MARKDOWN_IMAGE}http")
    start = at + len(MARKDOWN_IMAGE)
    return () if at < 0 else (prompt[start : start + _MAX_HOST_CHARS],)


def split_images(prompt: str) -> tuple[Part, ...]:
    """Split a raw prompt that contains `![](address)` into texts and images, in order. For models with vision.

    Takes linear time even with many unclosed parentheses, and skips megabytes of base64.
    """
    parts: list[Part] = []
    end = 0
    at = prompt.find(MARKDOWN_IMAGE)
    while at >= 0:
        start = at + len(MARKDOWN_IMAGE)
        closing = _find_closing(prompt, start)
        if closing is not None and _is_address(prompt[start:closing]):
            if at > end:
                parts.append(TextPart(prompt[end:at]))
            parts.append(ImagePart(prompt[start:closing]))
            start = end = closing + 1
        at = prompt.find(MARKDOWN_IMAGE, start)
    if end < len(prompt) or not parts:
        parts.append(TextPart(prompt[end:]))
    return tuple(parts)


def _find_closing(prompt: str, start: int) -> int | None:
    """Return the index of the closing parenthesis; None if another one opens before it."""
    opening = prompt.find("(", start)
    closing = prompt.find(")", start, opening if opening >= 0 else len(prompt))
    return closing if closing >= 0 else None


def _is_address(text: str) -> bool:
    return text.startswith(_MARKDOWN_SCHEMES) and not any(space in text for space in " \t\r\n")
