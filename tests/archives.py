"""Archives of tests that start no TorchServe."""

import json
import zipfile
from pathlib import Path

from torchmoor.fleet.archives import MANIFEST


def write_small_archive(path: Path, handler: str = "start.py") -> Path:
    """Write an archive that names a handler and has only a small file beside it. Return its path."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MANIFEST, json.dumps({"model": {"handler": handler}}))
        archive.writestr("weights", b"w" * 4096)
    return path
