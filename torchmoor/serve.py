"""`torchmoor serve`: the front proxy alone, before instances that run already; or a look at its configuration."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from torchmoor.access.credentials import read_credentials
from torchmoor.access.exposure import check_exposure
from torchmoor.config import Configuration, read_file
from torchmoor.fleet.registry import Registry
from torchmoor.many import read_container
from torchmoor.observe.observing import check_observing
from torchmoor.reload import Reloader
from torchmoor.replicas.fleet import make_front
from torchmoor.up import SESSION_KEYS


async def run(path: Path, *, processes: int | None, is_open: bool, announce: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; instances join as soon as their probes say that they are ready.

    processes: how many, where the file is not to say. announce: the one line of JSON that says where.
    Raises ConfigError, OSError if a port is taken.
    """
    configuration = read(path, processes=processes, is_open=is_open)
    settings = configuration.proxy
    registry = make_registry(configuration)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    async with make_front(settings, registry) as proxy:
        read_again = partial(read, path, processes=processes, is_open=is_open)
        reloader = Reloader(configuration, read_again, registry, proxy)
        loop.add_signal_handler(signal.SIGHUP, _in_turn, proxy.reopen_log, reloader.reload)
        where = {
            "ready": True,
            "runtime": proxy.runtime_url,
            "admin": proxy.admin_url,
            "endpoints": [endpoint.name for endpoint in registry.endpoints()],
        }
        announce(json.dumps(where))
        await stopping.wait()
        reloader.stop()


def read(path: Path, *, processes: int | None, is_open: bool) -> Configuration:
    """What a file and its keys say, checked together. Raises ConfigError."""
    configuration = read_file(path, session_keys=os.environ.get(SESSION_KEYS, ""))
    keys_file = configuration.proxy.access.keys_file
    credentials = read_credentials(os.environ, Path(keys_file) if keys_file else None)
    listen = configuration.proxy.listen
    check_exposure(listen, credentials, is_open=is_open)
    if processes is not None:
        listen = replace(listen, processes=processes)
    container = read_container(os.environ, configuration.proxy.container)
    proxy = replace(configuration.proxy, credentials=credentials, listen=listen, container=container)
    return replace(configuration, proxy=proxy)


def make_registry(configuration: Configuration) -> Registry:
    """The endpoints, with the instances that are named for them."""
    registry = Registry(configuration.proxy.endpoints)
    for instance in configuration.make_instances():
        registry.add(instance)
    return registry


def check(path: Path, *, processes: int | None, is_open: bool, warn: Callable[[str], None]) -> str:
    """Find out all that is wrong with a file, the files that it names and the environment, and listen nowhere.

    Returns a line of JSON: the instances of each endpoint's variants. warn: told what would start and not do what is
    probably meant. Raises ConfigError.
    """
    configuration = read(path, processes=processes, is_open=is_open)
    settings, registry = configuration.proxy, make_registry(configuration)
    make_front(settings, registry)  # reads the certificates
    check_observing(settings.observe)
    if not settings.sessions.keys:
        warn(f"{SESSION_KEYS} is not set: every session id will be refused; give the proxy the instances' own keys")
    found: dict[str, dict[str, list[str]]] = {}
    for endpoint in registry.endpoints():
        found[endpoint.name] = {}
        for variant in endpoint.variants:
            names = [instance.name for instance in variant.pool.members]
            found[endpoint.name][variant.name] = names
            if not names:
                warn(f"variant {variant.name} of endpoint {endpoint.name} has no instance: add one to Instances")
    return json.dumps({"ok": True, "endpoints": found})


def _in_turn(*actions: Callable[[], None]) -> None:
    for action in actions:
        action()
