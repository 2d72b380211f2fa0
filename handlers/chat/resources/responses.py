"""Finds, shows, deletes and repeats stored responses.

A chain of responses is a session, and each response a turn of it.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from handlers.chat.commands import DeleteResponse, DropResponse, ShowResponse
from handlers.chat.dialects.response_form import ResponseForm, show_items, show_page, show_response
from handlers.chat.dialects.responses import LOGPROBS, find_response, unknown_response
from handlers.chat.items import Item, References, images_in, read_items
from handlers.chat.messages import USER, ImagePart, KeptImage, Message
from handlers.chat.queued_response import QueuedResponse
from handlers.chat.sessions.entries import items_of
from handlers.chat.sessions.lifecycle import SessionLifecycle
from handlers.chat.sessions.recorder import SessionRecorder
from handlers.chat.sessions.session import Session
from handlers.errors import InvalidRequest, ResponseUnknown, SessionGone
from handlers.journal.event import Event
from handlers.requests.incoming import Caller
from handlers.requests.reply import PendingReply
from torchmoor.wire import background, operations
from torchmoor.wire.response_ids import read_compaction_id, read_item_id

OTHER_API = "this conversation has turns of another API and cannot be continued from here"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response and its position: the number of its entry in a session, which is held.

    queued: set for a response in the background that is not a turn yet; `event` then records its question.
    """

    session: Session
    number: int
    event: Event
    queued: QueuedResponse | None

    @property
    def num_turns(self) -> int:
        """Number of the conversation's turns up to this response, included."""
        return self.session.order.index(self.number) + 1

    @property
    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(self.event.response)
        return fields


