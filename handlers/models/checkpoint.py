"""Finds a checkpoint: a directory, an S3 prefix or a name on the Hugging Face hub, downloaded if needed.

Downloads only what a model needs: configuration, tokenizer, safetensors; never pickles, which can run code.
"""

import fcntl
import hashlib
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from handlers.errors import SettingsError
from handlers.settings.model import ModelSettings
from torchmoor.wire.checkpoint_places import HUB, HUB_FORM, S3, split_hub_place
from torchmoor.wire.disk_sync import sync_to_disk
from torchmoor.wire.progress import MARK, WORKER_INTERVAL_S, download_line, reporting

logger = logging.getLogger(__name__)

# The files that are read, of the checkpoint's own folder only.
NEEDED = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt")
UNNEEDED = ("*/*", "consolidated*.safetensors")  # the second: copies of the weights in their maker's format
MAX_FILES = 1000
MAX_ATTEMPTS = 6
PARTIAL = ".partial-"  # begins the name of a folder that is being downloaded
SPARE_BYTES = 64 << 20  # stay free on the disk


@dataclass(frozen=True, slots=True)
class _Object:
    key: str
    name: str
    size: int
    tag: str  # changes with the content


def find_checkpoint(settings: ModelSettings, worker_dir: Path, environ: Mapping[str, str]) -> Path:
    """Return the directory of the checkpoint that the settings name, after a download if needed.

    worker_dir: base of relative paths. Raises SettingsError.
    """
    if settings.path.startswith(S3):
        return _from_s3(settings)
    if settings.path.startswith(HUB):
        return _from_hub(settings, environ)
    if "://" in settings.path:
        raise SettingsError(f"handler.model.path must be a directory, {S3}bucket/prefix or {HUB_FORM}")
    return worker_dir / settings.path


def _from_hub(settings: ModelSettings, environ: Mapping[str, str]) -> Path:
    """Use huggingface_hub with its cache and variables: HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.file_download import repo_folder_name

    try:
        name, of_path = split_hub_place(settings.path)
    except ValueError as exc:
        raise SettingsError(f"{settings.path.removeprefix(HUB)!r} is not a directory here, and {exc}") from exc
    if of_path and settings.revision not in ("", of_path):
        raise SettingsError(
            f"{settings.path} and handler.model.revision ({settings.revision}) are different revisions: "
            "give one of them"
        )
    revision = of_path or settings.revision or None
    is_offline, total = constants.HF_HUB_OFFLINE, 0
    token = environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN") or None
    try:
        if not is_offline:
            info = HfApi(token=token).model_info(
                name, revision=revision, files_metadata=True, timeout=settings.connect_timeout_s
            )
            files = info.siblings or []
            total = _check_size(settings, name, [f.size or 0 for f in files if _is_needed(f.rfilename)])
        logger.info("checkpoint of the hub name=%s revision=%s offline=%s", name, revision or "main", is_offline)
        blobs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "blobs"
        with reporting(download_line(blobs, total), _log_progress, 0 if is_offline else WORKER_INTERVAL_S):
            folder = snapshot_download(
                name,
                revision=revision,
                token=token,
                allow_patterns=list(NEEDED),
                ignore_patterns=list(UNNEEDED),
                etag_timeout=settings.connect_timeout_s,
                local_files_only=is_offline,
            )
    except SettingsError:
        raise
    except Exception as exc:  # huggingface_hub, its HTTP client and the file system have errors of their own
        raise SettingsError(_explain_hub(name, exc, is_offline=is_offline)) from exc
    return Path(folder)


def _explain_hub(name: str, error: Exception, *, is_offline: bool) -> str:
    """Return why a model of the hub cannot be had, and what to do."""
    from huggingface_hub.errors import RepositoryNotFoundError

    problem = "cannot be downloaded from the Hugging Face hub"
    if is_offline:
        problem = "is not in the cache, and HF_HUB_OFFLINE is set"
        remedy = "unset HF_HUB_OFFLINE, or download the model first"
    elif isinstance(error, RepositoryNotFoundError):
        remedy = "check the name; a private or gated model needs HF_TOKEN"
    else:
        remedy = "check the revision, the network and HF_ENDPOINT, or give a directory"
    reason = str(error).strip().partition("\n")[0]
    return f"{name} {problem}: {type(error).__name__}: {reason}; {remedy}"


def _from_s3(settings: ModelSettings) -> Path:
    """Download once. A folder of the cache is complete, and named after the content of the objects."""
    from handlers.s3 import S3Error, make_client, split_url, translated  # loads boto3

    bucket, prefix = split_url(settings.path)
    if not bucket or not prefix:
        raise SettingsError(f"handler.model.path must be {S3}bucket/prefix, not {settings.path!r}")
    client = make_client(
        "handler.model.path",
        settings.connect_timeout_s,
        settings.read_timeout_s,
        attempts=MAX_ATTEMPTS,
        verifies_checksums=True,
    )
    try:
        with translated("the store"):
            objects = _list(client, bucket, prefix)
        if not any(each.name == "config.json" for each in objects):
            raise SettingsError(f"there is no config.json in {settings.path}")
        _check_size(settings, settings.path, [each.size for each in objects])
        home = Path(settings.cache_dir).expanduser() / _digest(settings.path)
        home.mkdir(parents=True, exist_ok=True)
        target = home / _digest(*(f"{each.name} {each.size} {each.tag}" for each in objects))
        with _locked(home / "lock"), translated("the store"):
            if not target.is_dir():
                _download(client, bucket, prefix, objects, target)
        return target
    except S3Error as exc:
        raise SettingsError(f"{settings.path} cannot be read: {exc}") from exc
    except OSError as exc:
        raise SettingsError(f"{settings.path} cannot be kept in {settings.cache_dir}: {exc}") from exc


def _is_needed(name: str) -> bool:
    return not any(fnmatch(name, pattern) for pattern in UNNEEDED) and any(fnmatch(name, each) for each in NEEDED)


def _list(client: Any, bucket: str, prefix: str) -> list[_Object]:
    """List the checkpoint's files in the order of their names."""
    from handlers.s3 import list_objects

    found = []
    for item in list_objects(client, bucket, prefix, delimiter="/"):
        name = item["Key"].rpartition("/")[2]
        if name and _is_needed(name):
            found.append(_Object(item["Key"], name, item["Size"], item["ETag"]))
        if len(found) > MAX_FILES:
            raise SettingsError(f"{S3}{bucket}/{prefix} has more than {MAX_FILES} files; give one checkpoint's prefix")
    return found


