"""The entries of a session: what an event adds to the conversation, and how OpenAI's APIs show and change it."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from handlers.chat.items import messages_of, read_items, write_items
from handlers.chat.messages import answer_message, question_message, result_messages, system_message
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
    """Return what a turn adds to the conversation. Raises InvalidRequest if its items are damaged."""
    if event.response:
        answered = read_items(event.answer) if event.answer else ()
        return [*messages_of(read_items(event.question), len(event.images)), *messages_of(answered, 0)]
    system = [system_message(event.system)] if event.system else []
    return [*system, *ask_messages(event.question, event.asked_by, len(event.images)), answer_message(event.answer)]


def ask_messages(question: str, asked_by: str, num_images: int) -> list[dict[str, Any]]:
    """Make the messages of a question. Raises InvalidRequest if it is damaged."""
    return result_messages(question, num_images) if asked_by else [question_message(question, num_images)]


def remember_entry(session: Session, event: Event, rebuild: Callable[[list[dict[str, Any]]], None]) -> None:
    """Note what an event says of the session's entries. rebuild: replaces the conversation, after an item is deleted.

    Raises InvalidRequest if it names no entry, or has other fields than a conversation's.
    """
    match event.kind:
        case "turn":
            session.entries.append(event)
        case "update":
            session.resource = {**(session.resource or {}), **_fields(event.response)}
        case "open":
            session.deleted.update(range(1, _number(event.question or "0") + 1))
            if event.response:
                session.resource = _fields(event.response)
        case "delete":
            entry, _, place = event.question.partition("_")
            number = _number(entry)
            if not 0 < number <= len(session.entries):
                raise InvalidRequest("an event names no entry of its session")
            if not place:
                session.deleted.add(number)
                return
            session.deleted_items.add((number, _number(place)))
            left = entries_of(session, len(session.entries))
            rebuild([message for each in left for message in messages_added(each)])


def _number(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise InvalidRequest("an event has another thing than a number")
    return int(text)


def _fields(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest("an event has no fields of a conversation")
    return value
