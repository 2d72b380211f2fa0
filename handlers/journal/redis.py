"""Journals in Redis or Valkey: per session a list of events, its images' names, and a marker once it is closed.

    {session id}:events      :pictures, the owners of its images by name      :account, owner and bytes      :closed
                :kv, the parts of its KV cache
    {owner}:listed, sessions by their expiry
    and images, see handlers/journal/redis_images.py

Each operation on a session is one script: one round trip, and atomic. All keys of a session have its id as their hash
tag and so lie on one node of a cluster; each expires with its session, so there is nothing to sweep. The server's
settings decide whether acknowledged writes survive a crash (docs/decisions/0008).
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from handlers.journal.budget import JournalUsage
from handlers.journal.event import DamagedRecord, Event, image_hash
from handlers.journal.journal import (
    ANYONE,
    EXPIRED_KEPT_S,
    MAX_CLAIM_BYTES,
    MAX_LISTED,
    NO_KEYS,
    EventTaken,
    JournalClosed,
    Listed,
    check_expired,
    check_image,
    check_image_name,
    check_owner,
    claim_key,
    expiry,
    is_owner,
    is_session_id,
    make_listed,
    needed_until,
    read_listed,
)
from handlers.journal.redis_connection import RedisConnection, within
from handlers.journal.redis_images import RedisSharedImages
from handlers.journal.stored_journal import StoredJournal
from handlers.settings.journal import JournalSettings

SESSION_BYTES = 600  # that a server needs for a session besides its events and images
# KEYS: events, closed, account. ARGV: number, event, expiry, owner.
_APPEND = """
if redis.call('EXISTS', KEYS[2]) == 1 then return 'closed' end
local count, number = redis.call('LLEN', KEYS[1]), tonumber(ARGV[1])
if count > number then
  if redis.call('LINDEX', KEYS[1], number) == ARGV[2] then return 'again' end
  return 'taken'
