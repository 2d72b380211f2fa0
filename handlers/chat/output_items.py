"""The output of a response as it grows: items of reasoning, text and calls, in their order, and their events."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any

from handlers.chat.answer_parts import AnswerPart, CallArguments, CallStart, Content, Reasoning
from handlers.chat.logprobs import TokenScore, show_score

MESSAGE, REASONING, CALL, CUSTOM_CALL = "message", "reasoning", "function_call", "custom_tool_call"
_CALLS = {CALL: "arguments", CUSTOM_CALL: "input"}  # the name of the call's text


def write_output_text(text: str, scores: Sequence[TokenScore] = ()) -> dict[str, Any]:
    logprobs = [show_score(score) for score in scores]
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


@dataclass(slots=True)
class OutputItem:
    """One item, whose kind is its type.

    name, namespace: of the tool that a call calls; the namespace is "" if the tool is in none. pieces: lengths
    of the deltas that made its text. scores: of each delta's tokens, and of those after the last delta; a message has
    them if the request asks for log probabilities.
    """

    kind: str
    text: str = ""
    call_id: str = ""
    name: str = ""
    namespace: str = ""
    pieces: list[int] = field(default_factory=list)
    scores: list[list[TokenScore]] = field(default_factory=list)

    def show(self, status: str) -> dict[str, Any]:
        """Return the item without its id. status: completed, incomplete or in_progress, when it has no text."""
        is_begun = status != "in_progress"
        value: dict[str, Any]
        match self.kind:
            case "function_call" | "custom_tool_call":
                text = self.text if is_begun else ""
                value = {"call_id": self.call_id, "name": self.name, _CALLS[self.kind]: text}
                value |= {"namespace": self.namespace} if self.namespace else {}
            case "message":
                value = {"role": "assistant", "content": [self.part()] if is_begun else []}
            case _:
                value = {"summary": [self.part()] if is_begun else []}
        return {"type": self.kind, "status": status, **value}

    def split_as(self, begun: "OutputItem") -> None:
        """Let the pieces of this whole item begin with those of the same item that another attempt has begun."""
        num_pieces = len(begun.pieces)
        if self.pieces[:num_pieces] != begun.pieces:
            self.pieces = [*begun.pieces, len(self.text) - sum(begun.pieces)]
            num_scores = sum(map(len, begun.scores))
            self.scores = [*begun.scores, [score for each in self.scores for score in each][num_scores:]]

    def part(self, *, is_empty: bool = False) -> dict[str, Any]:
        """Return the item's text as a part of its content."""
        text = "" if is_empty else self.text
        if self.kind == MESSAGE:
            return write_output_text(text, () if is_empty else [score for each in self.scores for score in each])
        return {"type": "summary_text", "text": text}


@dataclass(frozen=True, slots=True)
class Delta:
    """More text of an item. is_new: the item begins with it. scores: of the text's tokens, see OutputItem."""

    index: int
    text: str
    is_new: bool
    scores: Sequence[TokenScore] = ()


class OutputItems:
    """All items of an answer. Text after a call is a new item; reasoning is shown as a summary.

    namespaced: the namespace and the name of each tool in a namespace, by the name that the model calls.
    """

    def __init__(self, namespaced: Mapping[str, tuple[str, str]]) -> None:
        self.items: list[OutputItem] = []
        self._namespaced = namespaced
        self.held: list[TokenScore] = []  # of tokens whose text is not certain yet

    def add(self, parts: Sequence[AnswerPart], score: TokenScore | None = None) -> list[Delta]:
        """Add a token's parts. Return one delta for each item that is new or has more text.

        score: of the token, if the request asks for log probabilities.
        """
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
        return deltas if score is None else self._with_scores(deltas, score)

    def _with_scores(self, deltas: list[Delta], score: TokenScore) -> list[Delta]:
        """Give a message's delta the scores of the last tokens whose texts it has; those before them were marks."""
        self.held.append(score)
        scored = []
        for delta in deltas:
            item = self.items[delta.index]
            if item.kind == MESSAGE and delta.text:
                delta = replace(delta, scores=_last_of(self.held, len(delta.text)))
                item.scores.append([*delta.scores])
            scored.append(delta)
        if deltas:  # the end of a token that belongs to another item may be text that is not certain yet
            self.held = [] if self.items[deltas[-1].index].kind == MESSAGE else [score]
        return scored

    def _add(self, part: AnswerPart) -> Delta:
        if isinstance(part, CallStart):
            namespace, name = self._namespaced.get(part.name, ("", part.name))
            kind = CUSTOM_CALL if part.is_custom else CALL
            self.items.append(OutputItem(kind, call_id=part.id, name=name, namespace=namespace))
            return Delta(len(self.items) - 1, "", is_new=True)
        kind = REASONING if isinstance(part, Reasoning) else MESSAGE
        if isinstance(part, CallArguments):
            kind = CUSTOM_CALL if part.is_custom else CALL
        is_new = not self.items or self.items[-1].kind != kind
        if is_new:
            self.items.append(OutputItem(kind))
        self.items[-1].text += part.text
        return Delta(len(self.items) - 1, part.text, is_new)

    def finish(self) -> list[Delta]:
        """Add an empty message if the answer has no items. Return its first delta."""
        deltas = [] if self.items else self.add((Content(""),))
        if self.held and self.items[-1].kind == MESSAGE:
            self.items[-1].scores.append(self.held)
        self.held = []
        return deltas


