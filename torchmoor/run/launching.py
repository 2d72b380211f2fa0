"""Which archives instances serve and how they are supervised, for all commands that start instances."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torchmoor.config.launcher import LaunchSettings
from torchmoor.fleet.archives import ArchiveContents, archive_name, built_in
from torchmoor.fleet.launcher import SupervisionSettings
from torchmoor.fleet.torchserve import JAVA_HOME_VARIABLE, TorchServeSettings

CHECKOUT = Path(__file__).resolve().parents[2]
STORE = "model_store"


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


def make_supervision_settings(launch: LaunchSettings, run_dir: Path) -> SupervisionSettings:
    """Return how instances are started in a run directory."""
    java_home = os.environ.get(JAVA_HOME_VARIABLE)
    return SupervisionSettings(
        torchserve=TorchServeSettings(
            model_store=Path(launch.model_store).resolve(),
            java_home=Path(java_home) if java_home else None,
            python=Path(launch.python).absolute() if launch.python else Path(sys.executable),
            heap_mib=launch.heap_mib,
            max_body_bytes=launch.max_body_mib << 20,
        ),
        run_dir=run_dir,
        launch=launch,
    )
