"""Opens the queue that a URL names. A URL may contain a password, so no error quotes it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.queues.sqlite_queue import SqliteQueue
from torchmoor.config.settings import AsyncQueueSettings
from torchmoor.errors import ConfigError

FORMS = "sqlite:///a/file, redis://user:password@host:port/db, rediss://..., valkey://... or valkeys://..."
REDIS_PORT = 6379
_REDIS = {"redis": False, "valkey": False, "rediss": True, "valkeys": True}  # scheme: whether it uses TLS


def open_queue(url: str, settings: AsyncQueueSettings) -> Queue:
    """Open a SQLite file of this machine, or a client of a Redis or Valkey server. Raises ConfigError.

    The client does not connect yet.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or REDIS_PORT
    except ValueError:  # the cause quotes the URL
        raise ConfigError(f"the asynchronous queue's URL cannot be read; it must be {FORMS}") from None
    if parts.query or parts.fragment:
        raise ConfigError(f"the asynchronous queue's URL must not have a ? or #; write %3F and %23: {FORMS}")
    if parts.scheme == "sqlite":
        return SqliteQueue(_file(parts), settings)
    if parts.scheme in _REDIS:
        return _open_redis(parts, port, settings)
    raise ConfigError(f"the asynchronous queue's URL must be {FORMS}")


def _file(parts: SplitResult) -> Path:
    path = unquote(parts.path)
    if parts.netloc or not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise ConfigError("the asynchronous queue's URL must name a file of this machine: sqlite:///a/file")
    return Path("/" + path.lstrip("/"))  # four slashes are accepted, too


def _open_redis(parts: SplitResult, port: int, settings: AsyncQueueSettings) -> Queue:
    from torchmoor.async_inference.queues import redis_queue  # imported late: proxies without it start faster

    db = parts.path.removeprefix("/") or "0"
    if not parts.hostname or not db.isascii() or not db.isdigit():
        raise ConfigError("the asynchronous queue's URL must have a host and a database's number: redis://host:port/0")
    client = redis_queue.connect(
        host=parts.hostname,
        port=port,
        db=int(db),
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        tls=_REDIS[parts.scheme],
        limits=settings,
    )
    return redis_queue.RedisQueue(client, settings)
