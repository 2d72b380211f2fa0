"""The role `serve`: the proxy and its TorchServe instances in one container, in SageMaker's container dialect.

There is one TorchServe for each GPU. The proxy listens from the start, so that a ping is answered while models load. It
stops after the instances' running requests have ended. Everything has ended within SageMaker's 30 s after SIGTERM.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import Callable

from torchmoor.config.access import AccessSettings
from torchmoor.config.container import ContainerSettings
from torchmoor.config.group import MIB
from torchmoor.config.launcher import DEFAULT_BODY_MIB, LaunchSettings
from torchmoor.config.limits import LimitSettings
from torchmoor.config.listen import ListenSettings
from torchmoor.config.observe import ObserveSettings
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.config.sessions import SessionIdSettings
from torchmoor.config.settings import ProxySettings
from torchmoor.config.timeouts import TimeoutSettings
from torchmoor.container.environment import ContainerEnvironment
from torchmoor.container.model import FoundModel, find_model
from torchmoor.container.runtime_directory import container_process_settings, make_session_keys, runtime_directory
from torchmoor.fleet.instance_guard import JOURNAL_FOLDER
from torchmoor.fleet.launcher import Launcher
from torchmoor.fleet.model_sources import MANY, many_environment, multi_model_settings
from torchmoor.fleet.ports import find_free_ports
from torchmoor.fleet.torchserve import Launch
from torchmoor.fleet.variable_checks import check_variables
from torchmoor.proxy.access.credential_sources import KEYS_FILE
from torchmoor.proxy.instances.registry import Registry
from torchmoor.run.app import Proxy
from torchmoor.run.environment_settings import with_environment
from torchmoor.run.gpus import share_gpus, usable_gpus
from torchmoor.run.host_fleet import HostFleet
from torchmoor.run.stopping import has_started, stop_on_signals
from torchmoor.wire.handler_variables import JOURNAL_URL
from torchmoor.wire.session_ids import KEYS_VARIABLE

logger = logging.getLogger(__name__)


async def run(variables: ContainerEnvironment, report: Callable[[str], None]) -> None:
    """Serve until SIGTERM. Raises ConfigError, LaunchError if the model does not load."""
    with runtime_directory() as work:
        found = find_model(variables, work, os.environ)
        keys = make_session_keys(os.environ)
        settings = make_settings(variables, found, keys)
        registry = Registry(settings.endpoints)
        launches = plan(variables, found, settings.endpoints[0].name, usable_gpus(os.environ, LaunchSettings()))
        environment = {
            KEYS_VARIABLE: keys,
            JOURNAL_URL: os.environ.get(JOURNAL_URL) or (work / "run" / JOURNAL_FOLDER).as_uri(),
            **found.environment,
            **share_gpus(launches, os.environ),
        }
        if variables.is_multi_model:
            environment |= many_environment([MANY], "", os.environ)
        check_variables(launches, found.store, {**os.environ, **environment})
        async with (
            Launcher(container_process_settings(variables, found, work), registry, environment, report) as launcher,
            Proxy(settings, registry) as proxy,
            HostFleet(settings, registry, launcher, proxy.data, launches, report) as fleet,
        ):
            stopping = stop_on_signals(launcher)
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, proxy.on_hangup)
            report(f"listening on port {proxy.port}; starting {len(launches)} of {found.name}")
            if await has_started(fleet.start(), stopping):
                report("ready")
                await stopping
            report(f"stopping; running requests have {variables.drain_s:.0f} s to end")
        report("stopped")


def make_settings(variables: ContainerEnvironment, found: FoundModel, keys: str) -> ProxySettings:
    """Return the settings of the container's proxy. Raises ConfigError."""
    admin_port = variables.admin_port
    if variables.safe_ports is not None:
        admin_port = next(port for port in find_free_ports(2, among=variables.safe_ports) if port != variables.port)
    longest = int(variables.properties.get("max_request_size", DEFAULT_BODY_MIB * MIB))
    settings = ProxySettings(
        endpoints=(
            EndpointSettings(
                name=endpoint_name(found.name),
                variants=(VariantSettings(model=found.name),),
                multi_model=multi_model_settings(found.name, os.environ),
            ),
        ),
        listen=ListenSettings(host="0.0.0.0", port=variables.port, admin_port=admin_port),
        access=AccessSettings(keys_file=os.environ.get(KEYS_FILE, "")),
        limits=LimitSettings(
            max_passthrough_body_bytes=longest,
            max_arriving_bytes=max(longest, LimitSettings().max_arriving_bytes),
        ),
        timeouts=TimeoutSettings(model_timeout_s=variables.model_timeout_s, stop_grace_s=variables.drain_s),
        sessions=SessionIdSettings.parse(keys, are_journaled=os.environ.get(JOURNAL_URL) != "off"),
        container=ContainerSettings(serves_models=variables.is_multi_model, shows_metrics=True),
        observe=ObserveSettings(access_log=variables.access_log),
    )
    return with_environment(settings, os.environ, is_open=None)


def plan(variables: ContainerEnvironment, found: FoundModel, endpoint: str, gpus: list[str]) -> list[Launch]:
    """Return one instance for each GPU, or the configured number of instances in turns on the GPUs."""
    stem = endpoint.lower()
    return [
        Launch(f"{stem}-{number}", endpoint, found.archive, gpus[number % len(gpus)] if gpus else None)
        for number in range(variables.num_instances or len(gpus) or 1)
    ]


def endpoint_name(model: str) -> str:
    """Return a model's name as an endpoint's name, for the paths of the runtime API."""
    return re.sub(r"[^a-zA-Z0-9]+", "-", model).strip("-")[:60].strip("-")
