"""Journals in Redis or Valkey: per session a list of events, a hash of images, and a marker once it is closed.

Each operation is one script: one round trip, and atomic. All keys of a session have its id as their hash tag and so lie
on one node of a cluster; each expires with its session, so there is nothing to sweep. The server's settings decide
whether acknowledged writes survive a crash (docs/decisions/0008).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from handlers.journal.event import Event, check_size, decode_close, image_hash
from handlers.journal.journal import (
    EXPIRED_KEPT_S,
    MAX_CLAIM_BYTES,
    EventTaken,
    JournalClosed,
    check_image,
    check_image_name,
    claim_key,
    expiry,
    is_session_id,
)
from handlers.settings import JournalSettings
from torchmoor.wire.store_urls import RedisAddress

SCANNED = 1000  # keys of one page of ids
# KEYS: events, closed. ARGV: number, event, expiry.
_APPEND = """
if redis.call('EXISTS', KEYS[2]) == 1 then return 'closed' end
local count, number = redis.call('LLEN', KEYS[1]), tonumber(ARGV[1])
if count > number then
  if redis.call('LINDEX', KEYS[1], number) == ARGV[2] then return 'written' end
  return 'taken'
end
if count < number then return 'gap' end
redis.call('RPUSH', KEYS[1], ARGV[2])
redis.call('EXPIREAT', KEYS[1], ARGV[3])
return 'written'
"""
# KEYS: events, closed. ARGV: first, last, the most bytes of an event.
_READ = """
if redis.call('EXISTS', KEYS[2]) == 1 then return redis.call('GETRANGE', KEYS[2], 0, ARGV[3]) end
local events = redis.call('LRANGE', KEYS[1], ARGV[1], ARGV[2])
for number, event in ipairs(events) do
  if #event > tonumber(ARGV[3]) then events[number] = #event end
