"""An event of a session's journal, and its encoding.

A journal is input like any other: other programs may write to its store. So an event is checked in full before use.
"""

import hashlib
import json
import re
import secrets
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torchmoor.wire.session_hash import session_hash

_KINDS = ("open", "images", "turn", "update", "delete", "close")
_IMAGE = re.compile(r"[0-9a-f]{64}")
_LATER = ("system", "response", "asked_by")  # not written where empty, so that older versions can read the event
_SESSION = "session"  # encoded with the event: the hash of its session's id


class DamagedRecord(ValueError):
    """The journal holds something that no worker writes at this place. The message does not quote it."""


class EventTooLarge(Exception):
    """An event exceeds the setting journal.max_event_bytes. The message is for the client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a session.

    kind: "open", "images", "turn", "update", "delete" or "close". images: hashes of the pictures that it adds or, in a
    turn, that the question refers to, in order. question, answer: of a turn. system: the system message that the first
    turn brings. invocation_id: the client's, which identifies a retry; of a "close", that of the request that closed
    the session.
    asked_by: "tool" if the question is the results of tools, as JSON; else empty.
    response: of a turn of OpenAI's Responses API, the response's fields as JSON; its question and answer are then lists
    of items as JSON. A turn that only adds items to a conversation has no answer, and `{}` as its response. Of an
    "open" or an "update", the conversation's fields. The question of a "delete" is the number of the deleted response,
    or that and the place of the deleted item; that of an "open" how many turns were copied from another session.
    nonce: distinguishes writes of equal content: a writer whose write timed out, and that finds the number taken,
    recognises its own event by it.
    """

    kind: str
    images: tuple[str, ...] = ()
    question: str = ""
    answer: str = ""
    system: str = ""
    response: str = ""
    asked_by: str = ""
    invocation_id: str = ""
    nonce: str = field(default_factory=lambda: secrets.token_hex(8), compare=False)

    def encode(self, session_id: str, max_bytes: int) -> bytes:
        """Encode the event for this session's journal. Raises EventTooLarge."""
        value = {**asdict(self), _SESSION: session_hash(session_id)}
        for name in _LATER:
            if not value[name]:
                del value[name]
        data = json.dumps(value, ensure_ascii=False).encode()
        if len(data) > max_bytes:
            raise EventTooLarge(f"the question and its answer take {len(data)} bytes in the journal, over {max_bytes}")
        return data

    @classmethod
    def decode(cls, data: bytes, session_id: str) -> "Event":
        """Decode an event of this session. Raises DamagedRecord.

        An event without the hash of a session was written by an older version.
        """
        try:
            value: Any = json.loads(data.decode())
        except (ValueError, RecursionError):
            raise DamagedRecord("an event is not JSON") from None
        if not isinstance(value, dict) or value.pop(_SESSION, None) not in (None, session_hash(session_id)):
            raise DamagedRecord("an event belongs to another session or to none")
        value = {**dict.fromkeys(_LATER, ""), **value}
        if value.keys() != {each.name for each in fields(cls)}:
            raise DamagedRecord("an event has other fields than it should")
        images = value.pop("images")
        if not isinstance(images, list) or not all(_is_text(each) and _IMAGE.fullmatch(each) for each in images):
            raise DamagedRecord("an event names images in another form")
        if not all(_is_text(text) for text in value.values()) or value["kind"] not in _KINDS:
            raise DamagedRecord("an event has a field of another type or an unknown kind")
        return cls(**value, images=tuple(images))


CLOSE = Event(kind="close", nonce="")  # of a session that was closed without an invocation id


def decode_close(data: bytes, session_id: str) -> Event:
    """Decode the record of a closed session, which older versions left empty. Raises DamagedRecord."""
    return Event.decode(data, session_id) if data else CLOSE


def check_size(num_bytes: int, max_bytes: int) -> None:
    """Raise DamagedRecord if a record is larger than any that a worker writes."""
    if num_bytes > max_bytes:
        raise DamagedRecord(f"a record has {num_bytes} bytes, over {max_bytes}")


def image_hash(data: bytes) -> str:
    """Return an encoded image's name in the journal."""
    return hashlib.sha256(data).hexdigest()


def _is_text(value: Any) -> bool:
    """True for a str that is valid Unicode."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False
