"""Encodes and decodes the records of a journal: events, and parts of KV caches.

Other programs may write to a journal's store, so a record is checked in full before use, and its signature proves that
a worker of this fleet wrote it for this session.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from handlers.journal.event import DamagedRecord, Event, EventTooLarge, check_size
from handlers.journal.journal import is_image_name
from handlers.settings.journal import JournalSettings
from torchmoor.wire.session_ids import find_key, session_hash

_KINDS = ("open", "images", "queue", "begin", "end", "turn", "update", "delete", "close")
_EMPTY: Mapping[str, Any] = {**dict.fromkeys((each.name for each in fields(Event)), ""), "images": []}
_SESSION = "session"  # encoded with the event: binds it to its session
# No messages that a fleet signs for another purpose begin so:
_EVENT_CONTEXT = "torchmoor-event-v1"
_KV_CONTEXT = "torchmoor-kv-v1"
NAME_BYTES = SIGNATURE_BYTES = 32
HEAD_BYTES = NAME_BYTES + SIGNATURE_BYTES


class EventCodec:
    """Encodes and decodes events.

    keys: of the fleet's session ids, by key id. An event is signed with the key of its session's id. Without that key
    it has the hash of the session's id instead, which anybody who knows the id can write.
    """

    def __init__(self, settings: JournalSettings, keys: Mapping[str, bytes]) -> None:
        self._max_bytes = settings.max_event_bytes
        self._keys = keys

    def encode(self, event: Event, session_id: str) -> bytes:
        """Encode an event of this session. Raises EventTooLarge."""
        value = _to_dict(event)
        value[_SESSION] = self._sign(value, session_id) or session_hash(session_id)
        data = json.dumps(value, ensure_ascii=False).encode()
        if len(data) > self._max_bytes:
            raise EventTooLarge(
                f"the question and its answer take {len(data)} bytes in the journal, over {self._max_bytes}"
            )
        return data

    def decode(self, data: bytes, session_id: str) -> Event:
        """Decode an event of this session. Raises DamagedRecord."""
        check_size(len(data), self._max_bytes)
        try:
            value: Any = json.loads(data.decode())
        except (ValueError, RecursionError):
            raise DamagedRecord("an event is not JSON") from None
        if not isinstance(value, dict):
            raise DamagedRecord("an event is not an object")
        session = value.pop(_SESSION, None)
        event = _from_dict(value)
        self._check_session(event, session, session_id)
        return event

    def _check_session(self, event: Event, session: Any, session_id: str) -> None:
        """Raise DamagedRecord unless the event belongs to this session."""
        if not self._keys and session == session_hash(session_id):
            return
        signature = self._sign(_to_dict(event), session_id)
        is_text = isinstance(session, str) and session.isascii()
        if not is_text or signature is None or not hmac.compare_digest(session, signature):
            raise DamagedRecord("an event is not signed by this fleet for this session")

    def _sign(self, value: Mapping[str, Any], session_id: str) -> str | None:
        key = find_key(session_id, self._keys)
        if key is None:
            return None
        message = "\n".join((_EVENT_CONTEXT, session_id, json.dumps(value, sort_keys=True)))
        return hmac.digest(key, message.encode(), "sha256").hex()


def _to_dict(event: Event) -> dict[str, Any]:
    """Return the fields that are not empty: most events have few."""
    return {name: value for name, value in asdict(event).items() if value}


def _from_dict(value: Mapping[str, Any]) -> Event:
    """Check the fields of an event and their types. Raises DamagedRecord."""
    value = {**_EMPTY, **value}
    if value.keys() != _EMPTY.keys():
        raise DamagedRecord("an event has unknown fields")
    images = value.pop("images")
    if not isinstance(images, list) or not all(isinstance(each, str) and is_image_name(each) for each in images):
        raise DamagedRecord("an event has malformed names of images")
    if not all(_is_text(text) for text in value.values()) or value["kind"] not in _KINDS:
        raise DamagedRecord("an event has a field of another type or an unknown kind")
    return Event(**value, images=tuple(images))


def _is_text(value: Any) -> bool:
    """Return True for a str that is valid Unicode."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


class KvCodec:
    """Encodes and decodes parts of KV caches: name, signature, content.

    The name identifies the model, and all tokens and images up to the part's end; the signature is for this position of
    this session.

    keys: of the fleet's session ids, by key id. Without that of the session's id, the signature is a checksum only.
    """

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        self._keys = keys

    def encode(self, session_id: str, number: int, name: bytes, content: bytes) -> bytes:
        return b"".join((name, self._sign(session_id, number, name, content), content))

    def decode(self, data: bytes, session_id: str, number: int) -> tuple[bytes, memoryview]:
        """Return a part's name and content. Raises DamagedRecord."""
        if len(data) < HEAD_BYTES:
            raise DamagedRecord("a part of a KV cache is too short")
        name, signature, content = data[:NAME_BYTES], data[NAME_BYTES:HEAD_BYTES], memoryview(data)[HEAD_BYTES:]
        if not hmac.compare_digest(signature, self._sign(session_id, number, name, content)):
            raise DamagedRecord("a part of a KV cache is not signed by this fleet for its place")
        return name, content

    def _sign(self, session_id: str, number: int, name: bytes, content: bytes | memoryview) -> bytes:
        key = find_key(session_id, self._keys)
        head = f"{_KV_CONTEXT}\n{session_id}\n{number}\n".encode() + name
        digest = hashlib.sha256(head) if key is None else hmac.new(key, head, "sha256")
        digest.update(content)
        return digest.digest()