end
return events
"""
# KEYS: images, closed. ARGV: name, bytes, expiry.
_PUT_IMAGE = """
if redis.call('EXISTS', KEYS[2]) == 1 then return 'closed' end
redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIREAT', KEYS[1], ARGV[3])
return 'written'
"""
# KEYS: images. ARGV: name, the most bytes.
_GET_IMAGE = """
local size = redis.call('HSTRLEN', KEYS[1], ARGV[1])
if size > tonumber(ARGV[2]) then return size end
return redis.call('HGET', KEYS[1], ARGV[1])
"""
# KEYS: events, images, closed. ARGV: event, expiry, the most bytes of an event.
_CLOSE = """
redis.call('SETNX', KEYS[3], ARGV[1])
redis.call('EXPIREAT', KEYS[3], ARGV[2])
redis.call('UNLINK', KEYS[1], KEYS[2])
return redis.call('GETRANGE', KEYS[3], 0, ARGV[3])
"""
# KEYS: events, images, closed.
_DELETE = "redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3])"
# KEYS: claim. ARGV: value, seconds, the most bytes.
_CLAIM = """
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2], 'NX')
return redis.call('GETRANGE', KEYS[1], 0, ARGV[3] - 1)
"""


class RedisJournal:
    """client: returns bytes. tombstone_s: how long the marker of a closed session outlives its expiry."""

    used_bytes = 0

    def __init__(self, client: "redis.Redis", tombstone_s: int, settings: JournalSettings) -> None:
        self._client: Any = client
        self._tombstone_s = tombstone_s
        self._settings = settings

    def check_room(self) -> None:
        """Do nothing: the server refuses writes when it is full."""

    def append(self, session_id: str, number: int, event: Event) -> None:
        data = event.encode(session_id, self._settings.max_event_bytes)
        keys = (_key(session_id, "events"), _key(session_id, "closed"))
        said = _unless_closed(self._run(_APPEND, keys, number, data, self._expire_at(session_id)))
        if said == b"taken":
            raise EventTaken(f"event {number} of this session has been written already")
        if said == b"gap" and expiry(session_id) > time.time():  # the keys of an expired session are gone
            raise OSError(f"events before number {number} of this session are missing: the server has lost them")

    def read(self, session_id: str, start: int = 0, max_events: int | None = None) -> list[Event]:
        if max_events == 0:
            return []
        last = -1 if max_events is None else start + max_events - 1
        max_bytes = self._settings.max_event_bytes
        found = self._run(_READ, (_key(session_id, "events"), _key(session_id, "closed")), start, last, max_bytes)
        if isinstance(found, bytes):
            return [self._decode_close(session_id, found)]
        return [Event.decode(_within(data, max_bytes), session_id) for data in found]

    def put_image(self, session_id: str, data: bytes) -> str:
        name = image_hash(data)
        keys = (_key(session_id, "images"), _key(session_id, "closed"))
        _unless_closed(self._run(_PUT_IMAGE, keys, name, data, self._expire_at(session_id)))
        return name

    def get_image(self, session_id: str, image: str) -> bytes:
        check_image_name(image)
        max_bytes = self._settings.max_image_bytes
        found = self._run(_GET_IMAGE, [_key(session_id, "images")], image, max_bytes)
        return check_image(image, _within(found, max_bytes))

    def close(self, session_id: str, event: Event) -> Event:
        keys = [_key(session_id, name) for name in ("events", "images", "closed")]
        max_bytes = self._settings.max_event_bytes
        data = event.encode(session_id, max_bytes)
        expire_at = expiry(session_id) + self._tombstone_s
        return self._decode_close(session_id, self._run(_CLOSE, keys, data, expire_at, max_bytes))

    def delete(self, session_id: str) -> None:
        keys = [_key(session_id, name) for name in ("events", "images", "closed")]
        self._run(_DELETE, keys)

    def claim(self, name: str, value: str) -> str:
        keys = [f"torchmoor:claim:{claim_key(name)}"]
        first: bytes = self._run(_CLAIM, keys, value, self._settings.claim_s, MAX_CLAIM_BYTES)
        return first.decode(errors="replace")

    def list_ids(self, cursor: str = "") -> tuple[list[str], str]:
        with _translated():
            after, keys = self._client.scan(int(cursor or 0), match="torchmoor:{*}:events", count=SCANNED)
        names = [key.decode(errors="replace").partition("{")[2].partition("}")[0] for key in keys]
        return [name for name in names if is_session_id(name)], str(after) if after else ""

    def sweep(self, expired_before: int, *, is_full: bool = True) -> None:
        """Do nothing: every key expires by itself."""

    def _decode_close(self, session_id: str, data: bytes) -> Event:
        check_size(len(data), self._settings.max_event_bytes)
        return decode_close(data, session_id)

    def _run(self, script: str, keys: Sequence[str], *arguments: object) -> Any:
        """Return the script's result. Raises OSError."""
        with _translated():
            try:
                return self._client.eval(script, len(keys), *keys, *arguments)
            except redis.ReadOnlyError:  # the primary became a replica; its address may now lead to the new one
                self._client.connection_pool.disconnect()
                raise

    def _expire_at(self, session_id: str) -> int:
        return expiry(session_id) + EXPIRED_KEPT_S


def connect(address: RedisAddress, limits: JournalSettings) -> "redis.Redis":
    """Make a client with time-outs. Connects with the first command."""
    pool = redis.ConnectionPool(
        connection_class=redis.SSLConnection if address.tls else redis.Connection,
        host=address.host,
        port=address.port,
        db=address.db,
        username=address.username,
        password=address.password,
        protocol=2,  # a new connection needs fewer round trips
        socket_connect_timeout=limits.connect_timeout_s,
        socket_timeout=limits.timeout_s,
        retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),  # for a connection cut while idle
        max_connections=limits.max_in_flight,
    )
    return redis.Redis(connection_pool=pool)


def _key(session_id: str, name: str) -> str:
    expiry(session_id)  # only a valid id becomes a key
    return f"torchmoor:{{{session_id}}}:{name}"


def _within(found: Any, max_bytes: int) -> Any:
    """Return what a reading script found. Raises DamagedRecord if that is the size of something too large."""
    if isinstance(found, int):
        check_size(found, max_bytes)
    return found


def _unless_closed(said: Any) -> Any:
    """Return a writing script's result. Raises JournalClosed."""
    if said == b"closed":
        raise JournalClosed("this session was closed")
    return said


@contextmanager
def _translated() -> Iterator[None]:
    """Raise the library's errors as OSError, without their texts, which may quote arguments."""
    try:
        yield
    except redis.TimeoutError:
        raise TimeoutError("the journal's server did not answer in time") from None
    except redis.ConnectionError as exc:
        raise ConnectionError(f"the journal's server cannot be reached ({type(exc).__name__})") from None
    except redis.RedisError as exc:
        code = str(exc).partition(" ")[0]
        said = code if code.isalpha() and code.isupper() else type(exc).__name__
        raise OSError(f"the journal's server refused a command ({said})") from None
