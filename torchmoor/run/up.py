"""`torchmoor up`: TorchServe instances and the front proxy on this host, from the first line to the last."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import secrets
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from torchmoor.config.asynchronous import AsyncEndpointSettings
from torchmoor.config.launcher import LaunchSettings
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.config.session_keys import SessionSettings
from torchmoor.config.settings import ProxySettings
from torchmoor.config.up import UpSettings
from torchmoor.fleet.archives import chat_handler
from torchmoor.fleet.launcher import Launch, Launcher
from torchmoor.fleet.supervisor import ASYNC_FOLDER, JOURNAL_FOLDER
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
    find_run_dir,
    make_supervision_settings,
)
from torchmoor.run.many import MANY, many_environment, many_settings
from torchmoor.run.proxy_settings import complete

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
    scaling = options.variant_scaling()
    keys = os.environ.get(SESSION_KEYS) or f"k0:{secrets.token_hex(32)}"
    check_environment(options, os.environ)
    many = many_environment(options.endpoints, options.models, os.environ)
    checkpoints = find_checkpoints(options)
    names = endpoint_names(options, checkpoints)
    run_dir = find_run_dir(options.launch)
    launch = options.launch.replace(model_store=str(find_model_store(options.launch)))
    supervision_settings = make_supervision_settings(
        launch, run_dir, heap_mib=options.heap_mib, max_body_mib=options.max_body_mib
    )
    kept = AsyncFolder(run_dir / ASYNC_FOLDER, report, more_inputs=options.async_inputs)
    settings = ProxySettings(
        endpoints=tuple(
            EndpointSettings(
                name=name,
                variants=(VariantSettings(model=name, routing_strategy=options.strategy, scaling=scaling),),
                late_binding=options.late_binding if options.is_late_binding else None,
                multi_model=many_settings(os.environ) if name == MANY else None,
                async_inference=None if name == MANY else AsyncEndpointSettings(),
            )
            for name in names
        ),
        async_inference=kept.inference,
        objects=kept.objects,
        listen=options.listen,
        access=options.access,
        observe=options.observe,
        chat_page=options.chat_page,
        sessions=SessionSettings.parse(keys, are_journaled=options.journal != "off"),
    )
    settings = complete(settings, os.environ, is_open=is_open)
    registry = Registry(settings.endpoints)
    journal = options.journal or (run_dir / JOURNAL_FOLDER).as_uri()
    launches = plan(names, options.most_instances, usable_gpus(os.environ))
    launches = equip(launches, options.launch, checkpoints)
    environment = {SESSION_KEYS: keys, JOURNAL_URL: journal, **many, **share_gpus(launches, os.environ)}
    if options.allowed_image_hosts:
        environment[ALLOWED_HOSTS] = ",".join(options.allowed_image_hosts)
    async with (
        kept,
        Launcher(supervision_settings, registry, environment, report) as launcher,
        Proxy(settings, registry) as proxy,  # stops first: what runs is answered before its instance goes
        HostFleet(settings, registry, launcher, proxy.data, launches, report) as fleet,
    ):
        stopping = stop_on_signals(launcher)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, proxy.on_hangup)
        if await has_started(fleet.start(), stopping):
            if settings.chat_page.is_on:
                report(f"to chat in a browser: {proxy.runtime_url}{PAGE.decode()}")
            announce(describe(names, runtime_url=proxy.runtime_url, admin_url=proxy.admin_url))
            await stopping
        report("stopping")


def describe(endpoints: Sequence[str], *, runtime_url: str, admin_url: str) -> str:
    """Return the line of JSON with the addresses of both planes."""
    return json.dumps(
        {
            "ready": True,
            "runtime": runtime_url,
            "admin": admin_url,
            "endpoints": list(endpoints),
        }
    )


def plan(endpoints: Sequence[str], num_instances: int, gpus: Sequence[str]) -> list[Launch]:
    """Return each endpoint's instances, spread over the GPUs if there are any."""
    wanted = [(endpoint, i) for endpoint in endpoints for i in range(num_instances)]
    return [
        Launch(f"{endpoint.lower()}-{i}", endpoint, f"{endpoint}.mar", gpus[number % len(gpus)] if gpus else None)
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
