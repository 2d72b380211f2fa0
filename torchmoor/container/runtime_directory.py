"""What both roles that run TorchServe have in common: a folder to work in, and how their instances are run."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from torchmoor.config.launcher import LaunchSettings
from torchmoor.container.environment import ContainerEnvironment
from torchmoor.container.model import FoundModel
from torchmoor.errors import ConfigError
from torchmoor.fleet.launcher import LauncherSettings
from torchmoor.fleet.ports import USUAL
from torchmoor.run.launching import JOURNAL_URL, SESSION_KEYS, make_launcher_settings

logger = logging.getLogger(__name__)

# Of an instance that has nothing to do any more; the rest of SageMaker's 30 s is for requests to end.
STOP_GRACE_S = 3.0


class Workplace:
    """A temporary folder, for as long as the context lasts."""

    def __enter__(self) -> Path:
        """Raises ConfigError if nothing can be written anywhere."""
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="torchmoor-"))
        except OSError as error:
            raise ConfigError(
                "there is no directory to write temporary files to: mount a volume at /tmp (docker run --tmpfs /tmp, "
                "an emptyDir in Kubernetes), or set TMPDIR to one"
            ) from error
        make_home(self._folder)
        return self._folder

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def make_home(folder: Path) -> None:
    """Give the handlers' libraries a home to keep their caches in, where the user has none or it is read-only."""
    home = os.environ.get("HOME", "")
    if not home or home == "/" or not os.access(home, os.W_OK):
        own = folder / "home"
        own.mkdir()
        os.environ["HOME"] = str(own)
    os.environ.setdefault("USER", "torchmoor")  # torch asks for it, and a user of Kubernetes' making has no name


def container_launcher_settings(told: ContainerEnvironment, found: FoundModel, work: Path) -> LauncherSettings:
    """Return how the container's instances are started."""
    launch = LaunchSettings(
        model_store=str(found.store),
        capacity=told.capacity,
        heap_mib=told.heap_mib,
        start_timeout_s=told.start_timeout_s,
    )
    settings = make_launcher_settings(launch, work / "run")
    torchserve = replace(settings.torchserve, logs_to_console=True, properties=told.properties)
    return replace(settings, torchserve=torchserve, stop_grace_s=STOP_GRACE_S, ports=told.safe_ports or USUAL)


def make_session_keys(environ: Mapping[str, str]) -> str:
    """Those of the environment, or new ones. Warns where other containers could not read these sessions' ids."""
    keys = environ.get(SESSION_KEYS)
    if not keys and environ.get(JOURNAL_URL, "off") != "off":
        logger.warning(
            "%s is not set: other containers that share the journal cannot take over sessions of this one", SESSION_KEYS
        )
    return keys or f"k0:{secrets.token_hex(32)}"
