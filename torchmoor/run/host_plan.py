"""What `torchmoor up` starts: its endpoints, its proxy's settings, and its instances with their environment."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmoor.config.async_inference import AsyncEndpointSettings
from torchmoor.config.launcher import LaunchSettings
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.config.sessions import SessionIdSettings
from torchmoor.config.settings import GROUPS, ProxySettings
from torchmoor.config.up import UpSettings
from torchmoor.fleet.archives import chat_handler
from torchmoor.fleet.instance_guard import JOURNAL_FOLDER
from torchmoor.fleet.launcher import InstanceProcessSettings
from torchmoor.fleet.model_sources import MANY, adapter_environment, many_environment, multi_model_settings
from torchmoor.fleet.torchserve import Launch
from torchmoor.run.async_folder import AsyncFolder
from torchmoor.run.checkpoints import Checkpoint, check_environment, find_checkpoints
from torchmoor.run.endpoint_names import join_names
from torchmoor.run.environment_settings import with_environment
from torchmoor.run.gpus import share_gpus, usable_gpus
from torchmoor.run.launching import find_archive, find_model_store, make_process_settings, plan_instances
from torchmoor.run.run_directory import find_session_keys
from torchmoor.wire.handler_variables import ALLOWED_HOSTS, JOURNAL_URL
from torchmoor.wire.session_ids import KEYS_VARIABLE


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
