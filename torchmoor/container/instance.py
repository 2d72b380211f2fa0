"""The role `instance`: one TorchServe, for a platform that runs the proxies elsewhere, as Kubernetes does.

The inference port is open to the proxies. The management port is not; the probe port (torchmoor.container.probe_port)
shows the part that proxies need. On SIGTERM the instance reports that it is not ready. It answers requests until the
proxies have noticed and no request runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from torchmoor.config.health import HealthSettings
from torchmoor.config.launcher import LaunchSettings
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.container.environment import ContainerEnvironment
from torchmoor.container.model import find_model
from torchmoor.container.probe_port import ProbePort
from torchmoor.container.runtime_directory import container_process_settings, runtime_directory
from torchmoor.container.serve import endpoint_name
from torchmoor.fleet.health import HealthChecker
from torchmoor.fleet.launcher import Launcher
from torchmoor.fleet.torchserve import Launch
from torchmoor.fleet.variable_checks import check_variables
from torchmoor.proxy.instances.handler_operations import HandlerOperations
from torchmoor.proxy.instances.instance import Instance
from torchmoor.proxy.instances.registry import Registry
from torchmoor.run.gpus import usable_gpus
from torchmoor.run.stopping import has_started, stop_on_signals
from torchmoor.wire.handler_variables import ENGINE_NAME
from torchmoor.wire.operations import IN_FLIGHT, NUM_IN_FLIGHT
from torchmoor.wire.session_ids import KEYS_VARIABLE

logger = logging.getLogger(__name__)

POLL_S = 0.25
IDLE_S = 1.0  # a single check is not enough, because a proxy that has not noticed the stop may still send a request
ASK_TIMEOUT_S = 2.0


async def run(variables: ContainerEnvironment, report: Callable[[str], None]) -> None:
    """Serve until SIGTERM. Raises ConfigError, LaunchError if the model does not load, OSError if a port is taken."""
    if not os.environ.get(KEYS_VARIABLE):
        report(
            f"warning: {KEYS_VARIABLE} is not set: without this instance's keys, proxies cannot verify its session ids"
        )
    with runtime_directory() as work:
        found = find_model(variables, work, os.environ)
        name = endpoint_name(found.name)
        registry = Registry((EndpointSettings(name=name, variants=(VariantSettings(model=found.name),)),))
        gpus = usable_gpus(os.environ, LaunchSettings())
        # vllm spreads a model over several GPUs.
        gpu = ",".join(gpus if os.environ.get(ENGINE_NAME) == "vllm" else gpus[:1]) or None
        launch = Launch(
            variables.instance_name, name, found.archive, gpu, host="0.0.0.0", port=variables.inference_port
        )
        check_variables([launch], found.store, {**os.environ, **found.environment})
        async with (
            Launcher(
                container_process_settings(variables, found, work), registry, found.environment, report
            ) as launcher,
            HealthChecker(registry, HealthSettings(), lambda: None),
            HandlerOperations() as operations,
            ProbePort(registry, variables.instance_name, variables.probe_port, launcher.is_running) as probe_port,
        ):
            stopping = stop_on_signals(launcher)
            if not await has_started(launcher.start([launch]), stopping):
                return
            await stopping
            probe_port.is_draining = True
            report(f"stopping; running requests have {variables.drain_s:.0f} s to end")
            await drain(registry, variables, operations, launcher.is_running)
        report("stopped")


async def drain(
    registry: Registry,
    variables: ContainerEnvironment,
    operations: HandlerOperations,
    is_running: Callable[[str], bool],
) -> None:
    """Wait until, after settle_s, no request has run for IDLE_S; at most drain_s.

    is_running: whether TorchServe runs; after it has died, or was killed by a second signal, no request can end.
    """
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + variables.drain_s
    settled_at = loop.time() + min(variables.settle_s, variables.drain_s)
    idle_since: float | None = None
    while loop.time() < ends_at and is_running(variables.instance_name):
        instance = registry.find(variables.instance_name)
        if loop.time() >= settled_at and (instance is None or await is_idle(instance, operations)):
            idle_since = loop.time() if idle_since is None else idle_since
            if loop.time() - idle_since >= IDLE_S:
                return
        else:
            idle_since = None
        await asyncio.sleep(POLL_S)


async def is_idle(instance: Instance, operations: HandlerOperations) -> bool:
    """Return True if the handler says that no request runs. A foreign handler cannot say so and gets the full time."""
    answer = await operations.ask(instance, IN_FLIGHT, {}, timeout_s=ASK_TIMEOUT_S)
    return answer is not None and answer.status == 200 and answer.content() == {NUM_IN_FLIGHT: 0}
