"""The events of a response's output items: each is added, grows by deltas and is done, in the order of the answer."""

from collections.abc import Callable, Sequence
from typing import Any

from handlers.chat.answer_parts import AnswerPart
from handlers.chat.output_items import CALL, MESSAGE, Delta, OutputItem, OutputItems, read_output


class ResponseStream:
    """Writes the events of items.

    event: encodes and numbers an event. item_id: returns the id of the item at an index, of this type.
    """

    def __init__(self, event: Callable[..., bytes], item_id: Callable[[int, str], str]) -> None:
        self._event = event
        self._item_id = item_id
        self._output = OutputItems()

    def write(self, parts: Sequence[AnswerPart]) -> bytes:
        """Write the parts of one more token."""
        return b"".join(map(self._write, self._output.add(parts)))

    def end(self, status: str) -> bytes:
        """Write the end of the last item."""
        data = b"".join(map(self._write, self._output.ensure_one()))
        return data + self._finish(len(self._output.items) - 1, status)

    def repeat(self, values: Sequence[dict[str, Any]], pieces: Sequence[Sequence[int]] | None) -> bytes:
        """Write stored items, except the end of the last. pieces: lengths of each item's deltas; None for one delta."""
        data = []
        for index, item in enumerate(read_output(values)):
            self._output.items.append(item)
            data.append(self._write(Delta(index, "", is_new=True)))
            start = 0
            for length in [len(item.text)] if pieces is None else pieces[index]:
                data.append(self._write(Delta(index, item.text[start : start + length], is_new=False)))
                start += length
        return b"".join(data)

    def _write(self, delta: Delta) -> bytes:
        data = self._begin(delta.index) if delta.is_new else b""
        return data + self._delta(delta.index, delta.text) if delta.text else data

    def _begin(self, index: int) -> bytes:
        data = self._finish(index - 1, "completed") if index else b""
        item = self._output.items[index]
        shown = {"id": self._item_id(index, item.kind), **item.show("in_progress")}
        data += self._event("response.output_item.added", output_index=index, item=shown)
        return data if item.kind == CALL else data + self._part_event(index, "added", item.part(is_empty=True))

    def _delta(self, index: int, text: str) -> bytes:
        item = self._output.items[index]
        more: dict[str, Any] = {"logprobs": []} if item.kind == MESSAGE else {}
        return self._event(f"{_text_event(item)}.delta", **self._place(index), delta=text, **more)

    def _finish(self, index: int, status: str) -> bytes:
        item, place = self._output.items[index], self._place(index)
        shown = {"id": place["item_id"], **item.show(status)}
        if item.kind == CALL:
            values: dict[str, Any] = {"name": item.name, "arguments": item.text}
        else:
            values = {"text": item.text, **({"logprobs": []} if item.kind == MESSAGE else {})}
        data = self._event(f"{_text_event(item)}.done", **place, **values)
        data += b"" if item.kind == CALL else self._part_event(index, "done", item.part())
        return data + self._event("response.output_item.done", output_index=index, item=shown)

    def _part_event(self, index: int, what: str, part: dict[str, Any]) -> bytes:
        name = "content_part" if self._output.items[index].kind == MESSAGE else "reasoning_summary_part"
        return self._event(f"response.{name}.{what}", **self._place(index), part=part)

    def _place(self, index: int) -> dict[str, Any]:
        kind = self._output.items[index].kind
        place: dict[str, Any] = {"item_id": self._item_id(index, kind), "output_index": index}
        if kind != CALL:
            place["content_index" if kind == MESSAGE else "summary_index"] = 0
        return place


def _text_event(item: OutputItem) -> str:
    """Return the name of an item's text events without its suffix, such as "response.output_text"."""
    names = {MESSAGE: "output_text", CALL: "function_call_arguments"}
    return f"response.{names.get(item.kind, 'reasoning_summary_text')}"
