"""The search for the container's model, which becomes a model store for TorchServe.

A model is an archive (.mar), an unpacked archive, a Hugging Face checkpoint's directory, or a tar.gz of one of them.
Weights are never copied: an archive is unpacked once for all instances, and a directory is linked.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchmoor.container.environment import ContainerEnvironment
from torchmoor.errors import ConfigError
from torchmoor.run.checkpoints import CHECKPOINT_VARIABLES, MODEL_PATH
from torchmoor.run.many import MANY

logger = logging.getLogger(__name__)

CHAT = "chat"  # the archive with the chat handler and no checkpoint
PROPERTIES = "serving.properties"
MANIFEST = Path("MAR-INF") / "MANIFEST.json"
SAGEMAKER_TARBALL = "model.tar.gz"  # the SDK's local mode leaves it beside what it has unpacked from it
TARBALLS = (".tar.gz", ".tgz")
COPY_BYTES = 1 << 20
SPARE_BYTES = 64 << 20  # of the temporary directory, beyond an unpacked model
# Errors of zipfile and tarfile about a file that is truncated, damaged, encrypted or packed in an unknown way.
BROKEN = (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, OSError, RuntimeError, ValueError)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)

_FORMS = (
    "put there a TorchServe archive (NAME.mar, or unpacked with its MAR-INF), or a Hugging Face checkpoint as "
    "save_pretrained writes it (config.json, *.safetensors), or a .tar.gz of one of them; or name a checkpoint by "
    "HF_MODEL_ID, or an archive of the image by TORCHMOOR_MODEL"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """One archive of a model store. name: the name in TorchServe. environment: further variables of its handler."""

    name: str
    archive: str
    store: Path
    environment: Mapping[str, str] = field(default_factory=dict)


def find_model(variables: ContainerEnvironment, work: Path, environ: Mapping[str, str]) -> FoundModel:
    """Return the container's model, in a store below `work`. Raises ConfigError, which says what to do."""
    store = work / "store"
    store.mkdir(parents=True)
    if variables.is_multi_model:
        return _bundled(variables, store, MANY)
    folder = variables.model_dir
    found = _look(folder, work, variables.model) if folder.is_dir() else None
    if found is None and variables.model:
        return _bundled(variables, store, variables.model)
    names_checkpoint = any(environ.get(name, "").strip() for name in CHECKPOINT_VARIABLES)
    if found is None:
        if names_checkpoint or (folder / PROPERTIES).is_file():
            return _bundled(variables, store, CHAT)
        raise ConfigError(f"there is no model in {folder}: {_FORMS}")
    if (found / MANIFEST).is_file():
        name = _read_name(found / MANIFEST)
        (store / name).symlink_to(found.resolve())
        return FoundModel(name=name, archive=name, store=store)
    model = _bundled(variables, store, CHAT)
    return model if names_checkpoint else replace(model, environment={MODEL_PATH: str(found.resolve())})


def _bundled(variables: ContainerEnvironment, store: Path, name: str) -> FoundModel:
    """Return one of the image's own archives."""
    archive = variables.archives / f"{name}.mar"
    if not archive.is_file():
        there = sorted(path.stem for path in variables.archives.glob("*.mar"))
        raise ConfigError(
            f"this image has no archive {name!r}, but {', '.join(there) or 'none'}: put the model into "
            f"{variables.model_dir}, or build the image with it (docs/container.md)"
        )
    (store / archive.name).symlink_to(archive.resolve())
    return FoundModel(name=name, archive=archive.name, store=store)


