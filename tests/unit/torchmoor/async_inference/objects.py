"""What tests of object stores share: chunks, reading an object whole, and memory."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from types import TracebackType

from torchmoor.async_inference.objects.object_store import ObjectStore

MIB = 1 << 20


async def chunks_of(*chunks: bytes) -> AsyncIterator[bytes]:
    """Chunks as a store takes them."""
    for chunk in chunks:
        yield chunk


async def repeat(chunk: bytes, count: int) -> AsyncIterator[bytes]:
    """The same chunk many times: an object that was never whole in memory."""
    for _ in range(count):
        yield chunk


async def read_all(store: ObjectStore, url: str) -> bytes:
    """A whole object, whose announced size is right."""
    async with await store.open(url) as download:
        data = b"".join([chunk async for chunk in download.chunks])
    assert download.size == len(data)
    return data


class MemoryWatch:
    """How far this process's resident memory rises above what it was, looked at all the time."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._start = resident_bytes()
        self.growth_bytes = 0

    def __enter__(self) -> MemoryWatch:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(0.005):
            self.growth_bytes = max(self.growth_bytes, resident_bytes() - self._start)


def resident_bytes() -> int:
    """Of this process, now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
