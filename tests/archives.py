"""Write small archives for tests that start no TorchServe."""

import json
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
