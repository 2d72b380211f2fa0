"""`torchmoor up`: TorchServe instances and the front proxy on this host, from the first line to the last."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from torchmoor.config.async_inference import AsyncEndpointSettings
from torchmoor.config.launcher import LaunchSettings
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.config.sessions import SessionIdSettings
from torchmoor.config.settings import GROUPS, ProxySettings
from torchmoor.config.up import UpSettings
from torchmoor.control.plane import LaunchingPlane, describing_plane
from torchmoor.doctor.finding import Level
from torchmoor.doctor.services import check_store
from torchmoor.fleet.archives import chat_handler
from torchmoor.fleet.instance_guard import ASYNC_FOLDER, CONTROL_FOLDER, JOURNAL_FOLDER
from torchmoor.fleet.instance_process import InstanceProcessSettings
from torchmoor.fleet.launcher import Launcher
from torchmoor.fleet.model_sources import MANY, adapter_environment, many_environment, multi_model_settings
from torchmoor.fleet.torchserve import Launch
from torchmoor.fleet.variable_checks import check_variables
from torchmoor.proxy.api.chat_page.page import PAGE
from torchmoor.proxy.instances.registry import Registry
from torchmoor.run.app import Proxy
from torchmoor.run.async_folder import AsyncFolder
from torchmoor.run.checkpoints import Checkpoint, check_environment, find_checkpoints
from torchmoor.run.endpoint_names import join_names
from torchmoor.run.environment_settings import with_environment
from torchmoor.run.gpus import share_gpus, usable_gpus
from torchmoor.run.host_fleet import HostFleet
from torchmoor.run.launching import find_archive, find_model_store, make_process_settings, plan_instances
from torchmoor.run.run_directory import find_session_keys, run_directory
from torchmoor.run.stopping import has_started, stop_on_signals
from torchmoor.wire.handler_variables import ALLOWED_HOSTS, JOURNAL_URL, MODEL_PATH
from torchmoor.wire.session_ids import KEYS_VARIABLE
from torchmoor.wire.store_urls import JOURNAL_SCHEMES


@dataclass(frozen=True, slots=True)
class HostPlan:
    """What `torchmoor up` starts in a run directory, all of it derived from its options.

    endpoints: their names. journal: its URL, or "off". environment: the variables that all instances share.
    """

    endpoints: Sequence[str]
    settings: ProxySettings
    process_settings: InstanceProcessSettings
    journal: str
    gpus: Sequence[str]
    launches: Sequence[Launch]
    environment: Mapping[str, str]


def plan_host(options: UpSettings, run_dir: Path, async_folder: AsyncFolder, *, is_open: bool) -> HostPlan:
    """Return what to start. Raises ConfigError, LaunchError.

    is_open: whether an address other than loopback may go without credentials.
    """
    environ = os.environ
    check_environment(options, environ)
    many = many_environment(options.endpoints, options.models, environ)
    checkpoints = find_checkpoints(options)
    names = join_names(options.endpoints, (checkpoint.name for checkpoint in checkpoints))
    adapters = adapter_environment(names, options.adapters)
    launch = options.launch.replace(model_store=str(find_model_store(options.launch)))
    process_settings = make_process_settings(launch, run_dir)
    endpoints = _endpoints(options, names, {**environ, **adapters})
    keys = find_session_keys(run_dir, is_kept=outlives_fleet(options) and bool(options.launch.run_dir))
    settings = ProxySettings(
        endpoints=endpoints,
        async_inference=async_folder.inference,
        objects=async_folder.objects,
        **{name: getattr(options, name) for name in GROUPS if name in UpSettings.model_fields},
        sessions=SessionIdSettings.parse(keys, are_journaled=options.journal != "off"),
    )
    settings = with_environment(settings, environ, is_open=is_open)
    journal = options.journal or (run_dir / JOURNAL_FOLDER).as_uri()
    gpus = usable_gpus(environ, launch)
    launches = equip(plan_instances(endpoints, gpus, num_fixed=options.num_fixed), options.launch, checkpoints)
    environment = {KEYS_VARIABLE: keys, JOURNAL_URL: journal, **many, **adapters, **share_gpus(launches, environ)}
    if options.allowed_image_hosts:
        environment[ALLOWED_HOSTS] = ",".join(options.allowed_image_hosts)
    check_variables(launches, process_settings.torchserve.model_store, {**environ, **environment})
    return HostPlan(names, settings, process_settings, journal, gpus, launches, environment)


def outlives_fleet(options: UpSettings) -> bool:
    """Return whether the journal of the sessions is still there after the fleet has stopped."""
    return options.journal not in (None, "off")


def _endpoints(options: UpSettings, names: Sequence[str], environ: Mapping[str, str]) -> tuple[EndpointSettings, ...]:
    """Return the settings of the endpoints. environ: their instances'."""
    asynchronous = AsyncEndpointSettings(output_path=options.async_output, failure_path=options.async_failure)
    scaling = options.variant_scaling()
    return tuple(
        EndpointSettings(
            name=name,
            variants=(VariantSettings(model=name, routing_strategy=options.strategy, scaling=scaling),),
            late_binding=options.late_binding if options.is_late_binding else None,
            multi_model=multi_model_settings(name, environ),
            async_inference=None if name == MANY else asynchronous,
        )
        for name in names
    )