end
if count < number then return 'gap' end
redis.call('RPUSH', KEYS[1], ARGV[2])
redis.call('HSETNX', KEYS[3], 'owner', ARGV[4])
redis.call('HINCRBY', KEYS[3], 'bytes', #ARGV[2])
redis.call('EXPIREAT', KEYS[1], ARGV[3])
redis.call('EXPIREAT', KEYS[3], ARGV[3])
return 'written'
"""
# KEYS: events, closed. ARGV: first, last, the most bytes of an event. Nothing if events before the first are missing.
_READ = """
if redis.call('EXISTS', KEYS[2]) == 1 then return redis.call('GETRANGE', KEYS[2], 0, ARGV[3]) end
if redis.call('LLEN', KEYS[1]) < tonumber(ARGV[1]) then return false end
local events = redis.call('LRANGE', KEYS[1], ARGV[1], ARGV[2])
for number, event in ipairs(events) do
  if #event > tonumber(ARGV[3]) then events[number] = #event end
end
return events
"""
# KEYS: pictures, closed. ARGV: name, owner, expiry.
_NAME_IMAGE = """
if redis.call('EXISTS', KEYS[2]) == 1 then return 'closed' end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIREAT', KEYS[1], ARGV[3])
return 'written'
"""
# KEYS: pictures. ARGV: name.
_FIND_OWNER = "return redis.call('HGET', KEYS[1], ARGV[1])"
# KEYS: kv, closed, account. ARGV: number, data, expiry. Return by how many bytes the parts have grown.
_PUT_KV = """
if redis.call('EXISTS', KEYS[2]) == 1 or redis.call('EXISTS', KEYS[3]) == 0 then return 'closed' end
local growth = #ARGV[2] - redis.call('HSTRLEN', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIREAT', KEYS[1], ARGV[3])
redis.call('HINCRBY', KEYS[3], 'kv', growth)
return growth
"""
# KEYS: kv. ARGV: first number, last number, the most bytes.
_READ_KV = """
local found = {}
for number = tonumber(ARGV[1]), tonumber(ARGV[2]) do
  local size = redis.call('HSTRLEN', KEYS[1], number)
  if size == 0 then return found end
  found[#found + 1] = size > tonumber(ARGV[3]) and size or redis.call('HGET', KEYS[1], number)
end
return found
"""
# KEYS: events, pictures, account, closed, kv.
_END = """
local images, account = redis.call('HGETALL', KEYS[2]), redis.call('HMGET', KEYS[3], 'owner', 'bytes', 'kv')
redis.call('UNLINK', KEYS[1], KEYS[3], KEYS[5])
"""
# KEYS: those of _END. ARGV: event, expiry, the most bytes of an event.
_CLOSE = f"""
redis.call('SETNX', KEYS[4], ARGV[1])
redis.call('EXPIREAT', KEYS[4], ARGV[2])
{_END}
return {{images, account, redis.call('GETRANGE', KEYS[4], 0, ARGV[3])}}
"""
# KEYS: those of _END.
_DELETE = f"""
redis.call('UNLINK', KEYS[4])
{_END}
return {{images, account}}
"""
# KEYS: pictures.
_FORGET = "redis.call('UNLINK', KEYS[1])"
# KEYS: those of _END.
_LIST_IMAGES = "return {redis.call('HGETALL', KEYS[2]), {false, false, false}}"
# KEYS: claim. ARGV: value, seconds, the most bytes.
_CLAIM = """
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2], 'NX')
return redis.call('GETRANGE', KEYS[1], 0, ARGV[3] - 1)
"""

# KEYS: listed. ARGV: name, expiry, the time before which sessions have expired.
_ENLIST = """
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', '(' .. ARGV[3])
local last = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')
if last[2] then redis.call('EXPIREAT', KEYS[1], math.floor(tonumber(last[2])) + 1) end
"""
# KEYS: listed. ARGV: name.
_DELIST = "redis.call('ZREM', KEYS[1], ARGV[1])"
# KEYS: listed. ARGV: the time from which sessions have not expired, the most names.
_LIST_OWNED = "return redis.call('ZREVRANGEBYSCORE', KEYS[1], '+inf', ARGV[1], 'LIMIT', 0, ARGV[2])"


class RedisJournal(StoredJournal):
    """tombstone_s: how long the marker of a closed session outlives its expiry. keys: see EventCodec."""

    def __init__(
        self,
        connection: RedisConnection,
        tombstone_s: int,
        settings: JournalSettings,
        keys: Mapping[str, bytes] = NO_KEYS,
    ) -> None:
        super().__init__(settings, keys)
        self._connection = connection
        self._images = RedisSharedImages(connection)
        self._tombstone_s = tombstone_s

    def append(self, session_id: str, number: int, event: Event, owner: str) -> None:
        data = self._codec.encode(event, session_id)
        keys = _keys(session_id, "events", "closed", "account")
        reply = self._connection.run(_APPEND, keys, number, data, needed_until(session_id), check_owner(owner))
        if reply == b"taken":
            raise EventTaken(number)
        if reply == b"gap":
            check_expired(session_id, number)
        if _unless_closed(reply) == b"written":
            num_bytes = len(data) if number else SESSION_BYTES + len(data)
            self._budget.add(owner, expiry(session_id), num_bytes, int(number == 0))

    def read(self, session_id: str, start: int = 0, max_events: int | None = None) -> list[Event]:
        if max_events == 0:
            return []
        last = -1 if max_events is None else start + max_events - 1
        max_bytes = self._settings.max_event_bytes
        found = self._connection.run(_READ, _keys(session_id, "events", "closed"), start, last, max_bytes)
        if found is None:
            check_expired(session_id, start)
            return []
        if isinstance(found, bytes):
            return [self._codec.decode(found, session_id)]
        return [self._codec.decode(within(data, max_bytes), session_id) for data in found]

    def put_image(self, session_id: str, data: bytes, owner: str) -> str:
        name, expires_at = image_hash(data), expiry(session_id)
        self._budget.add(owner, expires_at, self._images.share(session_id, owner, name, data))
        keys = _keys(session_id, "pictures", "closed")
        try:
            _unless_closed(self._connection.run(_NAME_IMAGE, keys, name, owner, needed_until(session_id)))
        except JournalClosed:
            self._budget.add(owner, expires_at, -self._images.release(session_id, owner, name))
            raise
        return name

    def get_image(self, session_id: str, image: str) -> bytes:
        check_image_name(image)
        owner = self._connection.run(_FIND_OWNER, _keys(session_id, "pictures"), image)
        max_bytes = self._settings.max_image_bytes
        data = None if owner is None else self._images.get(_read_owner(owner), image, max_bytes)
        return check_image(image, data)

    def put_kv(self, session_id: str, number: int, data: bytes, owner: str) -> bool:
        self._budget.check_kv(owner, len(data))
        keys = _keys(session_id, "kv", "closed", "account")
        reply = self._connection.run(_PUT_KV, keys, number, data, needed_until(session_id))
        if reply == b"closed":
            return False
        self._budget.add(owner, expiry(session_id), kv_bytes=int(reply))
        return True

    def read_kv(self, session_id: str, first: int, count: int, max_bytes: int) -> list[bytes]:
        found = self._connection.run(_READ_KV, _keys(session_id, "kv"), first, first + count - 1, max_bytes)
        return [within(data, max_bytes) for data in found]

    def close(self, session_id: str, event: Event) -> Event:
        max_bytes = self._settings.max_event_bytes
        data = self._codec.encode(event, session_id)
        expire_at = expiry(session_id) + self._tombstone_s
        images, account, closed = self._connection.run(_CLOSE, _all_keys(session_id), data, expire_at, max_bytes)
        self._free(session_id, images, account)
        return self._codec.decode(closed, session_id)

    def delete(self, session_id: str) -> None:
        self._free(session_id, *self._connection.run(_DELETE, _all_keys(session_id)))

    def _free(self, session_id: str, images: Sequence[bytes], account: Sequence[bytes | None]) -> None:
        """Release a session's images, names and owners in turn, and count the session's bytes no longer."""
        num_bytes = num_sessions = 0
        for name, owner in zip(images[::2], images[1::2], strict=True):
            num_bytes += self._images.release(session_id, _read_owner(owner), name.decode())
        if images:  # the names stay until then, so that another sweep can repeat this
            self._connection.run(_FORGET, _keys(session_id, "pictures"))
        of_session, event_bytes, kv_bytes = account
        if event_bytes is not None:
            num_bytes += int(event_bytes) + SESSION_BYTES
            num_sessions = 1
        owner_name = ANYONE if of_session is None else _read_owner(of_session)
        self._budget.add(owner_name, expiry(session_id), -num_bytes, -num_sessions, -int(kv_bytes or 0))

    def claim(self, name: str, value: str) -> str:
        keys = [f"claim:{claim_key(name)}"]
        first: bytes = self._connection.run(_CLAIM, keys, value, self._settings.claim_s, MAX_CLAIM_BYTES)
        return first.decode(errors="replace")

    def enlist(self, session_id: str, label: str, owner: str) -> None:
        listed = make_listed(session_id, label)
        self._connection.run(_ENLIST, [_list_key(owner)], listed.name, listed.expires_at, int(time.time()))

    def delist(self, session_id: str, label: str, owner: str) -> None:
        self._connection.run(_DELIST, [_list_key(owner)], make_listed(session_id, label).name)

    def list_owned(self, owner: str) -> list[Listed]:
        names = self._connection.run(_LIST_OWNED, [_list_key(owner)], int(time.time()), MAX_LISTED)
        found = (read_listed(name.decode(errors="replace")) for name in names)
        return [listed for listed in found if listed is not None]

    def list_ids(self, cursor: str = "") -> tuple[list[str], str]:
        after, keys = self._connection.scan(int(cursor or 0), "{*}:events")
        names = [_tag(key) for key in keys]
        return [name for name in names if is_session_id(name)], str(after) if after else ""

    def sweep(self, expired_before: int, *, is_full: bool) -> None:
        """Release the images of closed sessions and measure, if is_full. Redis deletes expired keys itself."""
        self._budget.expire(expired_before)
        if is_full:
            self._measure()

    def _measure(self) -> None:
        found, seen = self._budget.begin_measurement(), set[int]()
        cursor, is_last = 0, False
        while not is_last:
            cursor, keys = self._connection.scan(cursor, "{*")
            is_last = cursor == 0
            self._release_closed([key for key in keys if key.endswith("}:pictures")])
            images = _unseen((key for key in keys if "}:picture:" in key and is_owner(_tag(key))), seen)
            self._images.renew((_tag(key), key.rpartition(":")[2]) for key in images)
            self._measure_images(images, found)
            self._measure_sessions(_unseen((key for key in keys if key.endswith("}:account")), seen), found)
        self._budget.replace(found)

    def _measure_sessions(self, keys: Sequence[str], found: JournalUsage) -> None:
        accounts = self._connection.read_all([("HMGET", key, "owner", "bytes", "kv") for key in keys])
        for key, (owner, num_bytes, kv_bytes) in zip(keys, accounts, strict=True):
            is_whole = is_session_id(_tag(key)) and is_owner((owner or b"").decode(errors="replace"))
            if is_whole and (num_bytes or b"").isdigit():  # else it has expired, or another program has written it
                of_kv = int(kv_bytes) if (kv_bytes or b"").isdigit() else 0
                found.add(owner.decode(), expiry(_tag(key)), int(num_bytes) + SESSION_BYTES, 1, of_kv)

    def _measure_images(self, keys: Sequence[str], found: JournalUsage) -> None:
        answers = self._connection.read_all([(command, key) for key in keys for command in ("STRLEN", "TTL")])
        now = int(time.time())
        for key, num_bytes, ttl_s in zip(keys, answers[::2], answers[1::2], strict=True):
            found.add(_tag(key), now + ttl_s - EXPIRED_KEPT_S, num_bytes)

    def _release_closed(self, keys: Sequence[str]) -> None:
        """Release the images of closed sessions, which killed workers have left."""
        ids = [_tag(key) for key in keys if is_session_id(_tag(key))]
        closed = self._connection.read_all([("EXISTS", *_keys(session_id, "closed")) for session_id in ids])
        for session_id in (session_id for session_id, is_closed in zip(ids, closed, strict=True) if is_closed):
            self._free(session_id, *self._connection.run(_LIST_IMAGES, _all_keys(session_id)))


def _keys(session_id: str, *names: str) -> list[str]:
    expiry(session_id)  # only a valid id becomes a key
    return [f"{{{session_id}}}:{name}" for name in names]


def _list_key(owner: str) -> str:
    return f"{{{check_owner(owner)}}}:listed"


def _all_keys(session_id: str) -> list[str]:
    return _keys(session_id, "events", "pictures", "account", "closed", "kv")


def _tag(key: str) -> str:
    """Return the part of a key that decides about its node: a session's id or an owner."""
    return key.partition("{")[2].partition("}")[0]


def _unseen(keys: Iterable[str], seen: set[int]) -> list[str]:
    """Return the keys that a scan, which may repeat some, returns for the first time. seen: hashes of earlier ones."""
    found = [key for key in dict.fromkeys(keys) if hash(key) not in seen]
    seen.update(map(hash, found))
    return found


def _read_owner(data: bytes) -> str:
    """Decode an owner. Raises DamagedRecord."""
    owner = data.decode(errors="replace")
    if not is_owner(owner):
        raise DamagedRecord("the owner of a session has another form")
    return owner


def _unless_closed(reply: Any) -> Any:
    """Return a writing script's result. Raises JournalClosed."""
    if reply == b"closed":
        raise JournalClosed()
    return reply
