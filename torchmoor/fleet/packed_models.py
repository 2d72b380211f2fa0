"""Models as files, for the container and the control plane.

Finds an archive (.mar), a checkpoint or LMI's settings in a folder, unpacked, or in a tar.gz.

Weights are never copied: an archive is unpacked once for all instances, and a directory is used as it is.
"""

from __future__ import annotations

import json
import lzma
import re
import shutil
import tarfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from torchmoor.errors import ConfigError
from torchmoor.fleet.archives import MANIFEST
from torchmoor.wire.archives import ARCHIVE_SUFFIX, PACKED_SUFFIXES, BoundedTarInfo, BoundedZip
from torchmoor.wire.checkpoint_places import PROPERTIES

SAGEMAKER_TARBALL = "model.tar.gz"  # the SDK's local mode leaves it beside what it has unpacked from it
COPY_BYTES = 1 << 20
SPARE_BYTES = 64 << 20  # of the temporary directory, beyond an unpacked model
MAX_FILES = 100_000  # in a packed model
MAX_DIRECTORY_BYTES = 100 * MAX_FILES  # of a .mar, which is a zip
MAX_RATIO = 200  # of unpacked to packed bytes, above SMALL_BYTES: weights hardly compress
SMALL_BYTES = 1 << 30
MAX_MANIFEST_BYTES = 1 << 20
# Errors of zipfile and tarfile about a file that is truncated, damaged, encrypted or packed in an unknown way.
BROKEN = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError),
    *(EOFError, OSError, RuntimeError, ValueError),
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)

