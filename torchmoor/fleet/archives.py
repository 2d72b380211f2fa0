"""Archives (.mar) of the chat handler and of many models: a zip of handler code, a model-config and possibly weights.

The same files give the same bytes: entries have no times, owners or permissions.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from torchmoor.config.launcher import DEFAULT_ENDPOINT
from torchmoor.errors import LaunchError
from torchmoor.wire.archives import ARCHIVE_SUFFIX

PACKAGE = Path(__file__).resolve().parents[1]
BUNDLE = PACKAGE / "bundle"  # in a wheel: the handlers and the demo model (setup.py)
MANIFEST = "MAR-INF/MANIFEST.json"
OPERATIONS = "torchmoor/wire/operations.py"  # in each archive of our handlers
MODEL = "model"  # the checkpoint's folder in an archive; handler.model.path names it by default
NOT_SERVED = {"samples", "README.md"}  # beside the demo model's checkpoint
NOT_CODE = {"__pycache__", "configs"}
ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest time of a zip
PIECE_BYTES = 1 << 20
Count = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ArchiveContents:
    """The contents of an archive. files: all except the entry and the config, by their names in the archive."""

    entry: Path
    config: Path
    files: Mapping[str, Path]

    def names(self) -> dict[str, Path]:
        """Return all files by their names in the archive."""
        return {self.entry.name: self.entry, self.config.name: self.config, **self.files}


def archive_name(model: str) -> str:
    """Return the file of a model's archive in a model store."""
    return model + ARCHIVE_SUFFIX


def model_name(archive: str) -> str:
    """Return the name in TorchServe of an archive's model. archive: a file, or the folder of an unpacked one."""
    return archive.removesuffix(ARCHIVE_SUFFIX)


def find_root() -> Path:
    """Return the folder of handlers/ and models/: a wheel's own, or else the checkout's. Raises LaunchError."""
    for root in (BUNDLE, PACKAGE.parent):
        if (root / "handlers" / "configs").is_dir():
            return root
    raise LaunchError(f"there are no handlers in {BUNDLE}: install torchmoor again, from its wheel or its checkout")


def make_contents(entry: str, config: str, checkpoint: Path | None = None) -> ArchiveContents:
    """Return the contents of an archive with a checkpoint's own files, without its subfolders, or with none.

    entry: a file relative to handlers/. config: a file in handlers/configs. Raises LaunchError.
    """
    given = () if checkpoint is None else sorted(checkpoint.iterdir())
    files = {path.name: path for path in given if path.name not in NOT_SERVED and path.is_file()}
    return with_model(entry, config, files)


def with_model(entry: str, config: str, model: Mapping[str, Path]) -> ArchiveContents:
    """Return the contents of an archive with a model's files, by their names in its folder. Raises LaunchError."""
    handlers = find_root() / "handlers"
    entry_file = handlers / entry
    code = {f"handlers/{path.relative_to(handlers).as_posix()}": path for path in sorted(handlers.rglob("*"))}
    wire = [PACKAGE / "__init__.py", *sorted((PACKAGE / "wire").rglob("*"))]
    code |= {f"torchmoor/{path.relative_to(PACKAGE).as_posix()}": path for path in wire}
    files = {
        name: path
        for name, path in code.items()
        if path.is_file() and not NOT_CODE & set(Path(name).parts) and path != entry_file
    }
    weights = {f"{MODEL}/{name}": path for name, path in model.items()}
    return ArchiveContents(entry_file, handlers / "configs" / config, {**files, **weights})


def takes_operations(archive: Path) -> bool:
    """Return False for a readable archive, packed or not, whose handler does not implement operations."""
    if archive.is_dir():
        return (archive / OPERATIONS).is_file()
    return _has_member(archive, OPERATIONS)


def has_other_handlers(archive: Path) -> bool:
    """Return whether a packed archive has our handlers in another version than the installed one.

    Raises LaunchError.
    """
    try:
        with zipfile.ZipFile(archive) as packed:
            found = {member.filename: member.CRC for member in packed.infolist() if member.filename.endswith(".py")}
    except Exception:  # of many kinds; `find_fault` says what is damaged
        return False
    if OPERATIONS not in found:
        return False
    here = {name: zlib.crc32(path.read_bytes()) for name, path in chat_handler().files.items() if _is_module(name)}
    return {name: crc for name, crc in found.items() if _is_module(name)} != here


def _is_module(name: str) -> bool:
    """Return whether a file is in all our archives, unlike the entry file, which depends on the archive."""
    return name.startswith(("handlers/", "torchmoor/")) and name.endswith(".py") and not name.endswith("_entry.py")


