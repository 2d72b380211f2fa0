"""The journal protocol: a durable copy of a session, from which any instance can rebuild it.

A session's journal is a list of events, numbered from 0, each written once: the opening, added images, turns. If two
instances write number n, the first one wins and the other gets an error. Encoded images are stored under the hash of
their bytes, once for all sessions of an owner, as long as one of them is there. A journal holds what is needed to
compute the session again, not tensors (docs/decisions/0006, 0008 and 0039).
"""

import errno
import hashlib
import re
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from handlers.journal.event import Event, image_hash
from torchmoor.wire.session_ids import ID_FORM

MAX_CLAIM_BYTES = 1024  # that are read
REMOVED_WITHIN_S = 60  # seconds after its expiry until a session's space is free
EXPIRED_KEPT_S = 30  # seconds from a session's expiry to its deletion, for last turns and differing clocks
NO_KEYS: Mapping[str, bytes] = MappingProxyType({})
ANYONE = "anyone"  # the owner of sessions whose callers have no name, if they came through no endpoint
_HASH = re.compile(r"[0-9a-f]{64}")
_ENDPOINT_CHARS, _CALLER_CHARS = 12, 20  # of an owner
_NO_CALLER = _CALLER_CHARS * "0"
_OWNER = re.compile(rf"[0-9a-f]{{32}}|{ANYONE}")
MAX_LISTED = 10_000  # sessions that a list returns: the last ones to expire
_LISTED = re.compile(rf"({ID_FORM.pattern})\.([a-z_]{{1,32}})", re.ASCII)


class EventTaken(Exception):
    """Raised if another instance has written an event of this number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"event {number} of this session has been written already")


class JournalClosed(Exception):
    """The session was closed, and its content deleted."""

    def __init__(self) -> None:
        super().__init__("this session was closed")


class JournalFull(Exception):
    """Raised if the store has no room for another session or KV cache. The message is for the client.

    room_at: when the first session's space becomes free, in seconds since 1970; None if unknown.
    """

    room_at: int | None = None


class OwnerFull(JournalFull):
    """Raised if the owner's share of the store is used up; other owners may have room."""


class Listed(NamedTuple):
    """A session in its owner's list. label: lower-case letters and underscores that say what the session is."""

    expires_at: int
    session_id: str
    label: str

    @property
    def name(self) -> str:
        """The entry's name in a store."""
        return f"{self.session_id}.{self.label}"


class Journal(Protocol):
    """A store of journals.

    All methods may block and are thread-safe. They raise OSError if the store fails or refuses, TimeoutError
    if it does not answer. After an OSError a write may or may not have been done; repeating it is safe. Methods that
    read a session raise DamagedRecord; they read no record that is larger than the settings allow.
    owner: names the caller that a session belongs to, in a form that `check_owner` accepts.
    used_bytes, num_sessions: of all workers, as last measured, and with this worker's changes since.
    """

    @property
    def used_bytes(self) -> int: ...

    @property
    def num_sessions(self) -> int: ...

    def check_room(self, owner: str) -> None:
        """Raise JournalFull if the store has no room for another session, OwnerFull if the owner's share is used."""
        ...

    def append(self, session_id: str, number: int, event: Event, owner: str) -> None:
        """Write an event durably, after its predecessors. Succeeds if the same event was written before.

        owner: the event's bytes count for this owner. Event 0's owner is the session's.

        Raises EventTaken if another event has this number, JournalClosed, EventTooLarge.
        """
        ...

    def read(self, session_id: str, start: int = 0, max_events: int | None = None) -> list[Event]:
        """Return the events from `start` on: none for an unknown session, only the "close" for a closed one.

        May raise EventsMissing if fewer than `start` events are left.
        """
        ...

    def put_image(self, session_id: str, data: bytes, owner: str) -> str:
        """Store an encoded image of the session, unless the owner has it, and return its hash. Raises JournalClosed."""
        ...

    def get_image(self, session_id: str, image: str) -> bytes:
        """Return an image's bytes. Raises OSError if it is missing or damaged."""
        ...

    def put_kv(self, session_id: str, number: int, data: bytes, owner: str) -> bool:
        """Write a part of the session's KV cache, replacing an earlier one of this number.

        Return False, and write nothing, if the session has ended. Raises JournalFull if KV caches have reached
        `max_kv_bytes`, OwnerFull if those of the owner have reached `max_caller_kv_bytes`.
        """
        ...

    def read_kv(self, session_id: str, first: int, count: int, max_bytes: int) -> list[bytes]:
        """Read up to `count` parts of the session's KV cache from this number on, none after a missing one.

        max_bytes: size limit of a part. Raises DamagedRecord for a larger one.
        """
        ...

    def close(self, session_id: str, event: Event) -> Event:
        """Delete a session's content but remember its "close", for `read`.

        Return the first "close": this event or that of an earlier call.
        """
        ...

    def delete(self, session_id: str) -> None:
        """Delete a session whose id no client has received."""
        ...

    def claim(self, name: str, value: str) -> str:
        """Return the value that was first claimed under this name: this one or an earlier one.

        A claim is kept for at least journal.claim_s. Only the hash of the name is stored. For a damaged claim, the
        result is an arbitrary text.
        """
        ...

    def enlist(self, session_id: str, label: str, owner: str) -> None:
        """Add a session to the list of its owner, until it is removed or the session expires."""
        ...

    def delist(self, session_id: str, label: str, owner: str) -> None:
        """Remove a session from the list of its owner."""
        ...

    def list_owned(self, owner: str) -> list[Listed]:
        """Return the owner's list in any order, perhaps with sessions that have ended."""
        ...

    def list_ids(self, cursor: str = "") -> tuple[list[str], str]:
        """Return ids of sessions, perhaps also of closed ones, and the cursor of the next page, empty at the end.

        A session that exists all the time is on at least one page.
        """
        ...

    def sweep(self, expired_before: int, *, is_full: bool) -> None:
        """Delete sessions whose ids expired before this time, in seconds since 1970.

        is_full: also delete old claims and leftovers of killed workers, and measure the store, which reads all names in
        it. One call does a bounded part; the next one continues.
        """
        ...


