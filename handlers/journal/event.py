"""One step of a session's life, as bytes and back."""

import hashlib
import json
import secrets
from dataclasses import asdict, dataclass, field
from typing import Any

_KINDS = ("open", "images", "turn", "close")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One step of a session's life.

    kind: "open", "images", "turn" or "close". images: hashes of the pictures that it added or, of a turn, that the
    question is about, in order. question, answer: a turn's. invocation_id: the client's, so that what is sent again
    is not done twice. nonce: tells this writing from any other of equal content: a writer that did not hear whether
    its event was written, and finds the number taken, sees by it whether that is its own.
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
        """Raises ValueError if the bytes are no event."""
        value: Any = json.loads(data)
        if not isinstance(value, dict) or value.get("kind") not in _KINDS:
            raise ValueError("not an event of a known kind")
        try:
            return cls(**{**value, "images": tuple(value.get("images", ()))})
        except TypeError as exc:
            raise ValueError(f"not an event: {exc}") from exc


CLOSE = Event(kind="close", nonce="")


def image_hash(data: bytes) -> str:
    """An encoded image's name in the journal."""
    return hashlib.sha256(data).hexdigest()
