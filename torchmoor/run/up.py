"""`torchmoor up`: TorchServe instances and the front proxy on this host, from the first line to the last."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from torchmoor.config.asynchronous import AsyncEndpointSettings
from torchmoor.config.launcher import LaunchSettings
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.config.session_keys import SessionIdSettings
from torchmoor.config.settings import ProxySettings
from torchmoor.config.up import UpSettings
from torchmoor.control.plane import LaunchingPlane, describing_plane
from torchmoor.doctor.finding import Level
from torchmoor.doctor.services import check_store
from torchmoor.fleet.adapters import adapter_environment, adapter_settings
from torchmoor.fleet.archives import archive_name, chat_handler
from torchmoor.fleet.launcher import Launcher
from torchmoor.fleet.many import MANY, many_environment, many_settings
from torchmoor.fleet.supervisor import ASYNC_FOLDER, CONTROL_FOLDER, JOURNAL_FOLDER
from torchmoor.fleet.torchserve import Launch
from torchmoor.proxy.api.chat_page.page import PAGE
from torchmoor.proxy.instances.registry import Registry
from torchmoor.run.app import Proxy
from torchmoor.run.async_folder import AsyncFolder
from torchmoor.run.checkpoints import Checkpoint, check_environment, endpoint_names, find_checkpoints
from torchmoor.run.gpus import share_gpus, usable_gpus
from torchmoor.run.host_fleet import HostFleet
from torchmoor.run.launching import (
    JOURNAL_URL,
    SESSION_KEYS,
    find_archive,
    find_model_store,
    find_session_keys,
    make_supervision_settings,
    run_directory,
)
from torchmoor.run.proxy_settings import complete
from torchmoor.wire.store_urls import JOURNAL_SCHEMES

logger = logging.getLogger(__name__)

ALLOWED_HOSTS = "TORCHMOOR_HANDLER_INTAKE_ALLOWED_HOSTS"


async def run(
    options: UpSettings, report: Callable[[str], None], announce: Callable[[str], None], *, is_open: bool = False
) -> None:
    """Serve until SIGINT or SIGTERM; a second signal stops at once.

    report: receives progress, line by line. announce: receives one line of JSON when everything is ready. is_open:
    whether an address other than loopback may go without credentials.
    Raises ConfigError, LaunchError, OSError if a port is taken.
    """
    with run_directory(options.launch) as run_dir:
        await _run_in(run_dir, options, report, announce, is_open=is_open)


async def _run_in(
    run_dir: Path, options: UpSettings, report: Callable[[str], None], announce: Callable[[str], None], *, is_open: bool
) -> None:
    scaling = options.variant_scaling()
    outlives = options.journal not in (None, "off")  # the sessions outlive the fleet
    keys = find_session_keys(run_dir, is_kept=outlives and bool(options.launch.run_dir))
    check_environment(options, os.environ)
    many = many_environment(options.endpoints, options.models, os.environ)
    checkpoints = find_checkpoints(options)
    names = endpoint_names(options, checkpoints)
    adapters = adapter_environment(names, options.adapters)
    launch = options.launch.replace(model_store=str(find_model_store(options.launch)))
    supervision_settings = make_supervision_settings(
        launch, run_dir, heap_mib=options.heap_mib, max_body_mib=options.max_body_mib
    )
    kept = AsyncFolder(
        run_dir / ASYNC_FOLDER, report, more_inputs=options.async_inputs, output_root=options.async_output
    )
    asynchronous = AsyncEndpointSettings(output_path=options.async_output, failure_path=options.async_failure)
    settings = ProxySettings(
        endpoints=tuple(
            EndpointSettings(
                name=name,
                variants=(VariantSettings(model=name, routing_strategy=options.strategy, scaling=scaling),),
                late_binding=options.late_binding if options.is_late_binding else None,
                multi_model=many_settings(os.environ) if name == MANY else adapter_settings({**os.environ, **adapters}),
                async_inference=None if name == MANY else asynchronous,
            )
            for name in names
        ),
        async_inference=kept.inference,
        objects=kept.objects,
        listen=options.listen,
        access=options.access,
        observe=options.observe,
        chat_page=options.chat_page,
        control=options.control,
        sessions=SessionIdSettings.parse(keys, are_journaled=options.journal != "off"),
    )
    settings = complete(settings, os.environ, is_open=is_open)
    registry = Registry(settings.endpoints)
    journal = options.journal or (run_dir / JOURNAL_FOLDER).as_uri()
    gpus = usable_gpus(os.environ, launch)
    launches = plan(names, options.most_instances, gpus)
    launches = equip(launches, options.launch, checkpoints)
    environment = {SESSION_KEYS: keys, JOURNAL_URL: journal, **many, **adapters, **share_gpus(launches, os.environ)}
    if options.allowed_image_hosts:
        environment[ALLOWED_HOSTS] = ",".join(options.allowed_image_hosts)
    async with AsyncExitStack() as stack:
        launcher = await stack.enter_async_context(Launcher(supervision_settings, registry, environment, report))
        await launcher.lock()  # before all else that uses the directory
        await stack.enter_async_context(kept)
        if options.journal != "off":
            await asyncio.to_thread(warn_of_journal, journal, report)
        if outlives and not (options.launch.run_dir or os.environ.get(SESSION_KEYS)):
            report(f"sessions end with this fleet, which has new keys: name a --run-dir, or set {SESSION_KEYS}")
        control: LaunchingPlane | None = None
        if settings.control.is_on:
            control = LaunchingPlane(
                settings,
                registry,
                launcher,
                model_store=Path(launch.model_store),
                reserved=environment,
                gpus=gpus,
                run_dir=run_dir,
            )
        # Stops before the launcher: running requests are answered before their instances end.
        answer = (control or describing_plane(settings, registry, run_dir)).answer
        proxy = await stack.enter_async_context(Proxy(settings, registry, answer))
        if control is not None:
            await stack.enter_async_context(control.running(proxy.data, report))
        fleet = await stack.enter_async_context(HostFleet(settings, registry, launcher, proxy.data, launches, report))
        stopping = stop_on_signals(launcher)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, proxy.on_hangup)
        if await has_started(fleet.start(), stopping):
            report(f"runtime API: {proxy.runtime_url} with {', '.join(names) or 'no endpoint yet'}")
            if settings.chat_page.is_on and set(names) != {MANY}:  # the page does not support many models
                report(f"to chat in a browser: {proxy.runtime_url}{PAGE.decode()}")
            report(f"dashboard: {proxy.admin_url}")
            announce(describe(names, runtime_url=proxy.runtime_url, admin_url=proxy.admin_url, run_dir=run_dir))
            await stopping
        report("stopping")
    if control is not None and control.resources:
        report(f"created resources stay in {run_dir / CONTROL_FOLDER}: up --control-plane --run-dir {run_dir}")


def warn_of_journal(url: str, report: Callable[[str], None]) -> None:
    """Report a journal that cannot be used now. The fleet starts: the store may be back soon."""
    for finding in check_store("journal", url, JOURNAL_SCHEMES):
        if finding.level is Level.PROBLEM:
            report(f"journal: {finding.found}. No session can be opened until it can be used: {finding.remedy}")


def describe(endpoints: Sequence[str], *, runtime_url: str, admin_url: str, run_dir: Path) -> str:
    """Return the line of JSON with the addresses of both planes and the directory of the instances' logs."""
    return json.dumps(
        {
            "ready": True,
            "runtime": runtime_url,
            "admin": admin_url,
            "endpoints": list(endpoints),
            "run_dir": str(run_dir),
        }
    )


def plan(endpoints: Sequence[str], num_instances: int, gpus: Sequence[str]) -> list[Launch]:
    """Return each endpoint's instances, spread over the GPUs if there are any."""
    wanted = [(endpoint, i) for endpoint in endpoints for i in range(num_instances)]
    return [
        Launch(f"{endpoint.lower()}-{i}", endpoint, archive_name(endpoint), gpus[number % len(gpus)] if gpus else None)
        for number, (endpoint, i) in enumerate(wanted)
    ]


def equip(launches: Sequence[Launch], settings: LaunchSettings, checkpoints: Sequence[Checkpoint]) -> list[Launch]:
    """Return the instances with the contents of archives that no model store has, and with their checkpoints.

    Raises LaunchError.
    """
    places = {checkpoint.name: checkpoint for checkpoint in checkpoints}
    equipped = []
    for launch in launches:
        found = places.get(launch.endpoint)
        if found is None:
            contents = find_archive(settings, launch.endpoint)
            equipped.append(dataclasses.replace(launch, contents=contents))
        else:
            equipped.append(dataclasses.replace(launch, contents=chat_handler(), environment=found.environment))
    return equipped


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