def equip(launches: Sequence[Launch], settings: LaunchSettings, checkpoints: Sequence[Checkpoint]) -> list[Launch]:
    """Complete instances: with the contents of archives that no model store has, and with their checkpoints.

    Raises LaunchError.
    """
    places = {checkpoint.name: checkpoint.place for checkpoint in checkpoints}
    equipped = []
    for launch in launches:
        place = places.get(launch.endpoint)
        if place is None:
            contents = find_archive(settings, launch.endpoint)
            equipped.append(dataclasses.replace(launch, contents=contents))
        else:
            environment = {MODEL_PATH: place}
            equipped.append(dataclasses.replace(launch, contents=chat_handler(), environment=environment))
    return equipped


async def run(
    options: UpSettings,
    report: Callable[[str], None],
    record: Callable[[str], None],
    announce: Callable[[str], None],
    *,
    is_open: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM; a second signal stops at once.

    report: receives progress, line by line. announce: receives one line of JSON when everything is ready. record:
    receives the same line when the proxy listens, before the instances start. is_open: whether an address other than
    loopback may go without credentials.
    Raises ConfigError, LaunchError.
    """
    with run_directory(options.launch) as run_dir:
        async_folder = AsyncFolder(
            run_dir / ASYNC_FOLDER, report, more_inputs=options.async_inputs, output_root=options.async_output
        )
        plan = plan_host(options, run_dir, async_folder, is_open=is_open)
        registry = Registry(plan.settings.endpoints)
        async with AsyncExitStack() as stack:
            launcher = Launcher(plan.process_settings, registry, plan.environment, report)
            await stack.enter_async_context(launcher)
            stopping = stop_on_signals(launcher)
            if not await has_started(launcher.lock(), stopping):  # before all else that uses the directory
                return
            await stack.enter_async_context(async_folder)
            if not await has_started(_report_on_sessions(options, plan, report), stopping):
                return
            control = _control_plane(plan, registry, launcher, run_dir)
            # Stops before the launcher: running requests are answered before their instances end.
            answer = (control or describing_plane(plan.settings, registry, run_dir)).answer
            proxy = Proxy(plan.settings, registry, answer)
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, proxy.on_hangup)
            await stack.enter_async_context(proxy)
            if control is not None:
                await stack.enter_async_context(control.running(proxy.data, report))
            fleet = HostFleet(plan.settings, registry, launcher, proxy.data, plan.launches, report)
            await stack.enter_async_context(fleet)
            description = proxy.describe(plan.endpoints, run_dir=str(run_dir))
            record(description)
            if await has_started(fleet.start(), stopping):
                _report_addresses(plan, proxy, report)
                announce(description)
                await stopping
            report("stopping")
        if control is not None and control.resources:
            report(f"created resources stay in {run_dir / CONTROL_FOLDER}: up --control-plane --run-dir {run_dir}")


async def _report_on_sessions(options: UpSettings, plan: HostPlan, report: Callable[[str], None]) -> None:
    """Report what keeps sessions from being opened, or from being continued by the next fleet."""
    if plan.journal != "off":
        await asyncio.to_thread(_check_journal, plan.journal, report)
    if outlives_fleet(options) and not (options.launch.run_dir or os.environ.get(KEYS_VARIABLE)):
        report(f"sessions end with this fleet, which has new keys: name a --run-dir, or set {KEYS_VARIABLE}")


def _check_journal(url: str, report: Callable[[str], None]) -> None:
    """Report a journal that cannot be used now. The fleet starts: the store may be back soon."""
    for finding in check_store("journal", url, JOURNAL_SCHEMES):
        if finding.level is Level.PROBLEM:
            report(f"journal: {finding.found}. No session can be opened until it can be used: {finding.remedy}")


def _control_plane(plan: HostPlan, registry: Registry, launcher: Launcher, run_dir: Path) -> LaunchingPlane | None:
    """Return the control plane that changes endpoints, if it is on. Raises ConfigError."""
    if not plan.settings.control.is_on:
        return None
    return LaunchingPlane(
        plan.settings,
        registry,
        launcher,
        model_store=plan.process_settings.torchserve.model_store,
        reserved=plan.environment,
        gpus=plan.gpus,
        run_dir=run_dir,
    )


def _report_addresses(plan: HostPlan, proxy: Proxy, report: Callable[[str], None]) -> None:
    report(f"runtime API: {proxy.runtime_url} with {', '.join(plan.endpoints) or 'no endpoint yet'}")
    if plan.settings.chat_page.is_on and set(plan.endpoints) != {MANY}:  # the page does not support many models
        report(f"to chat in a browser: {proxy.runtime_url}{PAGE.decode()}")
    report(f"dashboard: {proxy.admin_url}")
