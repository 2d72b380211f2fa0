"""A session: one conversation with its images, its KV cache and its queue of turns."""

import json
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from handlers.chat.images.store import Image
from handlers.chat.queued_response import QueuedResponse, QueuedTurn
from handlers.engine.contract import KvCache, KvPart
from handlers.errors import SessionGone
from handlers.journal.event import Event
from handlers.journal.journal import owner_key
from handlers.requests.incoming import Caller
from torchmoor.wire.session_ids import SessionId, session_hash


@dataclass(slots=True, eq=False)
class Session:
    """The state of one conversation. `SessionStore`, `TurnQueues` and `SessionImages` change it.

    scope: conversations of one scope share images and KV blocks. owner: see `owner_of`. opened_at, used_at: at this
    worker, in seconds since 1970.
    """

    id: SessionId
    scope: str
    owner: str
    cache: KvCache
    opened_at: float
    used_at: float
    images: list[Image] = field(default_factory=list)
    pending_images: list[Image] = field(default_factory=list)  # belong to the next question
    unrecorded: list[Image] = field(default_factory=list)  # pending ones that came with the running turn
    messages: list[dict[str, Any]] = field(default_factory=list)
    num_dropped: int = 0  # turns that were removed from `messages` because they exceeded the context
    num_holds: int = 0  # requests other than turns that use the session, which prevents its eviction
    turn: QueuedTurn | None = None  # the running turn, which prevents its eviction
    waiting: deque[QueuedTurn] = field(default_factory=deque)
    stored_kv: list[KvPart] = field(default_factory=list)  # names of the parts of its KV cache that the journal has
    adapter: str = ""  # that answers unless a request names another; empty for the base model
    num_events: int = 0  # events that this session has applied; with a journal, its place there
    num_chars: int = 0  # characters of the texts of all events
    entries: list[Event] = field(default_factory=list)  # its turns; of a queued response, its "queue" event
    order: list[int] = field(default_factory=list)  # numbers of the turns, in the conversation's order
    deleted: set[int] = field(default_factory=set)  # numbers of entries whose responses are not shown
    deleted_items: set[tuple[int, int]] = field(default_factory=set)  # number of the entry, position in it
    resource: dict[str, Any] | None = None  # fields, if the session is an OpenAI conversation or file
    queued: dict[int, QueuedResponse] = field(default_factory=dict)  # responses in the background, by their entries
    replays: list[Event] = field(default_factory=list)  # the last requests, to recognise a retry
    recording: threading.RLock = field(default_factory=threading.RLock)  # held while session and journal change
    end: SessionGone | None = None  # why the session is over, once it is
    is_pinned: bool = False  # an operator keeps its blocks between turns
    hash: str = field(init=False)  # identifies the session to operators, because the id is a credential

    def __post_init__(self) -> None:
        self.hash = session_hash(self.id.text)

    @property
    def label(self) -> str:
        """The label in the owner's list of resources: a file's purpose; "" for a session that is not listed."""
        purpose = (self.resource or {}).get("purpose")
        return purpose if isinstance(purpose, str) else ""

    @property
    def num_images(self) -> int:
        return len(self.images) + len(self.pending_images)

    @property
    def is_busy(self) -> bool:
        """Return whether the session must not be evicted: a request uses or awaits it, or an operator pins it."""
        return self.turn is not None or bool(self.waiting) or self.num_holds > 0 or self.is_pinned

    def choose_adapter(self, named: str | None) -> str:
        """Return the adapter that answers a request; empty for the base model. named: see `Incoming.adapter`."""
        return self.adapter if named is None else named

    def find_turn(self, number: int) -> Event | None:
        """Return the turn of this number; None without one, or while its response is in the background."""
        event = self.entries[number - 1] if 0 < number <= len(self.entries) else None
        return event if event is not None and event.kind == "turn" else None

    def images_for(self, queued: QueuedResponse | None) -> list[Image]:
        """Return the pending images of the next question, without those of responses in the background.

        queued: the response that is the question; its own images are included.
        """
        images = list(self.pending_images)
        for each in self.queued.values():
            for image in each.images if each is not queued else ():
                images.remove(image)
        return images

    def __repr__(self) -> str:
        state = "ended" if self.end else "running" if self.turn else "idle"
        return f"<Session {self.id.text[:24]} {state} {len(self.images)} images {self.cache!r}>"


def owner_of(caller: Caller) -> str:
    """Return the caller's name in the journal. Sessions of one owner share images and a budget."""
    is_named = caller.principal or caller.source
    return owner_key(caller.endpoint, json.dumps([caller.principal, caller.source]) if is_named else "")
