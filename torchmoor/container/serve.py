"""The role `serve`: everything in one container, in the dialect that SageMaker speaks to its containers.

One TorchServe an accelerator, the proxy before them. The proxy listens from the beginning, so that a ping is answered
while models load; it ends last of what a client sees, and within SageMaker's 30 s of a SIGTERM everything has ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

from torchmoor.config.dialects import ContainerSettings
from torchmoor.config.group import MIB
from torchmoor.config.launcher import DEFAULT_BODY_MIB
from torchmoor.config.limits import LimitSettings, TimeoutSettings
from torchmoor.config.listen import ListenSettings
from torchmoor.config.observe import ObserveSettings
from torchmoor.config.routing import EndpointSettings, MultiModelSettings, VariantSettings
from torchmoor.config.sessions import SessionSettings
from torchmoor.config.settings import ProxySettings
from torchmoor.container.environment import ContainerEnvironment
from torchmoor.container.model import FoundModel, find_model
from torchmoor.container.runtime_directory import Workplace, container_launcher_settings, make_session_keys
from torchmoor.fleet.launcher import Launch, Launcher
from torchmoor.fleet.ports import find_free_ports
from torchmoor.fleet.supervisor import JOURNAL_FOLDER
from torchmoor.proxy.access.credentials import KEYS_FILE, read_credentials
from torchmoor.proxy.access.exposure import check_exposure
from torchmoor.proxy.instances.registry import Registry
from torchmoor.run.app import Proxy
from torchmoor.run.gpus import find_gpus, share_gpus
from torchmoor.run.host_fleet import HostFleet
from torchmoor.run.launching import JOURNAL_URL, SESSION_KEYS
from torchmoor.run.many import CACHE, MANY, plan_many
from torchmoor.run.up import stop_on_signals

logger = logging.getLogger(__name__)


async def run(told: ContainerEnvironment, report: Callable[[str], None]) -> None:
    """Serve until SIGTERM. Raises ConfigError, LaunchError if the model does not load, OSError if a port is taken."""
    with Workplace() as work:
        found = find_model(told, work, os.environ)
        keys = make_session_keys(os.environ)
        settings = make_settings(told, found, keys)
        registry = Registry(settings.endpoints)
        launches = plan(told, found, settings.endpoints[0].name, find_gpus(os.environ))
        environment = {
            SESSION_KEYS: keys,
            JOURNAL_URL: os.environ.get(JOURNAL_URL) or (work / "run" / JOURNAL_FOLDER).as_uri(),
            **found.environment,
            **share_gpus(launches, os.environ),
        }
        if told.is_multi_model:
            environment |= plan_many([MANY], "", os.environ).environment
        async with (
            Launcher(container_launcher_settings(told, found, work), registry, environment, report) as launcher,
            Proxy(settings, registry) as proxy,
            HostFleet(settings, registry, launcher, proxy.data, launches, report) as fleet,
        ):
            stopping = stop_on_signals(launcher)
            report(f"listening on port {proxy.port}; starting {len(launches)} of {found.name}")
            starting = asyncio.create_task(fleet.start())
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                starting.cancel()
            else:
                starting.result()
                report("ready")
                await stopping
            report(f"stopping; what runs has {told.drain_s:.0f} s to end")
        report("stopped")


def make_settings(told: ContainerEnvironment, found: FoundModel, keys: str) -> ProxySettings:
    """The proxy before the container's instances. Raises ConfigError."""
    keys_file = os.environ.get(KEYS_FILE)
    credentials = read_credentials(os.environ, Path(keys_file) if keys_file else None)
    admin_port = told.admin_port if told.safe_ports is None else find_free_ports(1, among=told.safe_ports)[0]
    listen = ListenSettings(host="0.0.0.0", port=told.port, admin_port=admin_port)
    check_exposure(listen, credentials, is_open=not credentials.guards_data)  # the platform stands before the port
    is_cached = os.environ.get(CACHE, "enabled") != "disabled"
    return ProxySettings(
        endpoints=(
            EndpointSettings(
                name=endpoint_name(found.name),
                variants=(VariantSettings(model=found.name),),
                multi_model=MultiModelSettings(is_cached=is_cached) if found.name == MANY else None,
            ),
        ),
        listen=listen,
        limits=LimitSettings(
            max_passthrough_body_bytes=int(told.properties.get("max_request_size", DEFAULT_BODY_MIB * MIB))
        ),
        timeouts=TimeoutSettings(model_timeout_s=told.model_timeout_s, stop_grace_s=told.drain_s),
        sessions=SessionSettings.parse(keys, are_journaled=os.environ.get(JOURNAL_URL) != "off"),
        credentials=credentials,
        container=ContainerSettings(serves_models=told.is_multi_model, shows_metrics=True),
        observe=ObserveSettings(access_log=told.access_log),
    )


def plan(told: ContainerEnvironment, found: FoundModel, endpoint: str, gpus: list[str]) -> list[Launch]:
    """One instance an accelerator, or as many as there shall be, in turns on the accelerators."""
    stem = endpoint.lower()
    return [
        Launch(f"{stem}-{number}", endpoint, found.archive, gpus[number % len(gpus)] if gpus else None)
        for number in range(told.num_instances or len(gpus) or 1)
    ]


def endpoint_name(model: str) -> str:
    """A model's name as that of an endpoint, for the paths of the runtime API."""
    return re.sub(r"[^a-zA-Z0-9]+", "-", model).strip("-")[:60].strip("-")