def expiry(session_id: str) -> int:
    """Return when the session expires, in seconds since 1970, from its id. Raises ValueError."""
    match = ID_FORM.fullmatch(session_id)
    if match is None:
        raise ValueError("not a session id")
    return int(match[1], 16)


def needed_until(session_id: str) -> int:
    """Return until when a store keeps the session, in seconds since 1970. Raises ValueError."""
    return expiry(session_id) + EXPIRED_KEPT_S


def make_listed(session_id: str, label: str) -> Listed:
    """Make the entry of a list. Raises ValueError."""
    found = read_listed(f"{session_id}.{label}")
    if found is None:
        raise ValueError("not a session id and a label")
    return found


def read_listed(name: str) -> Listed | None:
    """Read what a store has in a list; None if another program has written it."""
    match = _LISTED.fullmatch(name)
    return None if match is None else Listed(int(match[2], 16), match[1], match[3])


def is_session_id(text: str) -> bool:
    return ID_FORM.fullmatch(text) is not None


def claim_key(name: str) -> str:
    """Return a claim's name in the store, which does not reveal the original."""
    return hashlib.sha256(name.encode()).hexdigest()


def owner_key(endpoint: str, caller: str) -> str:
    """Return the owner for a caller of this name at an endpoint; both may be empty."""
    if not endpoint and not caller:
        return ANYONE
    own = _digits(f"{endpoint}\n{caller}", _CALLER_CHARS) if caller else _NO_CALLER
    return _digits(endpoint, _ENDPOINT_CHARS) + own


def _digits(name: str, length: int) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:length]


def endpoint_of(owner: str) -> str:
    """Return the part of an owner that is the same for all callers of an endpoint."""
    return owner if owner == ANYONE else owner[:_ENDPOINT_CHARS]


def has_name(owner: str) -> bool:
    """Return True if the owner is one caller, which has a budget of its own."""
    return owner != ANYONE and not owner.endswith(_NO_CALLER)


def is_owner(text: str) -> bool:
    return _OWNER.fullmatch(text) is not None


def check_owner(owner: str) -> str:
    """Return the owner if it is well formed, because it becomes part of a path or key. Raises ValueError."""
    if not is_owner(owner):
        raise ValueError("not an owner of sessions")
    return owner


def check_image_name(image: str) -> None:
    """Raise FileNotFoundError if an image cannot have this name."""
    if not is_image_name(image):
        raise FileNotFoundError("not the name of an image")


def is_image_name(text: str) -> bool:
    return _HASH.fullmatch(text) is not None


def check_image(image: str, data: bytes | None) -> bytes:
    """Return the image's bytes. Raises OSError if they are missing or do not match the name."""
    if data is None:
        raise FileNotFoundError(f"image {image} of this session is missing")
    if image_hash(data) != image:
        raise OSError(f"image {image} of this session is damaged")
    return data


class EventsMissing(OSError):
    """The store has lost events that it had confirmed."""


def check_expired(session_id: str, number: int) -> None:
    """Raise EventsMissing unless the session has expired: its store has deleted the events before this number then."""
    if expiry(session_id) > time.time():
        raise EventsMissing(f"events before number {number} of this session are missing: the store has lost them")


def explain_failure(error: Exception) -> str:
    """Return the message for a client whose request needs the journal."""
    if isinstance(error, EventsMissing):
        return "the session's journal has lost events; open a new session, or restore the journal's data"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the session's journal is full; try again later"
    return "the session's journal cannot be reached; try again later"
