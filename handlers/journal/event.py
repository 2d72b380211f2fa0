"""An event of a session's journal, and its encoding."""

import hashlib
import json
import secrets
from dataclasses import asdict, dataclass, field
from typing import Any

_KINDS = ("open", "images", "turn", "close")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a session.

    kind: "open", "images", "turn" or "close". images: hashes of the pictures that it adds or, in a turn, that the
    question refers to, in order. question, answer: of a turn. invocation_id: the client's, which identifies a retry;
    of a "close", that of the request that closed the session.
    nonce: distinguishes writes of equal content: a writer whose write timed out, and that finds the number taken,
    recognises its own event by it.
    """

    kind: str
    images: tuple[str, ...] = ()
    question: str = ""
    answer: str = ""
    invocation_id: str = ""
    nonce: str = field(default_factory=lambda: secrets.token_hex(8), compare=False)

    def encode(self) -> bytes:
        return json.dumps(asdict(self), ensure_ascii=False).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Event":
        """Decode an event. Raises ValueError."""
        value: Any = json.loads(data)
        if not isinstance(value, dict) or value.get("kind") not in _KINDS:
            raise ValueError("not an event of a known kind")
        try:
            return cls(**{**value, "images": tuple(value.get("images", ()))})
        except TypeError as exc:
            raise ValueError(f"not an event: {exc}") from exc


CLOSE = Event(kind="close", nonce="")  # of a session that was closed without an invocation id


def decode_close(data: bytes) -> Event:
    """Decode the record of a closed session, which older versions left empty. Raises ValueError."""
    return Event.decode(data) if data else CLOSE


def image_hash(data: bytes) -> str:
    """Return an encoded image's name in the journal."""
    return hashlib.sha256(data).hexdigest()
