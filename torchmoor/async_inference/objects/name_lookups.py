"""Look-ups of host names in threads that nothing waits for, because nothing can interrupt the system's resolver."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host name. Blocks, perhaps for longer than a connection may take. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class NameLookups:
    """Looks names up, at most `max_threads` at a time. The process can end while a look-up runs."""

    def __init__(self, max_threads: int) -> None:
        self._free = asyncio.Semaphore(max_threads)

    async def resolve(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host name. Raises OSError. Cancelling the caller does not stop the look-up."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        found: Future[list[str]] = Future()
        found.set_running_or_notify_cancel()  # the caller cannot cancel it

        def run() -> None:
            try:
                addresses = resolve(host, port)
            except Exception as exc:
                found.set_exception(exc)
            else:
                found.set_result(addresses)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._free.release)

        try:
            threading.Thread(target=run, name="lookup", daemon=True).start()
        except RuntimeError as exc:
            self._free.release()
            raise OSError("no thread can be started to look a name up") from exc
        return await asyncio.wrap_future(found)
