"""Starting and stopping a command that runs until a signal."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

from torchmoor.fleet.launcher import Launcher


async def has_started(start: Coroutine[Any, Any, None], stopping: asyncio.Future[Any]) -> bool:
    """Run `start` and return True, or cancel it and return False once `stopping` is done. Raises what `start` does."""
    starting = asyncio.ensure_future(start)
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    if stopping.done():
        starting.cancel()
        return False
    starting.result()
    return True


def stop_on_signals(launcher: Launcher) -> asyncio.Future[None]:
    """Return a future that ends with the first SIGINT or SIGTERM; the second signal kills the instances."""
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[None] = loop.create_future()

    def on_signal() -> None:
        if stopping.done():
            launcher.kill()
        else:
            stopping.set_result(None)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return stopping