FORMS = (
    "put there a TorchServe archive (NAME.mar, or unpacked with its MAR-INF), or a Hugging Face checkpoint as "
    "save_pretrained writes it (config.json, *.safetensors), or a .tar.gz of one of them; or name a checkpoint by "
    "HF_MODEL_ID, or an archive of the image by TORCHMOOR_MODEL"
)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The model found in a folder. model: the directory of an unpacked archive or of a checkpoint.

    properties: the directory of LMI's serving.properties, which may name a checkpoint in another place.
    """

    model: Path | None = None
    properties: Path | None = None


def find_unpacked(folder: Path, work: Path, wanted: str) -> ModelFiles:
    """Return the model of a folder, after unpacking it below `work` if needed. Raises ConfigError."""
    own = folder if (folder / PROPERTIES).is_file() else None
    if _is_model(folder):
        return ModelFiles(folder, own)
    there = [path for path in folder.iterdir() if _is_given(path)]
    packed = sorted(path for path in there if path.name.endswith(PACKED_SUFFIXES) and path.is_file())
    if wanted:
        packed = [path for path in packed if _stem(path) == wanted] or packed
    inside = sorted(path for path in there if _is_model(path))
    if len(packed) + len(inside) > 1:
        packed = [path for path in packed if path.name != SAGEMAKER_TARBALL]
    if len(packed) + len(inside) > 1:
        raise _several(folder, [*packed, *inside])
    if packed:
        return find_unpacked(_unpack_below(work, packed[0]), work, "")
    if inside:
        return ModelFiles(inside[0], own or (inside[0] if (inside[0] / PROPERTIES).is_file() else None))
    _check_no_script(folder)
    return ModelFiles(None, own or _find_properties(folder, there))


def _find_properties(folder: Path, there: list[Path]) -> Path | None:
    """Return the one of a folder's entries that has LMI's settings; None for an empty folder. Raises ConfigError."""
    configured = sorted(path for path in there if (path / PROPERTIES).is_file())
    if len(configured) > 1:
        raise _several(folder, configured)
    if configured:
        _check_no_script(configured[0])
        return configured[0]
    if there:
        names = ", ".join(sorted(path.name for path in there)[:8])
        raise ConfigError(f"{folder} has no model that can be served, but {names}: {FORMS}")
    return None


def _is_model(path: Path) -> bool:
    return (path / MANIFEST).is_file() or (path / "config.json").is_file()


def _several(folder: Path, models: list[Path]) -> ConfigError:
    names = ", ".join(path.name for path in models[:8])
    return ConfigError(f"there are several models in {folder} ({names}): leave one, or name it by TORCHMOOR_MODEL")


def _unpack_below(work: Path, packed: Path) -> Path:
    """Return the new directory of an unpacked file. A tarball may have a file of its own name in it, but no third."""
    targets = [work / level / _stem(packed) for level in ("unpacked", "inner")]
    target = next((each for each in targets if not each.exists()), None)
    if target is None:
        raise ConfigError(f"{packed.name} has archives of its own name in archives: unpack it once before")
    unpack(packed, target)
    return target


def _check_no_script(folder: Path) -> None:
    """Raise ConfigError if the folder has a script that another container would run."""
    scripts = {"code/inference.py": "PyTorch", "inference.py": "PyTorch", "model.py": "LMI"}
    for name, containers in scripts.items():
        if (folder / name).is_file():
            raise ConfigError(
                f"{folder} has a script {name.rpartition('/')[2]} of AWS's {containers} containers, which is not "
                f"served here: {FORMS}"
            )


def _is_given(path: Path) -> bool:
    """Return False for hidden files and lost+found, which volumes and download tools leave beside a model.

    Only root can read lost+found, so looking into it would fail.
    """
    return not path.name.startswith(".") and path.name != "lost+found"


def _stem(path: Path) -> str:
    for suffix in PACKED_SUFFIXES:
        if path.name.endswith(suffix):
            return path.name.removesuffix(suffix)
    return path.name


def unpack(packed: Path, target: Path) -> None:
    """Unpack into a directory, and write nothing outside it.

    Raises ConfigError if the file is broken or too large; then the directory is not there.
    """
    target.mkdir(parents=True)
    try:
        if packed.name.endswith(ARCHIVE_SUFFIX):
            with BoundedZip(packed, MAX_DIRECTORY_BYTES) as file, zipfile.ZipFile(file) as bundle:
                members = bundle.infolist()
                num_bytes = sum(member.file_size for member in members)
                _check_room(packed, target, num_bytes)
                _check_contents(packed, len(members), num_bytes)
                bundle.extractall(target)  # removes path parts that lead out of the target
        else:
            _check_room(packed, target, packed.stat().st_size)  # weights hardly compress
            with tarfile.open(packed, "r:gz", tarinfo=BoundedTarInfo) as tar:
                num_bytes = 0
                for number, member in enumerate(tar, 1):
                    num_bytes += member.size
                    _check_room(packed, target, member.size)  # a small tarball can be a large model
                    _check_contents(packed, number, num_bytes)
                    _extract(tar, member, target)
                    tar.members.clear()  # type: ignore[attr-defined]  # otherwise all names stay in memory
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, BROKEN):
            raise ConfigError(f"{packed} cannot be unpacked: {error}") from error
        raise


def _check_contents(packed: Path, num_files: int, num_bytes: int) -> None:
    """Raise ConfigError for a file that was packed to exhaust a disk."""
    if num_files > MAX_FILES:
        raise ConfigError(f"{packed} has more than {MAX_FILES} files: give the model unpacked")
    if num_bytes > max(SMALL_BYTES, MAX_RATIO * packed.stat().st_size):
        raise ConfigError(f"{packed} is more than {MAX_RATIO} times as long unpacked: give the model unpacked")


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """Extract one file or folder without its owner and permissions. Debian 12's tarfile has no filters.

    Raises TarError for any other member, and for a path that leads out of the target.
    """
    name = member.name.removeprefix("./")
    if name.startswith("/") or ".." in Path(name).parts or not (member.isfile() or member.isdir()):
        raise tarfile.ExtractError(f"{member.name} is not a regular file or folder")
    path = target / name
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


def read_name(manifest: Path) -> str:
    """Return the model's name in TorchServe. Raises ConfigError."""
    try:
        with manifest.open("rb") as file:
            return parse_name(file.read(MAX_MANIFEST_BYTES + 1), str(manifest))
    except OSError as error:
        raise ConfigError(f"{manifest} cannot be read: {error.strerror}") from error


def parse_name(manifest: bytes, where: str) -> str:
    """Return the model's name that a manifest has. where: names it in errors. Raises ConfigError."""
    if len(manifest) > MAX_MANIFEST_BYTES:
        raise ConfigError(f"{where} has more than {MAX_MANIFEST_BYTES} bytes")
    try:
        name = json.loads(manifest)["model"]["modelName"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{where} is not a manifest as torch-model-archiver writes it") from error
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where} has the model's name {name!r}; it must be letters, digits and ._-")
    return name
