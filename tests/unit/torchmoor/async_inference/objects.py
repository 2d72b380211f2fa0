"""Shared parts of the object stores' tests: chunks, reading a whole object, and memory."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TypeVar

from torchmoor.async_inference.objects.object_store import ObjectStore

MIB = 1 << 20

S = TypeVar("S", bound=ObjectStore)


async def chunks_of(*chunks: bytes) -> AsyncIterator[bytes]:
    """Yield an object's chunks, as a store takes them."""
    for chunk in chunks:
        yield chunk


async def repeat(chunk: bytes, count: int) -> AsyncIterator[bytes]:
    """Yield the same chunk repeatedly: an object that is never whole in memory."""
    for _ in range(count):
        yield chunk


@asynccontextmanager
async def closing(store: S) -> AsyncIterator[S]:
    """Yield a store, and close it at the end."""
    try:
        yield store
    finally:
        await store.close()


async def read_all(store: ObjectStore, url: str) -> bytes:
    """Read a whole object and check its announced size."""
    async with await store.open(url) as download:
        data = b"".join([chunk async for chunk in download.chunks])
    assert download.size == len(data)
    return data


class MemoryWatch:
    """Measures continuously how far this process's resident memory rises above its initial value."""

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
    """Return this process's resident memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
