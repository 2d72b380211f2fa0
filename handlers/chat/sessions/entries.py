"""The entries of a session: what each event adds to the conversation, for OpenAI's APIs to show and change."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from handlers.chat.images.store import Image
from handlers.chat.items import Item, messages_of, read_items, write_items
from handlers.chat.messages import ASSISTANT, SYSTEM, USER, result_messages, text_message
from handlers.chat.queued_response import QueuedResponse
from handlers.chat.sessions.session import Session
from handlers.errors import InvalidRequest
from handlers.journal.event import Event


def entries_of(session: Session, num_entries: int) -> list[Event]:
    """Return the conversation's first turns without their deleted items. Raises InvalidRequest if items are damaged."""
    return [_remaining(session, number) for number in session.order[:num_entries]]


def _remaining(session: Session, number: int) -> Event:
    event = session.entries[number - 1]
    places = {place for entry, place in session.deleted_items if entry == number}
    if not places:
        return event
    asked, answered = items_of(event)
    left = [item for place, item in enumerate(asked) if place not in places]
    kept = [item for place, item in enumerate(answered, len(asked)) if place not in places]
    return replace(event, question=write_items(left), answer=write_items(kept) if event.answer else "")


def items_of(event: Event) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """Return a response's input and its output, none before it is answered. Raises InvalidRequest if damaged."""
    return read_items(event.question), read_items(event.answer) if event.answer else ()


def messages_added(event: Event) -> list[dict[str, Any]]:
    """Return the messages that a turn adds to the conversation. Raises InvalidRequest if they are damaged."""
    return [*messages_asked(event), *messages_answered(event)]


def messages_asked(event: Event) -> list[dict[str, Any]]:
    """Return the messages of a turn's question. Raises InvalidRequest if it is damaged."""
    if event.response:
        return messages_of(read_items(event.question), len(event.images))
    return ask_messages(event.question, event.asked_by, event.system, len(event.images))


def messages_answered(event: Event) -> list[dict[str, Any]]:
    """Return the messages of a turn's answer. Raises InvalidRequest if it is damaged."""
    if event.response:
        return messages_of(read_items(event.answer), 0) if event.answer else []
    return [text_message(ASSISTANT, event.answer)]


def ask_messages(question: str, asked_by: str, system: str, num_images: int) -> list[dict[str, Any]]:
    """Make the messages of a question that is a text. system: precedes it, if there is one. Raises InvalidRequest."""
    asked = result_messages(question, num_images) if asked_by else [text_message(USER, question, num_images)]
    return [text_message(SYSTEM, system), *asked] if system else asked


def remember_entry(session: Session, event: Event, rebuild: Callable[[list[dict[str, Any]]], None]) -> list[Image]:
    """Apply an event to the session's list of entries. Return pending images that no question will have.

    rebuild: replaces the conversation after an item is deleted. Raises InvalidRequest if the event refers to no entry,
    or has fields that a conversation does not have.
    """
    match event.kind:
        case "turn":
            _add_turn(session, event)
        case "update":
            session.resource = {**(session.resource or {}), **fields_of(event.response)}
        case "queue":
            _add_queued(session, event)
        case "begin":
            find_queued(session, event).has_begun = True
        case "end":
            return _end_queued(session, event)
        case "open":
            session.adapter = event.adapter
            session.deleted.update(range(1, _number(event.question or "0") + 1))
            if event.response:
                session.resource = fields_of(event.response)
        case "delete":
            _delete(session, event, rebuild)
    return []


def _add_turn(session: Session, event: Event) -> None:
    """Append a turn, or put it into the entry that its response in the background has reserved."""
    if event.entry:
        queued = find_queued(session, event)
        if session.find_turn(queued.number) is not None:
            raise InvalidRequest("an event answers a response that is answered already")
        queued.images = []
        session.entries[queued.number - 1] = event
        session.order.append(queued.number)
    else:
        session.entries.append(event)
        session.order.append(len(session.entries))
    _note_change(session)


def _add_queued(session: Session, event: Event) -> None:
    queued = QueuedResponse(len(session.entries) + 1, event)
    if event.entry:
        if _number(event.entry) != queued.number:
            raise InvalidRequest("an event reserves an entry that is not the next one")
        session.entries.append(event)
        queued.images = [_find_pending(session, digest) for digest in event.images]
    session.queued[queued.number] = queued


def _end_queued(session: Session, event: Event) -> list[Image]:
    """End a response that is not answered. Return the images of its question."""
    queued = find_queued(session, event)
    queued.ended = fields_of(event.response)
    queued.feed.fail(queued.ended)  # perhaps another instance has ended it
    unused, queued.images = queued.images, []
    return unused


def _delete(session: Session, event: Event, rebuild: Callable[[list[dict[str, Any]]], None]) -> None:
    """Delete an entry, or one of its items: then the conversation is rebuilt."""
    entry, _, place = event.question.partition("_")
    number = _number(entry)
    if not 0 < number <= len(session.entries):
        raise InvalidRequest("an event refers to an entry that its session does not have")
    if not place:
        session.deleted.add(number)
        return
    session.deleted_items.add((number, _number(place)))
    left = entries_of(session, len(session.order))
    rebuild([message for each in left for message in messages_added(each)])
    _note_change(session)


def _find_pending(session: Session, digest: str) -> Image:
    found = next((image for image in session.pending_images if image.digest == digest), None)
    if found is None:
        raise InvalidRequest("an event lacks an image of its question")
    return found


def find_queued(session: Session, event: Event) -> QueuedResponse:
    """Return the queued response that an event refers to: by its entry; without one, the session's only response.

    Raises InvalidRequest if there is none.
    """
    number = _number(event.entry) if event.entry else next(iter(session.queued), 0)
    if number not in session.queued:
        raise InvalidRequest("an event refers to no response of its session")
    return session.queued[number]


def _note_change(session: Session) -> None:
    """Note that the conversation has changed since the attempts of its queued responses read it."""
    for queued in session.queued.values():
        queued.is_changed = queued.is_changed or queued.has_begun


def _number(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise InvalidRequest("an event has a value that is not a number")
    return int(text)


def fields_of(text: str) -> dict[str, Any]:
    """Read the fields of a resource. Raises InvalidRequest."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest("an event lacks the fields of a conversation")
    return value
