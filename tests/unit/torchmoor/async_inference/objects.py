"""Shared parts of the object stores' tests: chunks, and reading a whole object."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