def built_in(name: str) -> ArchiveContents | None:
    """Return the archive of a name that needs no model store: the demo model's, and that of many models. Else None."""
    root = find_root()
    if name == "many":
        return make_contents("many_entry.py", "many.yaml")
    demo = root / "models" / "tiny-llava"
    if name == DEFAULT_ENDPOINT and (demo / "config.json").is_file():
        return make_contents("chat_entry.py", "chat.yaml", demo)
    return None


def chat_handler() -> ArchiveContents:
    """Return the chat handler without a checkpoint, which its environment then names. Raises LaunchError."""
    return make_contents("chat_entry.py", "chat.yaml")


def write_archive(contents: ArchiveContents, name: str, target: Path, count: Count = lambda num_bytes: None) -> None:
    """Write an archive, completely or not at all. Nothing is compressed, because weights do not shrink.

    name: the model's name in TorchServe. count: receives the bytes of each step. Raises OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    model = {"modelName": name, "handler": contents.entry.name, "modelVersion": "1.0"}
    manifest = {
        "runtime": "python",
        "model": {**model, "configFile": contents.config.name},
        "archiverVersion": "0.12.0",
    }
    with whole_file(target) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as bundle:
        for entry, path in contents.names().items():
            add_file(bundle, entry, path, count)
        bundle.writestr(_member(MANIFEST), json.dumps(manifest, indent=2))


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the path's place at the end of the block, unless the block raises. Raises OSError.

    A file that it replaces passes on its permissions.
    """
    target = Path(os.path.realpath(path))  # Path.resolve raises RuntimeError for a link to itself
    partial = target.with_name(f".{uuid4().hex}.partial")
    permissions = target.stat().st_mode & 0o777 if target.exists() else None
    descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if permissions is None else permissions)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if permissions is not None:  # the umask may have taken some
                partial.chmod(permissions)
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def add_file(
    bundle: zipfile.ZipFile,
    name: str,
    path: Path,
    count: Count,
    *,
    compression: int = zipfile.ZIP_STORED,
) -> None:
    """Add a file to an archive. name: its name in the archive. count: receives the bytes of each step."""
    member = _member(name)
    member.compress_type = compression
    member.file_size = path.stat().st_size
    with path.open("rb") as file, bundle.open(member, "w") as copy:
        while piece := file.read(PIECE_BYTES):
            copy.write(piece)
            count(len(piece))


def _member(name: str) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name, ZIP_TIME)
    member.create_system = 3  # Unix, on every system
    member.external_attr = 0o100644 << 16
    return member


def find_fault(archive: Path, *, reads_all: bool = False) -> str:
    """Return why an archive, a file or a folder, cannot be an endpoint of its own; "" if nothing is found.

    reads_all: compare all bytes of a file with its checksums.
    """
    try:
        model = _read_model(archive)
        if reads_all and not archive.is_dir():
            with zipfile.ZipFile(archive) as packed:
                damaged = packed.testzip()
            if damaged is not None:
                return f"{damaged} is damaged"
        return "" if model["handler"] else "its manifest names no handler"
    except zipfile.BadZipFile as error:
        return f"it is not a complete archive ({error})"
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except Exception as error:  # zipfile, its decompressors and json raise errors of many kinds
        return f"it cannot be read ({type(error).__name__}: {error})"


def find_requirements(archive: Path) -> str:
    """Return the name of an archive's requirements file; "" if it has none or cannot be read."""
    try:
        return str(_read_model(archive).get("requirementsFile", ""))
    except Exception:  # of many kinds; `find_fault` says what is damaged
        return ""


def _read_model(archive: Path) -> dict[str, Any]:
    """Return the `model` object of an archive's manifest. Raises errors of many kinds."""
    if archive.is_dir():
        manifest = (archive / MANIFEST).read_bytes()
    else:
        with zipfile.ZipFile(archive) as packed:
            manifest = packed.read(MANIFEST)
    model: dict[str, Any] = json.loads(manifest)["model"]
    return model


def has_handler(archive: Path) -> bool:
    """Return False for a zip without TorchServe's manifest, which only an endpoint of many models serves."""
    return not archive.is_file() or _has_member(archive, MANIFEST)


def _has_member(archive: Path, name: str) -> bool:
    """Return True if a zip has the file, or cannot be read (see `find_fault`)."""
    try:
        with zipfile.ZipFile(archive) as packed:
            return name in packed.namelist()
    except Exception:  # of many kinds
        return True
