"""Where a checkpoint is: a directory, an S3 prefix, or a name on the Hugging Face hub; afterwards always a directory.

Only what a model needs is downloaded: configuration, tokenizer, safetensors. Never pickles, which can run code.
"""

import fcntl
import hashlib
import logging
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from handlers.errors import ConfigError
from handlers.settings import ModelSettings

logger = logging.getLogger(__name__)

# The files of a checkpoint's own folder that are read; not those of folders below it.
NEEDED = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt")
UNNEEDED = ("*/*", "consolidated*.safetensors")  # the second: the same weights again, in their maker's own form
MAX_FILES = 1000
PROGRESS_INTERVAL_S = 10.0
MAX_ATTEMPTS = 5
S3 = "s3://"
HUB = "hf://"
_HUB_NAME = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Object:
    """One file in S3."""

    key: str
    name: str
    size: int
    tag: str  # changes with the content


def find_checkpoint(settings: ModelSettings, archive: Path, environ: Mapping[str, str]) -> Path:
    """The directory of the checkpoint that the settings name, downloaded if it has to be.

    archive: what relative paths begin at. Raises ConfigError, which says what is missing.
    """
    if settings.path.startswith(S3):
        return _from_s3(settings)
    if settings.path.startswith(HUB):
        return _from_hub(settings, environ)
    if "://" in settings.path:
        raise ConfigError(f"handler.model.path must be a directory, {S3}bucket/prefix or {HUB}owner/name")
    return archive / settings.path


def _from_hub(settings: ModelSettings, environ: Mapping[str, str]) -> Path:
    """Through huggingface_hub, its cache and its variables: HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE

    name = settings.path.removeprefix(HUB)
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no directory here and no name on the Hugging Face hub, which is owner/name")
    revision = settings.revision or None
    token = environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN") or None
    try:
        if not HF_HUB_OFFLINE:
            info = HfApi(token=token).model_info(
                name, revision=revision, files_metadata=True, timeout=settings.connect_timeout_s
            )
            files = info.siblings or []
            _check_size(settings, name, [f.size or 0 for f in files if _is_needed(f.rfilename)])
        logger.info("checkpoint of the hub name=%s revision=%s offline=%s", name, revision or "main", HF_HUB_OFFLINE)
        folder = snapshot_download(
            name,
            revision=revision,
            token=token,
            allow_patterns=list(NEEDED),
            ignore_patterns=list(UNNEEDED),
            etag_timeout=settings.connect_timeout_s,
            local_files_only=HF_HUB_OFFLINE,
        )
    except ConfigError:
        raise
    except Exception as exc:  # huggingface_hub's, its HTTP client's and the file system's own
        place = "the cache, and HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else "the Hugging Face hub"
        reason = str(exc).strip().partition("\n")[0]
        raise ConfigError(f"{name} cannot be had from {place}: {type(exc).__name__}: {reason}") from exc
    return Path(folder)


def _from_s3(settings: ModelSettings) -> Path:
    """Downloaded once: a folder of the cache is complete or not there, and named after what the objects hold."""
    bucket, _, prefix = settings.path.removeprefix(S3).partition("/")
    prefix = prefix.strip("/")
    if not bucket or not prefix:
        raise ConfigError(f"handler.model.path must be {S3}bucket/prefix, not {settings.path!r}")
    try:
        import boto3
        from boto3.exceptions import Boto3Error
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as exc:
        raise ConfigError("a checkpoint in S3 needs boto3: pip install boto3") from exc
    try:
        client = boto3.client(
            "s3",
            config=Config(
                connect_timeout=settings.connect_timeout_s,
                read_timeout=settings.read_timeout_s,
                retries={"mode": "standard", "max_attempts": MAX_ATTEMPTS},
            ),
        )
        objects = _list(client, bucket, prefix)
        if not any(each.name == "config.json" for each in objects):
            raise ConfigError(f"there is no config.json in {settings.path}")
        _check_size(settings, settings.path, [each.size for each in objects])
        home = Path(settings.cache_dir).expanduser() / _digest(settings.path)
        home.mkdir(parents=True, exist_ok=True)
        target = home / _digest(*(f"{each.name} {each.size} {each.tag}" for each in objects))
        with _locked(home / "lock"):
            if not target.is_dir():
                _download(client, bucket, objects, target)
                for older in home.iterdir():  # of the same place; workers that run have theirs open
                    if older.is_dir() and older != target:
                        shutil.rmtree(older, ignore_errors=True)
        return target
    except (BotoCoreError, ClientError, Boto3Error) as exc:
        raise ConfigError(f"{settings.path} cannot be read: {exc}") from exc
    except OSError as exc:
        raise ConfigError(f"{settings.path} cannot be kept in {settings.cache_dir}: {exc}") from exc


def _is_needed(name: str) -> bool:
    return not any(fnmatch(name, pattern) for pattern in UNNEEDED) and any(fnmatch(name, each) for each in NEEDED)


def _list(client: Any, bucket: str, prefix: str) -> list[_Object]:
    """The checkpoint's files, in order of their names."""
    found = []
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/", Delimiter="/")
    for page in pages:
        for item in page.get("Contents", ()):
            name = item["Key"].rpartition("/")[2]
            if name and _is_needed(name):
                found.append(_Object(item["Key"], name, item["Size"], item["ETag"]))
        if len(found) > MAX_FILES:
            raise ConfigError(f"{S3}{bucket}/{prefix} has more than {MAX_FILES} files; give one checkpoint's prefix")
    return found


def _check_size(settings: ModelSettings, name: str, sizes: Sequence[int]) -> None:
    if sum(sizes) > settings.max_download_bytes:
        limit = f"handler.model.max_download_bytes ({settings.max_download_bytes})"
        raise ConfigError(f"{name} has {sum(sizes)} bytes, more than {limit}")


def _download(client: Any, bucket: str, objects: Sequence[_Object], target: Path) -> None:
    """All files into a folder that gets its name when it is complete. Raises OSError if the disk has no room."""
    total = sum(each.size for each in objects)
    free = shutil.disk_usage(target.parent).free
    if total > free:
        raise OSError(f"it has {total} bytes, but the disk has only {free} left")
    progress = _Progress(total)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as temporary:
        folder = Path(temporary) / "checkpoint"
        folder.mkdir()
        for each in objects:
            client.download_file(bucket, each.key, str(folder / each.name), Callback=progress.add)
            if (folder / each.name).stat().st_size != each.size:
                raise OSError(f"{each.name} has changed while it was downloaded")
        folder.rename(target)
    logger.info("checkpoint downloaded files=%d bytes=%d folder=%s", len(objects), total, target)


class _Progress:
    """Says now and then how far a download is. Called from the download's threads."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._said_at = time.monotonic()

    def add(self, num_bytes: int) -> None:
        self._done += num_bytes
        if time.monotonic() - self._said_at >= PROGRESS_INTERVAL_S:
            self._said_at = time.monotonic()
            logger.info("checkpoint downloading bytes=%d of=%d", self._done, self._total)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One worker of a host downloads, the others wait for it; a lock ends with the process that holds it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
