"""`torchmoor serve`: runs the front proxy by a configuration file, or checks that file.

The proxy serves instances that run already, and starts the instances of variants with Autoscaling on this host.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torchmoor.config.file import read_file
from torchmoor.config.settings import Configuration
from torchmoor.errors import ConfigError
from torchmoor.fleet.archive_checks import check_archives
from torchmoor.fleet.discovery import Discovery, try_once
from torchmoor.fleet.draining import Drainer
from torchmoor.fleet.instance_guard import JOURNAL_FOLDER
from torchmoor.fleet.launcher import Launcher
from torchmoor.fleet.process_commands import reopen_log
from torchmoor.fleet.torchserve import Launch
from torchmoor.fleet.variable_checks import check_variables
from torchmoor.proxy.access.credential_sources import ASYNC_QUEUE
from torchmoor.proxy.instances.registry import Registry
from torchmoor.proxy.observe.observing import check_observing
from torchmoor.run.app import Proxy
from torchmoor.run.environment_settings import with_environment
from torchmoor.run.gpus import share_gpus, usable_gpus
from torchmoor.run.host_fleet import HostFleet
from torchmoor.run.launching import make_process_settings, plan_instances
from torchmoor.run.reload import Reloader
from torchmoor.run.run_directory import run_directory
from torchmoor.run.static_instances import make_registry
from torchmoor.run.stopping import has_started
from torchmoor.wire.handler_variables import JOURNAL_URL
from torchmoor.wire.session_ids import KEYS_VARIABLE

Given = Mapping[str, Mapping[str, Any]]  # groups of options, each with its keys and values


async def run(
    path: Path,
    *,
    given: Given,
    is_open: bool,
    report: Callable[[str], None],
    announce: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM. An instance joins when its probe finds it ready.

    given: groups and keys that override the file's. report: receives progress of this host's instances, line by line.
    announce: receives one line of JSON with the addresses. Raises ConfigError, LaunchError.
    """
    loop = asyncio.get_running_loop()
    stopping, has_hung_up = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    loop.add_signal_handler(signal.SIGHUP, has_hung_up.set)  # until the reloader below handles it
    configuration = read(path, given=given, is_open=is_open)
    settings = configuration.proxy
    registry = make_registry(configuration)
    launches = plan_instances(settings.endpoints, usable_gpus(os.environ, configuration.launch))
    async with AsyncExitStack() as stack:
        launcher: Launcher | None = None
        if launches:
            run_dir = stack.enter_context(run_directory(configuration.launch))
            launcher = make_launcher(configuration, run_dir, registry, launches, report)
            await stack.enter_async_context(launcher)
        proxy = Proxy(settings, registry)
        await stack.enter_async_context(proxy)
        read_again = partial(read, path, given=given, is_open=is_open)
        drainer = Drainer(registry, proxy.data.is_idle)
        stack.callback(drainer.stop)
        discovery = Discovery(
            configuration.discovery,
            registry,
            drainer,
            proxy.data.operations,
            are_journaled=settings.sessions.are_journaled,
        )
        await stack.enter_async_context(discovery)
        reloader = Reloader(configuration, read_again, registry, proxy, drainer, discovery)

        def on_hangup() -> None:
            proxy.data.carry_out(reopen_log)
            reloader.reload()

        loop.add_signal_handler(signal.SIGHUP, on_hangup)
        stack.callback(loop.add_signal_handler, signal.SIGHUP, lambda: None)  # nothing is reloaded while it stops
        if has_hung_up.is_set():
            on_hangup()
        announce(proxy.describe([endpoint.name for endpoint in registry.endpoints()]))
        stopped = asyncio.create_task(stopping.wait())
        if launcher is not None:
            fleet = HostFleet(settings, registry, launcher, proxy.data, launches, report)
            await stack.enter_async_context(fleet)
            await has_started(fleet.start(), stopped)
        await stopped


def make_launcher(
    configuration: Configuration,
    run_dir: Path,
    registry: Registry,
    launches: Sequence[Launch],
    report: Callable[[str], None],
) -> Launcher:
    """Return the launcher of the instances of variants with Autoscaling. Raises ConfigError."""
    check_variables(launches, Path(configuration.launch.model_store), os.environ)
    environment = share_gpus(launches, os.environ)
    if configuration.proxy.sessions.are_journaled and JOURNAL_URL not in os.environ:
        environment[JOURNAL_URL] = (run_dir / JOURNAL_FOLDER).as_uri()
    return Launcher(make_process_settings(configuration.launch, run_dir), registry, environment, report)


def read(path: Path, *, given: Given, is_open: bool) -> Configuration:
    """Return the settings of a file, the options and the environment, checked together. Raises ConfigError."""
    keys, queue = os.environ.get(KEYS_VARIABLE, ""), os.environ.get(ASYNC_QUEUE, "")
    configuration = read_file(path, session_keys=keys, queue=queue)
    proxy = configuration.proxy
    changes = {name: getattr(proxy, name).replace(**values) for name, values in given.items()}
    proxy = with_environment(proxy.replace(**changes), os.environ, is_open=is_open)
    if proxy.control.is_on:
        raise ConfigError("control.is_on is for torchmoor up --control-plane: torchmoor serve creates no endpoints")
    is_scaled = any(variant.scaling for endpoint in proxy.endpoints for variant in endpoint.variants)
    if is_scaled and not proxy.sessions.keys:
        raise ConfigError(
            f"{KEYS_VARIABLE} must be set where variants have Autoscaling: their instances sign session ids with it"
        )
    return configuration.replace(proxy=proxy)


def check(path: Path, *, given: Given, is_open: bool, warn: Callable[[str], None]) -> str:
    """Check a file, the files that it names and the environment, without listening.

    Returns a line of JSON: the instances of each endpoint's variants. warn: receives settings that are allowed but
    probably a mistake. Raises ConfigError, LaunchError.
    """
    configuration = read(path, given=given, is_open=is_open)
    settings, registry = configuration.proxy, make_registry(configuration)
    Proxy(settings, registry)  # reads the certificates
    launches = plan_instances(settings.endpoints, [])
    model_store = Path(configuration.launch.model_store)
    check_archives(model_store, launches)
    check_variables(launches, model_store, os.environ)
    check_observing(settings.observe)
    if not settings.sessions.keys:
        warn(
            f"{KEYS_VARIABLE} is not set: a session will be known only to the process that saw it opened, and be "
            "served by its own instance only; give the proxy the instances' own keys"
        )
    folder = settings.limits.spool_folder
    if folder and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        warn(f"limits.spool_folder {folder} is not a folder that can be written: long bodies would stay in memory")
    named = try_once(configuration.discovery, warn)
    found: dict[str, dict[str, list[str]]] = {}
    for endpoint in registry.endpoints():
        found[endpoint.name] = {}
        for variant in endpoint.variants:
            place = (endpoint.name, variant.name)
            entries = [entry for entry in configuration.discovery if (entry.endpoint, entry.variant) == place]
            names = [instance.name for instance in variant.pool.members]
            names += [launch.name for launch in launches if (launch.endpoint, launch.variant) == place]
            names += [name for entry in entries for name in named[entry.dns_name]]
            found[endpoint.name][variant.name] = names
            if not names and not entries and variant.settings.scaling is None:
                warn(f"variant {variant.name} of endpoint {endpoint.name} has no instance: see Instances and Discovery")
    return json.dumps({"ok": True, "endpoints": found})
