"""OpenAI's conversations: each is a session, whose entries are turns and items that clients add."""

import json
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from handlers.chat.commands import AddItems, DeleteConversation, ShowConversation, UpdateConversation
from handlers.chat.dialects.response_form import find_item, has_image, show_items, show_list, show_page, with_logprobs
from handlers.chat.dialects.responses import LOGPROBS
from handlers.chat.identity import name_request
from handlers.chat.images.receiver import ImageReceiver
from handlers.chat.items import check_results, images_in, write_items
from handlers.chat.sessions.additions import SessionAdditions
from handlers.chat.sessions.entries import fields_of, items_of
from handlers.chat.sessions.lifecycle import SessionLifecycle
from handlers.chat.sessions.recorder import SessionRecorder
from handlers.chat.sessions.session import Session
from handlers.errors import InvalidRequest, ResponseUnknown
from handlers.journal.event import Event
from handlers.requests.incoming import Caller
from handlers.requests.reply import PendingReply
from torchmoor.wire.response_ids import conversation_id, read_conversation_id, read_item_id

CONVERSATION = "conversation"


class Conversations:
    """Shows and changes conversations. Worker threads only: all methods may read a journal."""

    def __init__(
        self,
        sessions: SessionLifecycle,
        additions: SessionAdditions,
        recorder: SessionRecorder,
        receiver: ImageReceiver,
    ) -> None:
        self._sessions = sessions
        self._additions = additions
        self._recorder = recorder
        self._receiver = receiver

    def found(self, caller: Caller, text: str) -> AbstractContextManager[Session]:
        """Hold the session of a conversation.

        Raises JournalUnavailable, and ResponseUnknown, also if another caller owns it.
        """
        return self._sessions.hold_resource(
            read_conversation_id(text), caller, unknown_conversation(text), CONVERSATION
        )

    def show(self, command: ShowConversation) -> dict[str, Any]:
        """Return a conversation, one of its items, or a page of them."""
        with self.found(command.caller, command.conversation_id) as session:
            if command.page is not None:
                return show_page(_items(session, command.included), command.page, session.deleted_items)
            if command.item_id:
                return _find_item(session, command.item_id, command.included)
            return show_conversation(session)

    def add(self, command: AddItems, reply: PendingReply) -> dict[str, Any]:
        """Add items, only once if the client retries the request. Return them. Raises InvalidRequest."""
        with self.found(command.caller, command.conversation_id) as session:
            check_results(command.items, session.messages, "items")
            number = self.add_items(session, command, reply)
            shown = show_items(command.items, session.id.text, number)
        return show_list(shown)

    def add_items(self, session: Session, command: AddItems, reply: PendingReply) -> int:
        """Add items to a held session. Return the number of their entry."""
        images = images_in(command.items)
        received = self._receiver.receive(session.scope, images, reply)
        name = name_request(command.invocation_id, images)
        return self._additions.add_entry(session, write_items(command.items), received, name)

    def update(self, command: UpdateConversation) -> dict[str, Any]:
        """Change the metadata, or delete an item."""
        with self.found(command.caller, command.conversation_id) as session:
            if command.item_id:
                item, place = _find_item(session, command.item_id), read_item_id(command.item_id)
                if has_image(item):
                    raise InvalidRequest("an item with an image cannot be deleted; delete the conversation")
                assert place is not None
                event = Event(kind="delete", question=f"{place.number}_{place.item}")
            else:
                event = Event(kind="update", response=json.dumps({"metadata": command.metadata}))
            with session.recording:
                self._recorder.record(session, event)
            return show_conversation(session)

    def delete(self, command: DeleteConversation, reply: PendingReply) -> dict[str, Any]:
        with self.found(command.caller, command.conversation_id) as session:
            self._sessions.end(session, command.invocation_id, reply)
        return {"id": command.conversation_id, "object": "conversation.deleted", "deleted": True}


def unknown_conversation(text: str) -> ResponseUnknown:
    """Return OpenAI's error for a conversation that does not exist, or no longer."""
    return ResponseUnknown(f"Conversation with id '{text[:256]}' not found.", api_code="not_found")


def show_conversation(session: Session) -> dict[str, Any]:
    fields = session.resource or {}
    return {"id": conversation_id(session.id.text), **fields, "expires_at": session.id.expires_at}


def _items(session: Session, included: Collection[str]) -> list[dict[str, Any]]:
    """Return all items, deleted ones too, the oldest first. included: what to show besides."""
    shown: list[dict[str, Any]] = []
    for number in session.order:
        event = session.entries[number - 1]
        if not event.response:  # a turn of another API
            continue
        asked, answered = items_of(event)
        if LOGPROBS in included:
            values = with_logprobs(fields_of(event.response), [item.value for item in answered])
            answered = tuple(replace(item, value=value) for item, value in zip(answered, values, strict=True))
        shown += show_items([*asked, *answered], session.id.text, number)
    return shown


def _find_item(session: Session, text: str, included: Collection[str] = ()) -> dict[str, Any]:
    items = _items(session, included)
    place, index = read_item_id(text), find_item(items, text)
    if place is None or index is None or (place.number, place.item) in session.deleted_items:
        raise ResponseUnknown(f"Item with id '{text[:256]}' not found.", api_code="not_found")
    return items[index]
