"""Write small archives for tests that start no TorchServe, and unpack tar archives."""

import json
import tarfile
import zipfile
from pathlib import Path

from torchmoor.fleet.archives import MANIFEST


def write_small_archive(path: Path, handler: str = "start.py", **model: str) -> Path:
    """Write an archive that names a handler and has only a small file beside it. Return its path.

    model: further fields of the manifest's model.
    """
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MANIFEST, json.dumps({"model": {"handler": handler, **model}}))
        archive.writestr("weights", b"w" * 4096)
    return path


def unpack_tar(path: Path, folder: Path) -> None:
    """Unpack a tar archive that a test has made. Python before 3.11.4, such as Debian 12's, has no filters."""
    with tarfile.open(path) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(folder)
