"""The temporary directory, launcher settings and session keys of the roles that run TorchServe."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torchmoor.config.launcher import LaunchSettings
from torchmoor.container.environment import ContainerEnvironment
from torchmoor.container.model import FoundModel
from torchmoor.errors import ConfigError
from torchmoor.fleet.instance_process import InstanceProcessSettings
from torchmoor.fleet.ports import USUAL
from torchmoor.run.launching import make_process_settings
from torchmoor.wire.handler_variables import JOURNAL_URL
from torchmoor.wire.session_ids import KEYS_VARIABLE

logger = logging.getLogger(__name__)

# From SIGTERM to SIGKILL: enough for an idle instance to stop. The rest of SageMaker's 30 s is for running requests.
KILL_AFTER_S = 3.0


@contextmanager
def runtime_directory() -> Iterator[Path]:
    """Create a temporary directory for as long as the context lasts. Raises ConfigError if there is no place for it."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="torchmoor-"))
    except OSError as error:
        raise ConfigError(
            "there is no directory to write temporary files to: mount a volume at /tmp (docker run --tmpfs /tmp, "
            "an emptyDir in Kubernetes), or set TMPDIR to one"
        ) from error
    try:
        make_home(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_home(folder: Path) -> None:
    """Give the handlers' libraries a home for their caches, if the user has none or a read-only one."""
    home = os.environ.get("HOME", "")
    if not home or home == "/" or not os.access(home, os.W_OK):
        own = folder / "home"
        own.mkdir()
        os.environ["HOME"] = str(own)
    os.environ.setdefault("USER", "torchmoor")  # torch needs a name, and Kubernetes' numeric users have none


def container_process_settings(
    variables: ContainerEnvironment, found: FoundModel, work: Path
) -> InstanceProcessSettings:
    """Return how the container's instances are started."""
    settings = make_process_settings(LaunchSettings(model_store=str(found.store)), work / "run")
    torchserve = replace(
        settings.torchserve, heap_mib=variables.heap_mib, logs_to_console=True, properties=variables.properties
    )
    return replace(
        settings,
        torchserve=torchserve,
        capacity=variables.capacity,
        start_timeout_s=variables.start_timeout_s,
        kill_after_s=KILL_AFTER_S,
        ports=variables.safe_ports or USUAL,
    )


def make_session_keys(environ: Mapping[str, str]) -> str:
    """Return the environment's session keys, or new ones. Warn if other containers could not read these session ids."""
    keys = environ.get(KEYS_VARIABLE)
    if not keys and environ.get(JOURNAL_URL, "off") != "off":
        logger.warning(
            "%s is not set: other containers that share the journal cannot take over sessions of this one",
            KEYS_VARIABLE,
        )
    return keys or f"k0:{secrets.token_hex(32)}"
