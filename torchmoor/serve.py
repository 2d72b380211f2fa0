"""`torchmoor serve`: the front proxy alone, before instances that run already."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

from torchmoor.app import Proxy
from torchmoor.config import read_file
from torchmoor.fleet.registry import Registry
from torchmoor.up import SESSION_KEYS, check_host


async def run(path: Path, *, is_open: bool, announce: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; instances join as soon as their probes say that they are ready.

    announce: the one line of JSON that says where. Raises ConfigError, OSError if a port is taken.
    """
    configuration = read_file(path, session_keys=os.environ.get(SESSION_KEYS, ""))
    host = configuration.proxy.listen.host
    check_host(host, is_open=is_open)
    registry = Registry(configuration.proxy.endpoints)
    for instance in configuration.make_instances():
        registry.add(instance)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    async with Proxy(configuration.proxy, registry) as proxy:
        named = f"[{host}]" if ":" in host else host
        where = {
            "ready": True,
            "runtime": f"http://{named}:{proxy.port}",
            "admin": f"http://{named}:{proxy.admin_port}",
            "endpoints": [endpoint.name for endpoint in registry.endpoints()],
        }
        announce(json.dumps(where))
        await stopping.wait()
