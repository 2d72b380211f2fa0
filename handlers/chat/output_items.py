"""The output of a response as it grows: items of reasoning, text and calls in the order in which they come."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from handlers.chat.answer_parts import AnswerPart, CallArguments, CallStart, Content, Reasoning

MESSAGE, REASONING, CALL = "message", "reasoning", "function_call"


def write_output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


@dataclass(slots=True)
class OutputItem:
    """One item, whose kind is its type. pieces: lengths of the deltas that made its text."""

    kind: str
    text: str = ""
    call_id: str = ""
    name: str = ""
    pieces: list[int] = field(default_factory=list)

    def show(self, status: str) -> dict[str, Any]:
        """Return the item without its id. status: completed, incomplete or in_progress, when it has no text."""
        is_begun = status != "in_progress"
        value: dict[str, Any]
        match self.kind:
            case "function_call":
                value = {"call_id": self.call_id, "name": self.name, "arguments": self.text if is_begun else ""}
            case "message":
                value = {"role": "assistant", "content": [self.part()] if is_begun else []}
            case _:
                value = {"summary": [self.part()] if is_begun else []}
        return {"type": self.kind, "status": status, **value}

    def part(self, *, is_empty: bool = False) -> dict[str, Any]:
        """Return the item's text as a part of its content."""
        text = "" if is_empty else self.text
        if self.kind == MESSAGE:
            return write_output_text(text)
        return {"type": "summary_text", "text": text}


@dataclass(frozen=True, slots=True)
class Delta:
    """More text of an item. is_new: the item begins with it."""

    index: int
    text: str
    is_new: bool


class OutputItems:
    """All items of an answer. Text after a call is a new item; reasoning is shown as a summary."""

    def __init__(self) -> None:
        self.items: list[OutputItem] = []

    def add(self, parts: Sequence[AnswerPart]) -> list[Delta]:
        """Add a token's parts. Return one delta for each item that is new or has more text."""
        deltas: list[Delta] = []
        for part in parts:
            delta = self._add(part)
            last = deltas[-1] if deltas else None
            if last is not None and last.index == delta.index:
                deltas[-1] = Delta(last.index, last.text + delta.text, last.is_new)
            else:
                deltas.append(delta)
        for delta in deltas:
            if delta.text:
                self.items[delta.index].pieces.append(len(delta.text))
        return deltas

    def _add(self, part: AnswerPart) -> Delta:
        if isinstance(part, CallStart):
            self.items.append(OutputItem(CALL, call_id=part.id, name=part.name))
            return Delta(len(self.items) - 1, "", is_new=True)
        kind = CALL if isinstance(part, CallArguments) else MESSAGE
        if isinstance(part, Reasoning):
            kind = REASONING
        is_new = not self.items or self.items[-1].kind != kind
        if is_new:
            self.items.append(OutputItem(kind))
        self.items[-1].text += part.text
        return Delta(len(self.items) - 1, part.text, is_new)

    def ensure_one(self) -> list[Delta]:
        """Add an empty message if the answer has no items. Return its first delta."""
        return [] if self.items else self.add((Content(""),))


def read_output(values: Sequence[dict[str, Any]]) -> list[OutputItem]:
    """Read items that `show` has made."""
    return [_read(value) for value in values]


def _read(value: dict[str, Any]) -> OutputItem:
    if value["type"] == CALL:
        return OutputItem(CALL, value["arguments"], value["call_id"], value["name"])
    if value["type"] == MESSAGE:
        return OutputItem(MESSAGE, value["content"][0]["text"])
    return OutputItem(REASONING, value["summary"][0]["text"])