class StoredResponses:
    """Finds responses in their sessions. Worker threads only: all methods may read a journal."""

    def __init__(self, sessions: SessionLifecycle, recorder: SessionRecorder) -> None:
        self._sessions = sessions
        self._recorder = recorder

    @contextmanager
    def found(self, caller: Caller, response_id: str, param: str | None = None) -> Iterator[StoredResponse]:
        """Hold the session of a response. param: the field that names it, None for a path.

        A field can name only complete responses. Raises InvalidRequest, JournalUnavailable, and ResponseUnknown, also
        if another caller owns the response.
        """
        place = find_response(response_id, param)
        try:
            with self._sessions.hold(place.session_id, caller) as session:
                found = self._find(session, place.number)
                if found is None:
                    raise unknown_response(response_id, param)
                if found.queued is not None and param is not None:
                    raise InvalidRequest(f"'{param}' names a response that is {found.fields['status']}", param=param)
                yield found
        except SessionGone as error:
            raise unknown_response(response_id, param) from error

    def _find(self, session: Session, number: int) -> StoredResponse | None:
        """Return the response of this number; None if it was deleted, or is another kind of entry."""
        with session.recording:
            self._recorder.catch_up(session)  # another worker may have recorded it, or deleted it
            event, queued = session.find_turn(number), None
            if event is None:
                queued = session.queued.get(number)
            elif not event.answer:  # items that a client has added
                return None
            if queued is not None:
                event = queued.shown(is_running=session.turn in queued.turns)
            if event is None or not event.response or number in session.deleted:
                return None
        return StoredResponse(session, number, event, queued)

    def find_items(self, caller: Caller, references: References) -> dict[str, Item]:
        """Return stored items by their ids. Raises ResponseUnknown, JournalUnavailable."""
        places = {name: read_item_id(name) for name in references.items}
        numbers: dict[str, set[int]] = defaultdict(set)
        for place in places.values():
            if place is not None:
                numbers[place.session_id].add(place.number)
        entries = {session_id: self._read_entries(caller, session_id, own) for session_id, own in numbers.items()}
        found: dict[str, Item] = {}
        for name, place in places.items():
            item = None if place is None else entries[place.session_id].get((place.number, place.item))
            if item is None:
                raise ResponseUnknown(
                    f"Item with id '{name[:256]}' not found. Items of a response with 'store': false are not kept, and "
                    "others only as long as their response: send the item itself.",
                    param=references.field,
                    api_code="not_found",
                )
            found[name] = item
        return found

    def _read_entries(self, caller: Caller, session_id: str, numbers: Collection[int]) -> dict[tuple[int, int], Item]:
        """Return the items of a session's entries, by number and place; without those that are not stored.

        Reads the journal first, once: requests for a response go to its own instance, which may have deleted the items.
        The bytes of images are read later.
        """
        found: dict[tuple[int, int], Item] = {}
        try:
            with self._sessions.hold(session_id, caller) as session, session.recording:
                self._recorder.catch_up(session)
                for number in numbers:
                    event = session.find_turn(number)
                    if event is not None and event.response and number not in session.deleted:
                        asked, answered = items_of(event)
                        digests = event.images[len(event.images) - len(images_in(asked)) :]  # those of no item precede
                        images = [ImagePart(self._keep(session, digest, caller)) for digest in digests]
                        items = _fill((*asked, *answered), images)
                        found |= {(number, place): item for place, item in enumerate(items)}
                return {at: item for at, item in found.items() if at not in session.deleted_items}
        except SessionGone:
            return {}

    def show(self, command: ShowResponse) -> dict[str, Any]:
        """Return a response, or a page of its input's items."""
        with self.found(command.caller, command.response_id) as found:
            session_id, number, event = found.session.id.text, found.number, found.event
            asked, answered = items_of(event)
            if command.items is not None:
                return show_page(show_items(asked, session_id, number), command.items)
            output = [item.value for item in answered]
            has_logprobs = LOGPROBS in command.included
            return show_response(found.fields, output, session_id, number, len(asked), has_logprobs=has_logprobs)

    def repeat_stream(self, found: StoredResponse, reply: PendingReply, starting_after: int) -> None:
        """Repeat the stream of a response that has its answer."""
        event = found.event
        form = ResponseForm({}, read_items(event.question))
        form.place(found.session.id.text, found.number)
        data = form.repeat(event.answer, event.response, starting_after)
        reply.begin({"Content-Type": form.content_type}, form.error)
        reply.write(data, is_end=True)

    def delete(self, command: DeleteResponse, reply: PendingReply) -> dict[str, Any]:
        with self.found(command.caller, command.response_id) as found:
            if found.queued is not None:
                self._delete_queued(found.session, found.queued, command.invocation_id, reply)
            else:
                self._sessions.delete_entry(found.session, found.number, command.invocation_id, reply)
        return {"id": command.response_id, "object": "response", "deleted": True}

    def drop(self, command: DropResponse, reply: PendingReply) -> dict[str, Any]:
        """Delete a response in the background that the proxy could not queue. Raises SessionUnknown."""
        session = self._sessions.get_by_hash(command.session)
        queued = session.queued.get(command.entry)
        if queued is not None:
            self._delete_queued(session, queued, "", reply)
        return {operations.SESSION: command.session}

    def _delete_queued(self, session: Session, queued: QueuedResponse, invocation_id: str, reply: PendingReply) -> None:
        """Delete a response in the background: close its own session, or end and hide it in its conversation."""
        if queued.entry:
            self.end(session, queued, {background.STATUS: background.CANCELLED})
            self._sessions.delete_entry(session, queued.number, invocation_id, reply)
        else:
            self._sessions.end(session, invocation_id, reply)

    def end(self, session: Session, queued: QueuedResponse, ended: dict[str, Any]) -> None:
        """End a response in the background without an answer, unless it has ended. ended: fields of its object.

        Raises TurnConflict, or the SessionGone family.
        """
        with session.recording:
            self._recorder.catch_up(session)
            if queued.ended is not None or session.find_turn(queued.number) is not None:
                return
            event = Event(kind="end", response=json.dumps(ended, ensure_ascii=False), entry=queued.event.entry)
            self._recorder.record(session, event)
        queued.stop_if_ended()

    def repeat(self, session: Session, num_entries: int, caller: Caller) -> list[Item]:
        """Return the items of a held session's first entries, with images, whose bytes are read later.

        Raises InvalidRequest, or the session's error if it has ended.
        """
        repeated: list[Item] = []
        entries = self._recorder.read_entries(session, num_entries)
        if not all(event.response for event, _ in entries):
            raise InvalidRequest(OTHER_API)
        for event, images in entries:
            own = [ImagePart(self._keep(session, image.digest, caller)) for image in images]
            asked, answered = items_of(event)
            repeated += _fill((*asked, *answered), own)
        return repeated

    def _keep(self, session: Session, digest: str, caller: Caller) -> KeptImage:
        def read() -> bytes:
            with self._sessions.hold(session.id.text, caller) as held:
                with held.recording:
                    self._recorder.catch_up(held)
                return self._recorder.read_image(held, digest)

        return KeptImage(digest, read)

    def read_compacted(self, caller: Caller, text: str) -> list[Item]:
        """Return the items of a compacted conversation. Raises ResponseUnknown, JournalUnavailable."""
        unknown = ResponseUnknown("This compaction item is not known, or has expired; send the conversation itself.")
        with self._sessions.hold_resource(read_compaction_id(text), caller, unknown) as session:
            return self.repeat(session, len(session.order), caller)


def _fill(items: Sequence[Item], images: list[ImagePart]) -> list[Item]:
    """Put images into the messages of stored items."""
    messages = _with_images([item.message for item in items], images)
    return [replace(item, message=message) for item, message in zip(items, messages, strict=True)]


def _with_images(messages: list[Message], images: list[ImagePart]) -> list[Message]:
    """Put images into the messages; those without a placeholder precede the first question."""
    num_places = sum(isinstance(part, ImagePart) for message in messages for part in message.parts)
    added, following = images[: len(images) - num_places], iter(images[len(images) - num_places :])
    filled = [
        replace(message, parts=tuple(next(following) if isinstance(p, ImagePart) else p for p in message.parts))
        for message in messages
    ]
    if added:
        first = next((i for i, message in enumerate(filled) if message.role == USER), 0)
        filled[first] = replace(filled[first], parts=(*added, *filled[first].parts))
    return filled
