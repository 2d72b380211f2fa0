"""The connection to a server of Redis or Valkey: runs scripts and commands, and raises its errors as OSError.

All keys of journals begin with KEY_PREFIX, which only this module knows: callers name keys without it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from handlers.journal.event import check_size
from handlers.settings.journal import JournalSettings
from torchmoor.wire.connection_errors import failure_reason
from torchmoor.wire.store_urls import RedisAddress

KEY_PREFIX = "torchmoor:"
SCANNED = 1000  # keys of one page


class RedisConnection:
    """Makes one round trip per call. client: returns bytes."""

    def __init__(self, client: "redis.Redis") -> None:
        self._client: Any = client

    def run(self, script: str, keys: Sequence[str], *arguments: object) -> Any:
        """Return the script's result. Raises OSError."""
        with _translated():
            try:
                return self._client.eval(script, len(keys), *map(_whole, keys), *arguments)
            except redis.ReadOnlyError:  # the primary became a replica; its address may now lead to the new one
                self._client.connection_pool.disconnect()
                raise

    def scan(self, cursor: int, pattern: str) -> tuple[int, list[str]]:
        """Return the next cursor, 0 at the end, and some keys. Raises OSError."""
        with _translated():
            following, keys = self._client.scan(cursor, match=_whole(pattern), count=SCANNED)
        return following, [key.decode(errors="replace").removeprefix(KEY_PREFIX) for key in keys]

    def run_each(self, script: str, keys: Iterable[Sequence[str]]) -> None:
        """Run the script for each group of keys, in one round trip. Raises OSError."""
        self._run_all(("EVAL", script, len(group), *map(_whole, group)) for group in keys)

    def read_all(self, commands: Iterable[tuple[str, ...]]) -> list[Any]:
        """Run many commands in one round trip: each a command, its key and its arguments. Raises OSError."""
        return self._run_all((command, _whole(key), *arguments) for command, key, *arguments in commands)

    def _run_all(self, commands: Iterable[tuple[object, ...]]) -> list[Any]:
        with _translated():
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            results: list[Any] = pipeline.execute()
            return results


def within(found: Any, max_bytes: int) -> Any:
    """Return a reading script's result. Raises DamagedRecord if it is a size, for a value above max_bytes."""
    if isinstance(found, int):
        check_size(found, max_bytes)
    return found


def _whole(key: str) -> str:
    return KEY_PREFIX + key


def connect(address: RedisAddress, limits: JournalSettings) -> "redis.Redis":
    """Make a client with time-outs. Connects with the first command."""
    pool = redis.ConnectionPool(
        connection_class=redis.SSLConnection if address.tls else redis.Connection,
        **address.options(connect_timeout_s=limits.connect_timeout_s, timeout_s=limits.timeout_s),
        retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),  # the connection was closed while idle
        max_connections=limits.max_in_flight + 1,  # a sweep, too
    )
    return redis.Redis(connection_pool=pool)


@contextmanager
def _translated() -> Iterator[None]:
    """Raise the library's errors as OSError, without their texts, which may quote arguments."""
    try:
        yield
    except redis.TimeoutError:
        raise TimeoutError("the journal's server did not answer in time") from None
    except redis.ConnectionError as exc:
        raise ConnectionError(f"the journal's server cannot be reached ({failure_reason(exc)})") from None
    except redis.RedisError as exc:
        code = str(exc).partition(" ")[0]
        kind = code if code.isalpha() and code.isupper() else type(exc).__name__
        raise OSError(f"the journal's server refused a command ({kind})") from None
