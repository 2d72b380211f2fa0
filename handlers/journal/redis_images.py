"""Images of journals in Redis or Valkey: one key for all sessions of an owner.

    {owner}:picture:HASH      the image
    {owner}:sessions:HASH     the sessions that have it, by the time until which they need it

Both expire when the last of these sessions does. An image is stored before its session names it, and released after
its session is closed. So an image is never deleted while a session has it. An image that a killed worker
has not released is deleted when its session expires.
"""

from collections.abc import Iterable

from handlers.journal.journal import check_owner, needed_until
from handlers.journal.redis_connection import RedisConnection, within

# KEYS: image, sessions. Forget sessions that have expired; delete the image after the last one.
_RENEW = """
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', redis.call('TIME')[1])
local last = redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2]
if not last then
  local size = redis.call('STRLEN', KEYS[1])
  redis.call('UNLINK', KEYS[1], KEYS[2])
  return size
end
redis.call('EXPIREAT', KEYS[1], last)
redis.call('EXPIREAT', KEYS[2], last)
"""
# KEYS: image, sessions. ARGV: bytes, session, until when it needs the image.
_SHARE = f"""
local is_new = redis.call('GET', KEYS[1]) ~= ARGV[1]
if is_new then redis.call('SET', KEYS[1], ARGV[1]) end
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[2])
{_RENEW}
return is_new and #ARGV[1] or 0
"""
# KEYS: image, sessions. ARGV: session.
_RELEASE = f"""
redis.call('ZREM', KEYS[2], ARGV[1])
{_RENEW}
return 0
"""
# KEYS: a string. ARGV: the most bytes.
_GET = """
local size = redis.call('STRLEN', KEYS[1])
if size > tonumber(ARGV[1]) then return size end
return redis.call('GET', KEYS[1])
"""


class RedisSharedImages:
    """Safe for all threads, and for all processes that share the server."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection

    def share(self, session_id: str, owner: str, name: str, data: bytes) -> int:
        """Store an image for a session. Return the bytes that were written; 0 if the owner has the image."""
        return int(self._connection.run(_SHARE, _keys(owner, name), data, session_id, needed_until(session_id)))

    def release(self, session_id: str, owner: str, name: str) -> int:
        """Delete an image if no other session has it. Return the bytes that are free then."""
        return int(self._connection.run(_RELEASE, _keys(owner, name), session_id))

    def get(self, owner: str, name: str, max_bytes: int) -> bytes | None:
        """Read an image; None if it is missing. Raises DamagedRecord."""
        found: bytes | None = within(self._connection.run(_GET, _keys(owner, name)[:1], max_bytes), max_bytes)
        return found

    def renew(self, images: Iterable[tuple[str, str]]) -> None:
        """Forget the expired sessions of these images. images: owners and names."""
        self._connection.run_each(_RENEW, [_keys(owner, name) for owner, name in images])


def _keys(owner: str, name: str) -> tuple[str, str]:
    check_owner(owner)  # only a valid owner becomes a key
    return f"{{{owner}}}:picture:{name}", f"{{{owner}}}:sessions:{name}"
