"""URLs of stores: the schemes that journal, queue and results may have, and the parts of a Redis URL.

A URL may have a password in it, so no error of this module shows any part of it.
"""

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, unquote

DIRECTORY_SCHEME = "file"
SQLITE_SCHEME = "sqlite"
S3_SCHEME = "s3"
REDIS_SCHEMES = {"redis": False, "valkey": False, "rediss": True, "valkeys": True}  # whether with TLS
REDIS_PORT = 6379
JOURNAL_SCHEMES = (DIRECTORY_SCHEME, *REDIS_SCHEMES, S3_SCHEME)
QUEUE_SCHEMES = (SQLITE_SCHEME, *REDIS_SCHEMES)
RESULT_SCHEMES = (DIRECTORY_SCHEME, S3_SCHEME)
JOURNAL_URLS = "file:///a/directory, redis://host:port/db, rediss://..., valkey://... or s3://bucket/prefix"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """A database of a Redis or Valkey server, and the credentials to use there."""

    host: str
    port: int
    db: int
    username: str | None
    password: str | None = field(repr=False)
    tls: bool

    def options(self, *, connect_timeout_s: float, timeout_s: float) -> dict[str, Any]:
        """Return the arguments for every redis-py connection to this address."""
        return {
            "host": self.host,
            "port": self.port,
            "db": self.db,
            "username": self.username,
            "password": self.password,
            "protocol": 2,  # with version 3, a new connection needs more round trips
            "socket_connect_timeout": connect_timeout_s,
            "socket_timeout": timeout_s,
        }


def read_redis_address(parts: SplitResult) -> RedisAddress | None:
    """Read `redis://user:password@host:port/db`, split; None unless it names a host and a database's number."""
    db = parts.path.removeprefix("/") or "0"
    if not parts.hostname or not db.isascii() or not db.isdigit():
        return None
    return RedisAddress(
        host=parts.hostname,
        port=parts.port or REDIS_PORT,
        db=int(db),
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        tls=REDIS_SCHEMES[parts.scheme],
    )
