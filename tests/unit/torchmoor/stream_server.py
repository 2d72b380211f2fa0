"""A server of streams whose connections end before the test does."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def stream_server(serve: Serve, **options: Any) -> AsyncIterator[int]:
    """Run a server; yield its port. At the end its clients must have gone. options: for `asyncio.start_server`."""
    others = asyncio.all_tasks()
    server = await asyncio.start_server(serve, "127.0.0.1", 0, **options)
    async with server:
        yield server.sockets[0].getsockname()[1]
    if connections := asyncio.all_tasks() - others:
        await asyncio.wait(connections)
