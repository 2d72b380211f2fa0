"""The events of a response's output items: each is added, grows by deltas and is done, in the order of the answer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

from handlers.chat.answer_parts import AnswerPart
from handlers.chat.logprobs import TokenScore, show_score
from handlers.chat.output_items import CALL, MESSAGE, Delta, OutputItem, OutputItems


class ResponseStream:
    """Writes the events of items.

    event: encodes and numbers an event. item_id: returns the id of the item at an index, of this type.
    """

    def __init__(self, event: Callable[..., bytes], item_id: Callable[[int, str], str]) -> None:
        self._event = event
        self._item_id = item_id
        self._output = OutputItems()

    def write(self, parts: Sequence[AnswerPart], score: TokenScore | None) -> bytes:
        """Write the parts of one more token."""
        return b"".join(map(self._write, self._output.add(parts, score)))

    def end(self, status: str) -> bytes:
        """Write the end of the last item."""
        data = b"".join(map(self._write, self._output.finish()))
        return data + self._finish(len(self._output.items) - 1, status)

    def repeat(self, items: Sequence[OutputItem], held: Sequence[TokenScore] = ()) -> bytes:
        """Write items in their pieces, except the end of the last. held: see OutputItems."""
        data = []
        for index, item in enumerate(items):
            self._output.items.append(replace(item, scores=[*item.scores], pieces=[*item.pieces]))
            data.append(self._write(Delta(index, "", is_new=True)))
            start = 0
            scores = chain(item.scores, repeat([]))
            for length in item.pieces:
                text = item.text[start : start + length]
                data.append(self._write(Delta(index, text, is_new=False, scores=next(scores))))
                start += length
        self._output.held = [*held]
        return b"".join(data)

    def _write(self, delta: Delta) -> bytes:
        data = self._begin(delta.index) if delta.is_new else b""
        return data + self._delta(delta) if delta.text else data

    def _begin(self, index: int) -> bytes:
        data = self._finish(index - 1, "completed") if index else b""
        item = self._output.items[index]
        shown = {"id": self._item_id(index, item.kind), **item.show("in_progress")}
        data += self._event("response.output_item.added", output_index=index, item=shown)
        return data if item.kind == CALL else data + self._part_event(index, "added", item.part(is_empty=True))

    def _delta(self, delta: Delta) -> bytes:
        item = self._output.items[delta.index]
        more = {"logprobs": [show_score(score) for score in delta.scores]} if item.kind == MESSAGE else {}
        return self._event(f"{_text_event(item)}.delta", **self._place(delta.index), delta=delta.text, **more)

    def _finish(self, index: int, status: str) -> bytes:
        item, place = self._output.items[index], self._place(index)
        shown = {"id": place["item_id"], **item.show(status)}
        if item.kind == CALL:
            values: dict[str, Any] = {"name": item.name, "arguments": item.text}
        else:
            values = {"text": item.text, **({"logprobs": item.part()["logprobs"]} if item.kind == MESSAGE else {})}
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
