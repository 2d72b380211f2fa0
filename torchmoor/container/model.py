"""From what lies in /opt/ml/model to a model store that TorchServe can serve.

An archive (.mar), one that is unpacked, a Hugging Face checkpoint's directory, or a tar.gz of one of them. Weights are
never copied: an archive is unpacked once for all instances, a directory is linked. Loads nothing and runs nothing.
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
from torchmoor.run.many import MANY

logger = logging.getLogger(__name__)

CHAT = "chat"  # the archive with the chat handler and no checkpoint
MODEL_PATH = "TORCHMOOR_HANDLER_MODEL_PATH"
# Who else says which checkpoint the chat handler shall load (handlers/compatibility.py).
CHECKPOINT_VARIABLES = (MODEL_PATH, "HF_MODEL_ID", "OPTION_MODEL_ID")
PROPERTIES = "serving.properties"
MANIFEST = Path("MAR-INF") / "MANIFEST.json"
SAGEMAKER_TARBALL = "model.tar.gz"  # the SDK's local mode leaves it beside what it has unpacked from it
TARBALLS = (".tar.gz", ".tgz")
COPY_BYTES = 1 << 20
SPARE_BYTES = 64 << 20  # of the temporary directory, beyond an unpacked model
# What zipfile and tarfile raise for a file that is cut off, damaged or encrypted, or packed in a way they do not know.
BROKEN = (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, OSError, RuntimeError, ValueError)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)

_FORMS = (
    "put there a TorchServe archive (NAME.mar, or unpacked with its MAR-INF), or a Hugging Face checkpoint as "
    "save_pretrained writes it (config.json, *.safetensors), or a .tar.gz of one of them; or name a checkpoint by "
    "HF_MODEL_ID, or an archive of the image by TORCHMOOR_MODEL"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """One archive of a model store. name: TorchServe's for it. environment: what its handler is told besides."""

    name: str
    archive: str
    store: Path
    environment: Mapping[str, str] = field(default_factory=dict)


def find_model(told: ContainerEnvironment, work: Path, environ: Mapping[str, str]) -> FoundModel:
    """The model that the container shall serve, in a store below `work`. Raises ConfigError, which says what to do."""
    store = work / "store"
    store.mkdir(parents=True)
    if told.is_multi_model:
        return _bundled(told, store, MANY)
    folder = told.model_dir
    found = _look(folder, work, told.model) if folder.is_dir() else None
    if found is None and told.model:
        return _bundled(told, store, told.model)
    names_checkpoint = any(environ.get(name, "").strip() for name in CHECKPOINT_VARIABLES)
    if found is None:
        if names_checkpoint or (folder / PROPERTIES).is_file():
            return _bundled(told, store, CHAT)
        raise ConfigError(f"there is no model in {folder}: {_FORMS}")
    if (found / MANIFEST).is_file():
        name = _read_name(found / MANIFEST)
        (store / name).symlink_to(found.resolve())
        return FoundModel(name=name, archive=name, store=store)
    model = _bundled(told, store, CHAT)
    return model if names_checkpoint else replace(model, environment={MODEL_PATH: str(found.resolve())})


def _bundled(told: ContainerEnvironment, store: Path, name: str) -> FoundModel:
    """An archive that the image brings."""
    archive = told.archives / f"{name}.mar"
    if not archive.is_file():
        there = sorted(path.stem for path in told.archives.glob("*.mar"))
        raise ConfigError(
            f"this image has no archive {name!r}, but {', '.join(there) or 'none'}: put the model into "
            f"{told.model_dir}, or build the image with it (docs/container.md)"
        )
    (store / archive.name).symlink_to(archive.resolve())
    return FoundModel(name=name, archive=archive.name, store=store)


def _look(folder: Path, work: Path, wanted: str) -> Path | None:
    """The directory of an unpacked archive or of a checkpoint; None if there is neither. Raises ConfigError."""
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
    """False for what file systems, Kubernetes' volumes and download tools put beside a model: hidden, or lost+found.

    The latter's folder is root's alone, and to look into it would be an error of its own.
    """
    return not path.name.startswith(".") and path.name != "lost+found"


def _stem(path: Path) -> str:
    for suffix in (".mar", *TARBALLS):
        if path.name.endswith(suffix):
            return path.name.removesuffix(suffix)
    return path.name


def _unpack(packed: Path, target: Path) -> None:
    """Into a directory of its own, with nothing outside it. Raises ConfigError if it is broken or there is no room."""
    target.mkdir(parents=True)
    try:
        if packed.name.endswith(".mar"):
            with zipfile.ZipFile(packed) as bundle:
                _check_room(packed, target, sum(member.file_size for member in bundle.infolist()))
                bundle.extractall(target)  # takes away what would lead out
        else:
            _check_room(packed, target, packed.stat().st_size)  # weights hardly shrink
            with tarfile.open(packed, "r:gz") as tar:
                for member in tar:
                    _check_room(packed, target, member.size)  # a small tarball can be a large model, or a trap
                    _extract(tar, member, target)
    except BROKEN as error:
        raise ConfigError(f"{packed} cannot be unpacked: {error}") from error


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """One file or folder, without its owner and permissions. The filters of tarfile are not in Debian 12's Python.

    Raises TarError for what is neither, or leads out.
    """
    path = target / member.name.removeprefix("./")
    if member.name.startswith("/") or ".." in Path(member.name).parts or not (member.isfile() or member.isdir()):
        raise tarfile.ExtractError(f"{member.name} is no file or folder of its own")
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    content = tar.extractfile(member)
    assert content is not None  # it is a file
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
    """The model's name, by which TorchServe knows it. Raises ConfigError."""
    try:
        name = json.loads(manifest.read_bytes())["model"]["modelName"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{manifest} is no manifest as torch-model-archiver writes it") from error
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{manifest} has the model's name {name!r}; it must be letters, digits and ._-")
    return name
