"""`torchmoor serve`: the front proxy alone, before instances that run already."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torchmoor.access.credentials import read_credentials
from torchmoor.access.exposure import check_exposure
from torchmoor.config import read_file
from torchmoor.fleet.registry import Registry
from torchmoor.replicas.fleet import make_front
from torchmoor.up import SESSION_KEYS


async def run(path: Path, *, processes: int | None, is_open: bool, announce: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; instances join as soon as their probes say that they are ready.

    processes: how many, where the file is not to say. announce: the one line of JSON that says where.
    Raises ConfigError, OSError if a port is taken.
    """
    configuration = read_file(path, session_keys=os.environ.get(SESSION_KEYS, ""))
    keys_file = configuration.proxy.access.keys_file
    credentials = read_credentials(os.environ, Path(keys_file) if keys_file else None)
    settings = replace(configuration.proxy, credentials=credentials)
    if processes is not None:
        settings = replace(settings, listen=replace(settings.listen, processes=processes))
    check_exposure(settings.listen, credentials, is_open=is_open)
    registry = Registry(settings.endpoints)
    for instance in configuration.make_instances():
        registry.add(instance)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    async with make_front(settings, registry) as proxy:
        loop.add_signal_handler(signal.SIGHUP, proxy.reload_tls)
        where = {
            "ready": True,
            "runtime": proxy.runtime_url,
            "admin": proxy.admin_url,
            "endpoints": [endpoint.name for endpoint in registry.endpoints()],
        }
        announce(json.dumps(where))
        await stopping.wait()
