"""How instances are supervised, and the run directory, for all commands that start instances."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torchmoor.config.body_heap import DEFAULT_HEAP_MIB
from torchmoor.config.launcher import DEFAULT_BODY_MIB, LaunchSettings
from torchmoor.errors import ConfigError
from torchmoor.fleet.archives import ArchiveContents, archive_name, built_in
from torchmoor.fleet.instance_guard import SESSION_KEYS_FILE
from torchmoor.fleet.launcher import SupervisionSettings
from torchmoor.fleet.torchserve import JAVA_HOME_VARIABLE, TorchServeSettings
from torchmoor.wire.session_ids import KEYS_VARIABLE, parse_session_keys

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


@contextmanager
def run_directory(launch: LaunchSettings) -> Iterator[Path]:
    """Yield the configured run directory, or a new temporary one, which is removed at the end if it is empty.

    Raises ConfigError if no temporary one can be made.
    """
    if launch.run_dir:
        yield Path(launch.run_dir).resolve()
        return
    try:
        run_dir = Path(tempfile.mkdtemp(prefix="torchmoor-"))
    except OSError as error:
        raise ConfigError(
            f"cannot make a temporary run directory: {error.strerror}; name one (--run-dir, or launcher.run_dir of the "
            "file), or set TMPDIR"
        ) from error
    try:
        yield run_dir
    finally:
        with suppress(OSError):  # it has the instances' logs
            run_dir.rmdir()


def find_session_keys(run_dir: Path, *, is_kept: bool) -> str:
    """Return the session keys of the environment, or of the run directory, or new ones.

    is_kept: write new ones into the run directory, so that the next fleet there continues the sessions of a journal.
    Raises ConfigError.
    """
    given = os.environ.get(KEYS_VARIABLE)
    new = f"k0:{secrets.token_hex(32)}"
    if given or not is_kept:
        return given or new
    path = run_dir / SESSION_KEYS_FILE
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with tempfile.NamedTemporaryFile("w", prefix=".", dir=run_dir) as file:  # only its owner may read it
                file.write(new)
                file.flush()
                with suppress(FileExistsError):
                    os.link(file.name, path)  # completely or not at all
        kept = path.read_text().strip()
        parse_session_keys(kept)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the session keys in {path} cannot be used: {reason}") from error
    return kept


def make_supervision_settings(
    launch: LaunchSettings, run_dir: Path, *, heap_mib: int = DEFAULT_HEAP_MIB, max_body_mib: int = DEFAULT_BODY_MIB
) -> SupervisionSettings:
    """Return how instances are started in a run directory."""
    java_home = os.environ.get(JAVA_HOME_VARIABLE)
    return SupervisionSettings(
        torchserve=TorchServeSettings(
            model_store=Path(launch.model_store).resolve(),
            java_home=Path(java_home) if java_home else None,
            python=Path(launch.python).absolute() if launch.python else Path(sys.executable),
            heap_mib=heap_mib,
            max_body_bytes=max_body_mib << 20,
        ),
        run_dir=run_dir,
        launch=launch,
    )
