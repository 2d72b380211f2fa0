"""Answers of OpenAI's Responses API: the response object, and the events of its stream."""

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from handlers.chat.answer_parts import Content
from handlers.chat.commands import ItemQuery
from handlers.chat.forms import UTF8_EVENTS, Summary, Token, encode
from handlers.chat.items import RESULTS, Item, read_items, text_of
from handlers.chat.messages import Message
from handlers.chat.output_items import Delta, OutputItem, OutputItems, ResponseStream, read_output
from handlers.chat.tools import find_namespaced
from handlers.errors import HandlerError, InvalidRequest
from torchmoor.wire import error_codes
from torchmoor.wire.response_ids import compaction_id, image_id, item_id, read_item_id, response_id

_PIECES = "pieces"  # kept with the fields of a response that was streamed
_SCORES = "scores"  # kept with the fields of a response whose request asks for log probabilities
_UNFINISHED = {"status": "in_progress", "completed_at": None, "incomplete_details": None, "error": None, "usage": None}
_QUEUED = {**_UNFINISHED, "status": "queued"}
_REFUSED = (error_codes.CONTEXT_TOO_LONG, error_codes.INVALID_REQUEST)  # the same request fails again


class ResponseForm:
    """One response: writes it as an object or as events, and is the record of its turn.

    fields: of the response object, from the request. items: the client's input. instructions: precede the conversation
    in this prompt only. after: the number of the response that this one follows, 0 in a new session, None for the end
    of a conversation. may_drop: the oldest turns may be left out of a prompt that is too long. has_logprobs: the output
    and its events have log probabilities. session_id: part of the response's ids, until `place` names another.
    """

    content_type = UTF8_EVENTS

    def __init__(
        self,
        fields: dict[str, Any],
        items: tuple[Item, ...],
        *,
        instructions: tuple[Message, ...] = (),
        after: int | None = 0,
        may_drop: bool = False,
        has_logprobs: bool = False,
        session_id: str = "",
    ) -> None:
        self.items = items
        self.instructions = instructions
        self.after = after
        self.may_drop = may_drop
        self.has_logprobs = has_logprobs
        self._fields = fields
        self._session_id, self._number = session_id, 1
        self._num_events = 0
        self._first_event = 0  # events before it are not written
        self._namespaced = find_namespaced(fields.get("tools", ()))
        self._output = OutputItems(self._namespaced)
        self._stream = ResponseStream(self._event, self._item_id, self._output)
        self._last: list[Delta] = []  # what `record` has added to the output
        self._ended: dict[str, Any] | None = None
        self._is_restored = False  # _ended is that of an earlier attempt
        self._stored: list[OutputItem] = []  # its output

    @property
    def is_background(self) -> bool:
        return bool(self._fields.get("background"))

    def branch(self, num_turns: int) -> None:
        self.after = num_turns

    def place(self, session_id: str, number: int) -> None:
        """Set the turn's session and its number there, from which the response's id is made.

        Call this before the answer.
        """
        self._session_id, self._number = session_id, number

    def record(self, summary: Summary) -> tuple[str, str]:
        """Return the answer's items and the response's fields as JSON, for the journal."""
        is_streamed = bool(self._output.items)
        added = [delta for token in summary.tokens for delta in self._add(token)]
        self._last = [*added, *self._output.finish()]
        cut, items = _find_cut(summary), self._output.items
        statuses = [*["completed"] * (len(items) - 1), "incomplete" if cut else "completed"]
        shown = [item.show(status) for item, status in zip(items, statuses, strict=True)]
        fields = {**self._fields, **find_ending(summary, cut)}
        self._ended = self._show(fields, shown)
        if is_streamed or self.is_background:
            fields[_PIECES] = [item.pieces for item in items]
        if self.has_logprobs:
            fields[_SCORES] = [item.scores for item in items]
            shown = [replace(item, scores=[]).show(status) for item, status in zip(items, statuses, strict=True)]
        return json.dumps(shown, ensure_ascii=False), json.dumps(fields, ensure_ascii=False)

    def restore(self, answer: str, response: str) -> str:
        """Take the output and the fields of a stored response. Return its text."""
        items = read_items(answer)
        self._fields, values = json.loads(response), [item.value for item in items]
        self._stored = read_output(values, self._fields.get(_PIECES), self._fields.get(_SCORES, ()))
        self._ended, self._is_restored = self._show(self._fields, values), True
        return text_of(items)

    def has_begun_as_restored(self) -> bool:
        written, stored = self._output.items, self._stored
        if len(written) > len(stored) or not all(map(_is_start, written, stored)):
            return False
        return all(item.text == whole.text for item, whole in zip(written[:-1], stored, strict=False))

    def repeat(self, answer: str, response: str, starting_after: int) -> bytes:
        """Encode the events of a stored response as they were streamed, those after this sequence number."""
        self.restore(answer, response)
        return self._repeat_stored(starting_after + 1)

    # AnswerForm

    def begin(self) -> bytes:
        return self.created() + self._event(
            "response.in_progress", response=self._show({**self._fields, **_UNFINISHED})
        )

    def created(self) -> bytes:
        """Write what precedes the generation of the answer."""
        if not self.is_background:
            return self._event("response.created", response=self._show({**self._fields, **_UNFINISHED}))
        response = self._show({**self._fields, **_QUEUED})
        return self._event("response.created", response=response) + self._event("response.queued", response=response)

    def token(self, token: Token, summary: Summary | None) -> bytes:
        if summary is None:
            return self._stream.write(self._add(token))
        if self._is_restored:
            return self._rest()
        self._end_with(summary)
        return self._stream.write(self._last) + self._end()

    def error(self, error: HandlerError) -> bytes:
        fields = {**self._fields, "status": "failed", "error": show_failure(error.code, error.message)}
        response = self._show(fields)
        return self._event("response.failed", response=response)

    def whole(self, summary: Summary) -> bytes:
        self._end_with(summary)
        return encode(self._ended)

    def _rest(self) -> bytes:
        """Write the events of a restored answer that the client does not have."""
        for begun, whole in zip(self._output.items, self._stored, strict=False):
            whole.split_as(begun)
        return self._repeat_stored(self._num_events)

    def _repeat_stored(self, first_event: int) -> bytes:
        """Write the events of a restored answer from this number on."""
        self._first_event, self._num_events = first_event, 0
        self._output = OutputItems(self._namespaced)
        self._stream = ResponseStream(self._event, self._item_id, self._output)
        return self.begin() + self._stream.repeat(self._stored) + self._end()

    def _add(self, token: Token) -> list[Delta]:
        """Add a token to the output."""
        parts = token.parts
        if parts is None:
            parts = (Content(token.text),) if token.text else ()
        return self._output.add(parts, token.score if self.has_logprobs else None)

    def _show(self, fields: Mapping[str, Any], output: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        return show_response(fields, output, self._session_id, self._number, len(self.items))

    def _item_id(self, index: int, kind: str) -> str:
        return item_id(self._session_id, self._number, len(self.items) + index, kind)

    def _end_with(self, summary: Summary) -> None:
        if self._ended is None:  # it is not stored
            self.record(summary)

    def _end(self) -> bytes:
        response = self._ended
        assert response is not None
        output = response["output"]
        done = self._stream.end(output[-1]["status"]) if output else b""
        return done + self._event(f"response.{response['status']}", response=response)

    def _event(self, kind: str, **values: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        if number < self._first_event:
            return b""
        data = encode({"type": kind, "sequence_number": number, **values})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _is_start(item: OutputItem, whole: OutputItem) -> bool:
    """Return whether an item's text may still become the whole one's."""
    own, given = ((each.kind, each.call_id, each.namespace, each.name) for each in (item, whole))
    return own == given and whole.text.startswith(item.text)


def _find_cut(summary: Summary) -> str | None:
    """Return why the last item is not whole: its length, or a stop string within a call; None if it is whole."""
    if summary.finish_reason == "length":
        return "max_output_tokens"
    return "stop" if summary.message is not None and summary.message.is_call_cut else None


def find_ending(summary: Summary, cut: str | None) -> dict[str, Any]:
    """Return the fields that a response gets at its end. cut: why its output is incomplete, if it is."""
    num_prompt, num_answer, num_cached = summary.num_prompt_tokens, summary.num_tokens, summary.num_cached_tokens
    num_reasoning = 0 if summary.message is None else summary.message.num_reasoning_tokens
    return {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": cut} if cut else None,
        "completed_at": None if cut else int(time.time()),
        "usage": _usage(num_prompt, num_cached, num_answer, num_reasoning),
    }


def _usage(num_prompt: int, num_cached: int, num_answer: int, num_reasoning: int = 0) -> dict[str, Any]:
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": num_prompt - num_cached},
        "output_tokens": num_answer,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": num_prompt + num_answer,
    }


def show_compaction(session_id: str, instructions: Sequence[Item], num_tokens: int, created_at: int) -> dict[str, Any]:
    """Return a compaction object: the client's system messages, and an item that refers to everything else."""
    text = compaction_id(session_id)
    item = {"id": text, "type": "compaction", "encrypted_content": text}
    return {
        "id": response_id(session_id, 0),
        "object": "response.compaction",
        "created_at": created_at,
        "output": [*show_items(instructions, session_id, 0), item],
        "usage": {**_usage(num_tokens, 0, 0), "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}},
    }


def show_response(
    fields: Mapping[str, Any],
    output: Sequence[dict[str, Any]],
    session_id: str,
    number: int,
    num_input: int,
    *,
    has_logprobs: bool = True,
) -> dict[str, Any]:
    """Return the response object.

    output: items without ids. num_input: number of the turn's input items. has_logprobs: show the log probabilities
    that are stored with the fields.
    """
    output = with_logprobs(fields, output) if has_logprobs else output
    shown = [_with_id(value, session_id, number, num_input + i) for i, value in enumerate(output)]
    shown_fields = {name: value for name, value in fields.items() if name not in (_PIECES, _SCORES)}
    return {"id": response_id(session_id, number), "object": "response", **shown_fields, "output": shown}


def show_failure(code: Any, message: str) -> dict[str, str]:
    """Return the error of a failed response. code: the handler's, if an error of the handler is the reason."""
    return {"code": "invalid_prompt" if code in _REFUSED else "server_error", "message": message}


def with_logprobs(fields: Mapping[str, Any], output: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return a response's output with the log probabilities that are stored with the response's fields, if any."""
    if _SCORES not in fields:
        return output
    scored = zip(output, read_output(output, None, fields[_SCORES]), strict=True)
    return [item.show(value["status"]) for value, item in scored]


def show_items(items: Sequence[Item], session_id: str, number: int) -> list[dict[str, Any]]:
    """Return an entry's items with their ids, and with the ids of images that have no address to send again."""
    image_ids = (image_id(session_id, number, i) for i in count())
    shown = [_with_image_ids(item.value, image_ids) for item in items]
    return [_with_id(value, session_id, number, i) for i, value in enumerate(shown)]


def _with_image_ids(value: Mapping[str, Any], image_ids: Iterator[str]) -> Mapping[str, Any]:
    """Return an item. image_ids: of each image from here on."""
    name = "output" if value["type"] in RESULTS else "content"
    if not has_image(value):
        return value
    parts = []
    for part in value[name]:
        if part["type"] == "input_image":
            own_id = next(image_ids)
            part = part if part["image_url"] or part["file_id"] else {**part, "file_id": own_id}
        parts.append(part)
    return {**value, name: parts}


def has_image(value: Mapping[str, Any]) -> bool:
    """Return whether an item has an image, in its content or in a tool's output."""
    parts = value.get("content") or value.get("output") or ()
    return not isinstance(parts, str) and any(part["type"] == "input_image" for part in parts)


def _with_id(value: Mapping[str, Any], session_id: str, number: int, place: int) -> dict[str, Any]:
    return {"id": item_id(session_id, number, place, value["type"]), **value}


def find_item(items: Sequence[Mapping[str, Any]], text: str) -> int | None:
    """Return the index of the item with this id; None if there is none."""
    place = read_item_id(text)
    return next((i for i, item in enumerate(items) if place and read_item_id(item["id"]) == place), None)


def show_page(
    items: list[dict[str, Any]], query: ItemQuery, deleted: Collection[tuple[int, int]] = ()
) -> dict[str, Any]:
    """Return a page of items as OpenAI's list object. Raises InvalidRequest if `after` is not one of them.

    deleted: number and place of items that are not shown; `after` may be one of them, because clients delete items
    while they list them.
    """
    ordered = items if query.is_ascending else items[::-1]
    start = 0
    if query.after:
        last = find_item(ordered, query.after)
        if last is None:
            raise InvalidRequest("'after' must be the id of one of these items", param="after")
        start = last + 1
    left = ordered[start:]
    if deleted:
        left = [item for item in left if _place_of(item) not in deleted]
    return show_list(left[: query.limit], has_more=len(left) > query.limit)


def _place_of(item: Mapping[str, Any]) -> tuple[int, int] | None:
    place = read_item_id(item["id"])
    return None if place is None else (place.number, place.item)


def show_list(items: list[dict[str, Any]], *, has_more: bool = False) -> dict[str, Any]:
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }


class PreparedForm(ResponseForm):
    """The form of a response whose prompt alone is computed, so that a response after it begins sooner.

    Omits the answer's only token: the engine generates at least one.
    """

    def record(self, summary: Summary) -> tuple[str, str]:
        fields = {**self._fields, **find_ending(replace(summary, num_tokens=0, message=None), None)}
        self._ended = self._show(fields)
        return "[]", json.dumps(fields, ensure_ascii=False)
