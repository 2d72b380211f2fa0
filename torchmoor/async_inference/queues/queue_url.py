"""Opens the queue that a URL names. A URL may contain a password, so no error quotes it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.queues.sqlite_queue import SqliteQueue
from torchmoor.config.async_queue import AsyncQueueSettings
from torchmoor.errors import ConfigError
from torchmoor.wire.store_urls import REDIS_SCHEMES, SQLITE_SCHEME, read_redis_address

FORMS = "sqlite:///a/file, redis://user:password@host:port/db, rediss://..., valkey://... or valkeys://..."


def open_queue(url: str, settings: AsyncQueueSettings) -> Queue:
    """Open a SQLite file of this machine, or a client of a Redis or Valkey server. Raises ConfigError.

    The client does not connect yet.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # the cause quotes the URL
        raise ConfigError(f"the asynchronous queue's URL cannot be read; it must be {FORMS}") from None
    if parts.query or parts.fragment:
        raise ConfigError(f"the asynchronous queue's URL must not have a ? or #; write %3F and %23: {FORMS}")
    if parts.scheme == SQLITE_SCHEME:
        return SqliteQueue(_file(parts), settings)
    if parts.scheme in REDIS_SCHEMES:
        return _open_redis(parts, settings)
    raise ConfigError(f"the asynchronous queue's URL must be {FORMS}")


def _file(parts: SplitResult) -> Path:
    path = unquote(parts.path)
    if parts.netloc or not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise ConfigError("the asynchronous queue's URL must name a file of this machine: sqlite:///a/file")
    return Path("/" + path.lstrip("/"))  # four slashes are accepted, too


def _open_redis(parts: SplitResult, settings: AsyncQueueSettings) -> Queue:
    from torchmoor.async_inference.queues import redis_queue  # imported late: proxies without it start faster

    address = read_redis_address(parts)
    if address is None:
        raise ConfigError("the asynchronous queue's URL must have a host and a database's number: redis://host:port/0")
    return redis_queue.RedisQueue(redis_queue.connect(address, settings), settings)
