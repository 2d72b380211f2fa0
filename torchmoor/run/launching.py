"""Which instances this host may have, their archives, and how their processes run, for all commands that start some."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torchmoor.config.launcher import LaunchSettings
from torchmoor.config.routing import EndpointSettings
from torchmoor.errors import ConfigError
from torchmoor.fleet.archives import ArchiveContents, archive_name, built_in
from torchmoor.fleet.instance_process import InstanceProcessSettings
from torchmoor.fleet.torchserve import JAVA_HOME_VARIABLE, Launch, TorchServeSettings
from torchmoor.proxy.instances.endpoint import name_stem
from torchmoor.wire.session_ids import is_instance_name

CHECKOUT = Path(__file__).resolve().parents[2]
STORE = "model_store"


def plan_instances(endpoints: Sequence[EndpointSettings], gpus: Sequence[str], *, num_fixed: int = 0) -> list[Launch]:
    """Return all instances that the endpoints may have, spread over the GPUs if there are any.

    num_fixed: instances of a variant without Autoscaling. Raises ConfigError if an instance's name, which derives from
    its endpoint's and variant's, is invalid or also another instance's.
    """
    launches: list[Launch] = []
    for endpoint in endpoints:
        for variant in endpoint.variants:
            for number in range(variant.scaling.max_capacity if variant.scaling else num_fixed):
                name = f"{name_stem(endpoint, variant)}-{number}"
                if not is_instance_name(name):
                    raise ConfigError(
                        f"an instance of {endpoint.name} would have the name {name!r}, and names of instances have "
                        "a-z, 0-9 and single hyphens, 63 at most: choose another name"
                    )
                gpu = gpus[len(launches) % len(gpus)] if gpus else None
                launches.append(Launch(name, endpoint.name, archive_name(variant.model), gpu, variant.name))
    names = [launch.name for launch in launches]
    if len(set(names)) != len(names):
        raise ConfigError("two variants with Autoscaling would have instances of one name: choose other names")
    return launches


def find_model_store(launch: LaunchSettings) -> Path:
    """Return the configured directory of archives; else model_store/ in the working directory, or in the checkout."""
    if "model_store" in launch.model_fields_set:
        return Path(launch.model_store).resolve()
    return (Path(STORE) if Path(STORE).is_dir() else CHECKOUT / STORE).resolve()


def find_archive(launch: LaunchSettings, name: str) -> ArchiveContents | None:
    """Return the contents of an endpoint's archive; None if the archive must be in the model store.

    The demo model and `many` are built in. A configured directory must have all archives itself. Raises LaunchError.
    """
    if "model_store" in launch.model_fields_set or (find_model_store(launch) / archive_name(name)).exists():
        return None
    return built_in(name)


def make_process_settings(launch: LaunchSettings, run_dir: Path) -> InstanceProcessSettings:
    """Return how instances are started in a run directory."""
    java_home = os.environ.get(JAVA_HOME_VARIABLE)
    return InstanceProcessSettings(
        torchserve=TorchServeSettings(
            model_store=Path(launch.model_store).resolve(),
            java_home=Path(java_home) if java_home else None,
            python=Path(launch.python).absolute() if launch.python else Path(sys.executable),
            heap_mib=launch.heap_mib,
            max_body_bytes=launch.max_body_mib << 20,
        ),
        run_dir=run_dir,
        capacity=launch.capacity,
        start_timeout_s=launch.start_timeout_s,
        progress_interval_s=launch.progress_interval_s,
    )
