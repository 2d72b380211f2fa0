"""The parts of an answer as it grows: content, reasoning and calls of tools, split by the template's marks."""

import json
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from handlers.chat.checks import is_unicode
from handlers.chat.custom_input import CustomInput
from handlers.models.answer_style import CALL_HEAD, AnswerStyle
from torchmoor.wire.held_text import num_held


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of a call. index: its number in the answer. is_custom: it calls a custom tool."""

    index: int
    id: str
    name: str
    is_custom: bool


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, which are JSON text, or of a custom tool's input, which is any text."""

    index: int
    text: str
    is_custom: bool


AnswerPart = Content | Reasoning | CallStart | CallArguments


@dataclass(slots=True)
class WrittenCall:
    """A call of a tool. arguments: JSON text, or a custom tool's input; incomplete if the answer was cut there."""

    id: str
    name: str
    arguments: str = ""
    is_custom: bool = False


@dataclass(slots=True)
class AnswerMessage:
    """A whole answer by its parts.

    num_reasoning_tokens: tokens of reasoning and its marks. is_call_cut: the answer ended inside a call's arguments, or
    before the arguments of its last call.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[WrittenCall] = field(default_factory=list)
    num_reasoning_tokens: int = field(default=0, compare=False)
    is_call_cut: bool = field(default=False, compare=False)

    def add(self, part: AnswerPart) -> None:
        match part:
            case Content(text):
                self.content += text
            case Reasoning(text):
                self.reasoning += text
            case CallStart(_, own_id, name, is_custom):
                self.calls.append(WrittenCall(own_id, name, is_custom=is_custom))
            case CallArguments(index, text):
                self.calls[index].arguments += text


class AnswerReader:
    """Splits an answer's text into parts, piece by piece.

    Text that may be the beginning of a mark, and white space before a mark, is held back until the next piece decides.
    A call that is not JSON stays content. Only an answer's beginning can be reasoning. has_tools: the answer may
    contain calls. custom: the names of custom tools. name: identifies the answer. The ids of its calls are derived
    from it, so an instance that continues the answer derives the same ids.
    """

    def __init__(self, style: AnswerStyle, *, has_tools: bool, name: str, custom: Collection[str] = ()) -> None:
        self.message = AnswerMessage()
        self._call = style.call if has_tools else None
        self._custom = custom
        self._custom_input = CustomInput()  # of the last call
        self._name = name
        self._thought = style.thought
        self._buffer = ""
        self._read = self._read_content
        if style.thought is not None:
            self._read = self._read_thought if style.begins_in_thought else self._read_beginning
        self._depth = 0
        self._is_quoted = False
        self._new: list[AnswerPart] = []

    def read(self, text: str) -> list[AnswerPart]:
        """Add a piece of text. Return the parts that are now certain."""
        self._buffer += text
        was_thought, num_chars = self._read == self._read_thought, len(self.message.reasoning)
        while self._read():
            pass
        is_thought = was_thought or self._read == self._read_thought or len(self.message.reasoning) > num_chars
        self.message.num_reasoning_tokens += is_thought
        return self._take()

    def finish(self) -> list[AnswerPart]:
        """Return the text that was held back, as parts."""
        if self._read == self._read_thought:
            self._add(Reasoning(self._buffer))
        elif self._read in (self._read_content, self._read_beginning, self._read_gap):
            if not self.message.calls or self._buffer.strip():
                self._add(Content(self._buffer))
        elif self._read == self._read_head and self._call is not None:
            self._add(Content(self._call[0] + self._buffer))
        is_in_head = self._read == self._read_head and bool(self.message.calls)
        self.message.is_call_cut = is_in_head or self._read == self._read_arguments
        self._buffer = ""
        return self._take()

    @property
    def has_whole_call(self) -> bool:
        """Whether the text so far has a call, and does not end within one."""
        return bool(self.message.calls) and self._read == self._read_content

    def _take(self) -> list[AnswerPart]:
        found, self._new = self._new, []
        return found

    def _add(self, part: AnswerPart) -> None:
        if not isinstance(part, Content | Reasoning) or part.text:
            self._new.append(part)
            self.message.add(part)

    def _cut(self, end: int, num_skipped: int = 0) -> str:
        """Remove text from the buffer's beginning; return it without the last `num_skipped` characters."""
        found, self._buffer = self._buffer[: end - num_skipped], self._buffer[end:]
        return found

    # Each method does one step and returns True if another step must follow.

    def _read_beginning(self) -> bool:
        """Find out whether the answer begins with reasoning."""
        assert self._thought is not None
        mark, text = self._thought[0], self._buffer.lstrip()
        if text.startswith(mark):
            self._buffer = text[len(mark) :]
            self._read = self._read_thought
            return True
        if mark.startswith(text):  # it may still become the mark
            return False
        self._read = self._read_content
        return True

    def _read_thought(self) -> bool:
        assert self._thought is not None
        mark = self._thought[1]
        if not self.message.reasoning:
            self._buffer = self._buffer.lstrip()
        at = self._buffer.find(mark)
        if at >= 0:
            self._add(Reasoning(self._cut(at + len(mark), len(mark)).rstrip()))
            self._read = self._read_gap
            return True
        length = len(self._buffer[: len(self._buffer) - num_held(self._buffer, mark)].rstrip())
        self._add(Reasoning(self._cut(length)))
        return False

    def _read_gap(self) -> bool:
        """Skip white space between reasoning and content."""
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        self._read = self._read_content
        return True

    def _read_content(self) -> bool:
        mark = self._call[0] if self._call is not None else ""
        at = self._buffer.find(mark) if mark else -1
        if at >= 0:
            self._add(Content(self._cut(at + len(mark), len(mark)).rstrip()))
            self._read = self._read_head
            return True
        length = len(self._buffer) - num_held(self._buffer, mark)
        length = len(self._buffer[:length].rstrip()) if mark else length
        self._add(Content(self._cut(length)))
        return False

    def _read_head(self) -> bool:
        """Find the call's name."""
        assert self._call is not None
        begin, end = self._call
        head = CALL_HEAD.match(self._buffer)
        name = None if head is None else _as_name(head[1])
        if head is not None and name is not None:
            self._cut(head.end())
            self._start_call(name)
            self._depth, self._is_quoted = 0, False
            self._read = self._read_arguments
            return True
        at = self._buffer.find(end)
        if at < 0:
            return False
        text = self._cut(at + len(end), len(end))
        call = _as_call(text)
        if call is None:
            self._add(Content(begin + text + end))
        else:
            self._start_call(call["name"])
            arguments = call.get("arguments", call.get("parameters")) or {}
            if call["name"] in self._custom and isinstance(arguments, str):
                arguments = {"input": arguments}
            self._add_arguments(json.dumps(arguments, ensure_ascii=False))
        self._read = self._read_content
        return True

    def _start_call(self, name: str) -> None:
        index = len(self.message.calls)
        own_id = uuid.uuid5(uuid.NAMESPACE_OID, f"{self._name} {index}").hex[:24]
        self._add(CallStart(index, f"call_{own_id}", name, name in self._custom))
        self._custom_input = CustomInput()

    def _add_arguments(self, text: str) -> None:
        is_custom = self.message.calls[-1].is_custom
        if is_custom:
            text = self._custom_input.read(text)
        if text:
            self._add(CallArguments(len(self.message.calls) - 1, text, is_custom))

    def _read_arguments(self) -> bool:
        """Return the object's text piece by piece, up to its last brace."""
        end, is_escaped = 0, False
        for char in self._buffer:
            end += 1
            if is_escaped:
                is_escaped = False
            elif self._is_quoted:
                is_escaped = char == "\\"
                self._is_quoted = char != '"'
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
            else:
                self._is_quoted = char == '"'
            if self._depth == 0:
                break
        end -= is_escaped  # the next piece has what is escaped
        if end:
            self._add_arguments(self._cut(end))
        if self._depth:
            return False
        self._read = self._read_tail
        return True

    def _read_tail(self) -> bool:
        assert self._call is not None
        end = self._call[1]
        at = self._buffer.find(end)
        if at < 0:
            return False
        self._cut(at + len(end))
        self._read = self._read_content
        return True


def _as_name(text: str) -> str | None:
    """Read a call's name, a JSON string; None if it is damaged, or not valid Unicode."""
    try:
        name: str = json.loads(text, strict=False)
    except ValueError:
        return None
    return name if is_unicode(name) else None


def _as_call(text: str) -> dict[str, Any] | None:
    """Read a call, a JSON object with a name; None for any other text, or one that is not valid Unicode."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("name"), str) else None