def _look(folder: Path, work: Path, wanted: str) -> Path | None:
    """Return the directory of an unpacked archive or of a checkpoint; None if there is none. Raises ConfigError."""
    if (folder / MANIFEST).is_file() or (folder / "config.json").is_file():
        return folder
    there = [path for path in folder.iterdir() if _is_given(path)]
    packed = sorted(path for path in there if path.name.endswith((".mar", *TARBALLS)) and path.is_file())
    if wanted:
        packed = [path for path in packed if _stem(path) == wanted] or packed
    inside = sorted(path for path in there if (path / MANIFEST).is_file() or (path / "config.json").is_file())
    if len(packed) + len(inside) > 1:
        packed = [path for path in packed if path.name != SAGEMAKER_TARBALL]
    if len(packed) + len(inside) > 1:
        names = ", ".join(path.name for path in (*packed, *inside)[:8])
        raise ConfigError(f"there are several models in {folder} ({names}): leave one, or name it by TORCHMOOR_MODEL")
    if packed:
        target = work / "unpacked" / _stem(packed[0])
        if target.exists():
            raise ConfigError(f"{packed[0].name} has an archive of its own name in it: unpack it once before")
        _unpack(packed[0], target)
        return _look(target, work, "")
    if inside:
        return inside[0]
    if (folder / "code" / "inference.py").is_file() or (folder / "inference.py").is_file():
        raise ConfigError(
            f"{folder} has an inference.py of AWS's PyTorch containers, which is not served here: {_FORMS}"
        )
    if there and not (folder / PROPERTIES).is_file():
        names = ", ".join(sorted(path.name for path in there)[:8])
        raise ConfigError(f"{folder} has no model that can be served, but {names}: {_FORMS}")
    return None


def _is_given(path: Path) -> bool:
    """Return False for hidden files and lost+found, which volumes and download tools leave beside a model.

    Only root can read lost+found, so looking into it would fail.
    """
    return not path.name.startswith(".") and path.name != "lost+found"


def _stem(path: Path) -> str:
    for suffix in (".mar", *TARBALLS):
        if path.name.endswith(suffix):
            return path.name.removesuffix(suffix)
    return path.name


def _unpack(packed: Path, target: Path) -> None:
    """Unpack into a directory, and write nothing outside it. Raises ConfigError if the file is broken or too large."""
    target.mkdir(parents=True)
    try:
        if packed.name.endswith(".mar"):
            with zipfile.ZipFile(packed) as bundle:
                _check_room(packed, target, sum(member.file_size for member in bundle.infolist()))
                bundle.extractall(target)  # removes path parts that lead out of the target
        else:
            _check_room(packed, target, packed.stat().st_size)  # weights hardly compress
            with tarfile.open(packed, "r:gz") as tar:
                for member in tar:
                    _check_room(packed, target, member.size)  # a small tarball can be a large model, or a trap
                    _extract(tar, member, target)
    except BROKEN as error:
        raise ConfigError(f"{packed} cannot be unpacked: {error}") from error


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """Extract one file or folder without its owner and permissions. Debian 12's tarfile has no filters.

    Raises TarError for any other member, and for a path that leads out of the target.
    """
    path = target / member.name.removeprefix("./")
    if member.name.startswith("/") or ".." in Path(member.name).parts or not (member.isfile() or member.isdir()):
        raise tarfile.ExtractError(f"{member.name} is not a regular file or folder")
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    content = tar.extractfile(member)
    assert content is not None  # a regular file
    path.parent.mkdir(parents=True, exist_ok=True)
    with content, path.open("wb") as file:
        shutil.copyfileobj(content, file, COPY_BYTES)


def _check_room(packed: Path, target: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(target).free
    if num_bytes + SPARE_BYTES > free:
        raise ConfigError(
            f"{packed} needs {num_bytes >> 20} MiB to be unpacked, and {target.parent} has {free >> 20} MiB: mount a "
            "larger volume there, set TMPDIR to one, or give the model unpacked"
        )


def _read_name(manifest: Path) -> str:
    """Return the model's name in TorchServe. Raises ConfigError."""
    try:
        name = json.loads(manifest.read_bytes())["model"]["modelName"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{manifest} is not a manifest as torch-model-archiver writes it") from error
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{manifest} has the model's name {name!r}; it must be letters, digits and ._-")
    return name
