"""The run directory of a fleet, and the session keys that it keeps there for the next one."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torchmoor.config.launcher import LaunchSettings
from torchmoor.errors import ConfigError
from torchmoor.fleet.instance_guard import SESSION_KEYS_FILE
from torchmoor.wire.disk_sync import sync_to_disk
from torchmoor.wire.session_ids import KEYS_VARIABLE, parse_session_keys


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
                os.fsync(file.fileno())
                with suppress(FileExistsError):
                    os.link(file.name, path)  # completely or not at all
            sync_to_disk(run_dir)
        kept = path.read_text().strip()
        parse_session_keys(kept)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the session keys in {path} cannot be used: {reason}") from error
    return kept
