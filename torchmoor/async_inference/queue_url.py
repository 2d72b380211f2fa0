"""What a queue's URL names. A URL may have a password in it: no error here shows any of it."""

from __future__ import annotations

from torchmoor.async_inference.queue import Queue
from torchmoor.settings import AsyncQueueSettings


def open_queue(url: str, settings: AsyncQueueSettings) -> Queue:
    """The queue at `sqlite:///a/file` or `redis://user:password@host:port/db` (rediss, valkey, valkeys likewise).

    Opens the file; makes no connection to a server yet. Raises ConfigError.
    """
    raise NotImplementedError
