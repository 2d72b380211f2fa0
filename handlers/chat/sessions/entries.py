"""The entries of a session: what each event adds to the conversation, for OpenAI's APIs to show and change."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from handlers.chat.items import messages_of, read_items, write_items
from handlers.chat.messages import answer_message, question_message, result_messages, system_message
from handlers.chat.sessions.queued_response import QueuedResponse
from handlers.chat.sessions.session import Session
from handlers.errors import InvalidRequest
from handlers.journal.event import Event


def entries_of(session: Session, num_entries: int) -> list[Event]:
    """Return the session's first entries without their deleted items. Raises InvalidRequest if items are damaged."""
    return [_remaining(session, number) for number in range(1, num_entries + 1)]


def _remaining(session: Session, number: int) -> Event:
    event = session.entries[number - 1]
    places = {place for entry, place in session.deleted_items if entry == number}
    if not places:
        return event
    asked = read_items(event.question)
    left = [item for place, item in enumerate(asked) if place not in places]
    answered = read_items(event.answer) if event.answer else ()
    kept = [item for place, item in enumerate(answered, len(asked)) if place not in places]
    return replace(event, question=write_items(left), answer=write_items(kept) if event.answer else "")


def messages_added(event: Event) -> list[dict[str, Any]]:
    """Return the messages that a turn adds to the conversation. Raises InvalidRequest if its items are damaged."""
    if event.response:
        answered = read_items(event.answer) if event.answer else ()
        return [*messages_of(read_items(event.question), len(event.images)), *messages_of(answered, 0)]
    system = [system_message(event.system)] if event.system else []
    return [*system, *ask_messages(event.question, event.asked_by, len(event.images)), answer_message(event.answer)]


def ask_messages(question: str, asked_by: str, num_images: int) -> list[dict[str, Any]]:
    """Make the messages of a question. Raises InvalidRequest if it is damaged."""
    return result_messages(question, num_images) if asked_by else [question_message(question, num_images)]


def remember_entry(session: Session, event: Event, rebuild: Callable[[list[dict[str, Any]]], None]) -> None:
    """Apply an event to the session's list of entries. rebuild: replaces the conversation after an item is deleted.

    Raises InvalidRequest if the event refers to no entry, or has fields that a conversation does not have.
    """
    match event.kind:
        case "turn":
            session.entries.append(event)
        case "update":
            session.resource = {**(session.resource or {}), **fields_of(event.response)}
        case "queue":
            session.queued = QueuedResponse(len(session.entries) + 1, event)
        case "end":
            if session.queued is None:
                raise InvalidRequest("an event ends no response of its session")
            session.queued.ended = fields_of(event.response)
            session.queued.feed.fail(session.queued.ended)  # perhaps another instance has ended it
        case "open":
            session.adapter = event.adapter
            session.deleted.update(range(1, _number(event.question or "0") + 1))
            if event.response:
                session.resource = fields_of(event.response)
        case "delete":
            entry, _, place = event.question.partition("_")
            number = _number(entry)
            if not 0 < number <= len(session.entries):
                raise InvalidRequest("an event refers to an entry that its session does not have")
            if not place:
                session.deleted.add(number)
                return
            session.deleted_items.add((number, _number(place)))
            left = entries_of(session, len(session.entries))
            rebuild([message for each in left for message in messages_added(each)])


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
