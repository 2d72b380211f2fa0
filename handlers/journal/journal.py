"""The durable copy of a session, from which any instance can rebuild it: what every store of it must do.

A session's journal is a list of events, numbered from 0, each written once: the opening, images that were added, turns.
Whoever writes number n first has it; the other one learns so and gives way. Encoded images are kept beside
the events under the hash of their bytes. A journal holds what is needed to compute the session again, no tensors.
docs/decisions/0006 and 0008 say why.
"""

import hashlib
import re
from typing import Protocol

from handlers.journal.event import Event, image_hash

_SESSION = re.compile(r"ts-seq-[a-z2-7]{16}-([0-9a-f]{8})-[a-z0-9-]{1,200}")
_HASH = re.compile(r"[0-9a-f]{64}")


class EventTaken(Exception):
    """Somebody else wrote the event of this number: another instance serves the session too."""


class JournalClosed(Exception):
    """The session was closed: nothing of it is kept any more."""


class Journal(Protocol):
    """Where journals live.

    All methods may block, are thread-safe, and raise OSError when the store cannot be reached or cannot do what it is
    asked for, TimeoutError (which is one) when it does not answer. After an OSError it is not known whether a write
    was done; doing it again is safe.
    """

    def append(self, session_id: str, number: int, event: Event) -> None:
        """Write an event durably; those before it exist. Fine if this very event stands there already.

        Raises EventTaken if there is another one of this number, JournalClosed.
        """
        ...

    def read(self, session_id: str, start: int = 0, max_events: int | None = None) -> list[Event]:
        """The events from `start` on, in order; none if there is no such session. Of a closed one, just a "close"."""
        ...

    def put_image(self, session_id: str, data: bytes) -> str:
        """Keep an encoded image for the session; returns its hash. Raises JournalClosed."""
        ...

    def get_image(self, session_id: str, image: str) -> bytes:
        """Raises OSError if it is not there, or not whole."""
        ...

    def close(self, session_id: str) -> None:
        """Delete all of a session but the fact that it was closed, which `read` then answers."""
        ...

    def delete(self, session_id: str) -> None:
        """Delete all of a session that nobody knows of."""
        ...

    def claim(self, name: str, value: str) -> str:
        """The value that was first claimed under this name: this one, or an earlier one.

        A claim is kept for at least the setting journal.claim_s. The name may be anything; only its hash is kept.
        """
        ...

    def sweep(self, expired_before: int) -> None:
        """Delete what is left of sessions whose ids expired before this time, in seconds since 1970, and of claims.

        What it does in one call is bounded; what remains is for the next one.
        """
        ...


def expiry(session_id: str) -> int:
    """When the session ends, in seconds since 1970: it stands in the id. Raises ValueError if that is none."""
    match = _SESSION.fullmatch(session_id)
    if match is None:
        raise ValueError("not a session id")
    return int(match[1], 16)


def claim_key(name: str) -> str:
    """A claim's name in the store, which tells nothing of what it was made from."""
    return hashlib.sha256(name.encode()).hexdigest()


def check_image_name(image: str) -> None:
    """Raises FileNotFoundError if no image can have this name."""
    if not _HASH.fullmatch(image):
        raise FileNotFoundError("not the name of an image")


def check_image(image: str, data: bytes | None) -> bytes:
    """The image's bytes. Raises OSError if they are not there, or are not those that the name stands for."""
    if data is None:
        raise FileNotFoundError(f"image {image} of this session is missing")
    if image_hash(data) != image:
        raise OSError(f"image {image} of this session is damaged")
    return data