def _last_of(scores: Sequence[TokenScore], num_chars: int) -> Sequence[TokenScore]:
    """Return the last scores, whose texts have this many characters or all of theirs."""
    start = len(scores)
    while start and (num_chars > 0 or not scores[start - 1][0]):
        start -= 1
        num_chars -= len(scores[start][0])
    return scores[start:]


def read_output(
    values: Sequence[dict[str, Any]], pieces: Sequence[list[int]] | None, scores: Sequence[list[list[TokenScore]]]
) -> list[OutputItem]:
    """Read items that `show` has made. pieces, scores: of each item; without pieces, each text is one."""
    items = [_read(value) for value in values]
    for item, own in zip(items, pieces or [[len(item.text)] for item in items], strict=True):
        item.pieces = own
    for item, scored in zip(items, scores, strict=False):
        item.scores = scored if pieces else [[score for each in scored for score in each]]
    return items


def _read(value: dict[str, Any]) -> OutputItem:
    if (kind := value["type"]) in _CALLS:
        return OutputItem(kind, value[_CALLS[kind]], value["call_id"], value["name"], value.get("namespace", ""))
    if value["type"] == MESSAGE:
        return OutputItem(MESSAGE, value["content"][0]["text"])
    return OutputItem(REASONING, value["summary"][0]["text"])


class ResponseStream:
    """Writes the events of an output's items: each is added, grows by deltas and is done, in the order of the answer.

    event: encodes and numbers an event. item_id: returns the id of the item at an index, of this type.
    """

    def __init__(self, event: Callable[..., bytes], item_id: Callable[[int, str], str], output: OutputItems) -> None:
        self._event = event
        self._item_id = item_id
        self._output = output

    def write(self, deltas: Sequence[Delta]) -> bytes:
        """Write what was added to the output."""
        return b"".join(map(self._write, deltas))

    def end(self, status: str) -> bytes:
        """Write the end of the last item."""
        return self._finish(len(self._output.items) - 1, status)

    def repeat(self, items: Sequence[OutputItem], held: Sequence[TokenScore] = ()) -> bytes:
        """Add items to the empty output, and write them in their pieces, except the end of the last.

        held: see OutputItems.
        """
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
        return data if item.kind in _CALLS else data + self._part_event(index, "added", item.part(is_empty=True))

    def _delta(self, delta: Delta) -> bytes:
        item = self._output.items[delta.index]
        more = {"logprobs": [show_score(score) for score in delta.scores]} if item.kind == MESSAGE else {}
        return self._event(f"{_text_event(item)}.delta", **self._place(delta.index), delta=delta.text, **more)

    def _finish(self, index: int, status: str) -> bytes:
        item, place = self._output.items[index], self._place(index)
        shown = {"id": place["item_id"], **item.show(status)}
        if item.kind in _CALLS:
            values: dict[str, Any] = {_CALLS[item.kind]: item.text}
            values |= {"name": item.name} if item.kind == CALL else {}
        else:
            values = {"text": item.text, **({"logprobs": item.part()["logprobs"]} if item.kind == MESSAGE else {})}
        data = self._event(f"{_text_event(item)}.done", **place, **values)
        data += b"" if item.kind in _CALLS else self._part_event(index, "done", item.part())
        return data + self._event("response.output_item.done", output_index=index, item=shown)

    def _part_event(self, index: int, what: str, part: dict[str, Any]) -> bytes:
        name = "content_part" if self._output.items[index].kind == MESSAGE else "reasoning_summary_part"
        return self._event(f"response.{name}.{what}", **self._place(index), part=part)

    def _place(self, index: int) -> dict[str, Any]:
        kind = self._output.items[index].kind
        place: dict[str, Any] = {"item_id": self._item_id(index, kind), "output_index": index}
        if kind not in _CALLS:
            place["content_index" if kind == MESSAGE else "summary_index"] = 0
        return place


def _text_event(item: OutputItem) -> str:
    """Return the name of an item's text events without its suffix, such as "response.output_text"."""
    names = {MESSAGE: "output_text", CALL: "function_call_arguments", CUSTOM_CALL: "custom_tool_call_input"}
    return f"response.{names.get(item.kind, 'reasoning_summary_text')}"