def _check_size(settings: ModelSettings, name: str, sizes: Sequence[int]) -> int:
    """Return the sum of the files' sizes. Raises SettingsError if it is over the limit."""
    total = sum(sizes)
    if total > settings.max_download_bytes:
        limit = f"handler.model.max_download_bytes ({settings.max_download_bytes})"
        raise SettingsError(f"{name} has {total} bytes, more than {limit}")
    return total


def _log_progress(line: str) -> None:
    logger.info("%s%s", MARK, line)


def _download(client: Any, bucket: str, prefix: str, objects: Sequence[_Object], target: Path) -> None:
    """Download all files into a folder, renamed when complete and durable; then delete the folders beside it.

    Raises OSError if the disk has no room, or an object has changed.
    """
    for killed in target.parent.glob(f"{PARTIAL}*"):  # the remains of a worker that was killed
        shutil.rmtree(killed, ignore_errors=True)
    total = sum(each.size for each in objects)
    free = shutil.disk_usage(target.parent).free
    if total + SPARE_BYTES > free:
        raise OSError(f"it has {total} bytes, but the disk has only {free} left, {SPARE_BYTES} of which stay free")
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=target.parent) as temporary:
        folder = Path(temporary) / "checkpoint"
        folder.mkdir()
        with reporting(download_line(folder, total), _log_progress, WORKER_INTERVAL_S):
            for each in objects:
                client.download_file(bucket, each.key, str(folder / each.name))
                sync_to_disk(folder / each.name)
        if _list(client, bucket, prefix) != objects:
            raise OSError("it has changed while it was downloaded")
        sync_to_disk(folder)
        folder.rename(target)
        sync_to_disk(target.parent)
    logger.info("checkpoint downloaded files=%d bytes=%d folder=%s", len(objects), total, target)
    for older in target.parent.iterdir():  # running workers have theirs open
        if older.is_dir() and older != target:
            shutil.rmtree(older, ignore_errors=True)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one worker of a host download while the others wait. The lock ends with its process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
