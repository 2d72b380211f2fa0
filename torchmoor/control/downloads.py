"""Downloads of model data from S3: an object, or all objects below a prefix."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.response import StreamingBody

from torchmoor.async_inference.objects.object_store import LocationRefused, ObjectError
from torchmoor.async_inference.objects.s3_client import bucket_and_key, find_head, has_bucket, make_client, translated
from torchmoor.config.control import ControlSettings
from torchmoor.config.objects import ObjectSettings
from torchmoor.errors import ConfigError, LaunchError

SPARE_BYTES = 1 << 30  # of the disk, beyond a download
MAX_FILES = 10_000  # of a prefix
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


class DownloadEnded(LaunchError):
    """Raised if a download ends because it took too long, or because the fleet stops."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a model in S3. name: its path in the model's folder. tag: changes with its content."""

    url: str
    name: str
    num_bytes: int
    tag: str = ""


class DownloadState:
    """The state of a model's download. Any thread may read it, or end the download."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_ended = False
        self._num_bytes = self._total = 0

    def begin(self, num_bytes: int) -> None:
        """Note that a download of this size begins."""
        with self._lock:
            self._num_bytes, self._total = 0, num_bytes

    def count(self, num_bytes: int) -> None:
        """Count received bytes; a negative number: they are downloaded again. Raises DownloadEnded."""
        with self._lock:
            if self._is_ended:
                raise DownloadEnded("the download was ended")
            self._num_bytes += num_bytes

    def check(self, **request: Any) -> None:
        """Raise DownloadEnded if the download must not go on. request: given by botocore before it sends one."""
        self.count(0)

    def end(self) -> None:
        """End the download when its next bytes arrive, or before its next request."""
        with self._lock:
            self._is_ended = True

    def describe(self) -> str:
        """Return how far the download is; empty if there is none."""
        with self._lock:
            if not self._total:
                return ""
            return f"downloading the model, {self._num_bytes / 1e6:.1f} of {self._total / 1e6:.1f} MB until now"


class EndableStream:
    """A response's body whose reads end with the download.

    A read of urllib3 waits for all of its bytes, however slowly they arrive; each of them restarts the read time-out.
    """

    def __init__(self, raw: Any, state: DownloadState) -> None:
        """raw: urllib3's response."""
        self._raw = raw
        self._state = state

    def read(self, num_bytes: int) -> bytes:
        """Return this number of bytes, or fewer at the body's end. Raises DownloadEnded."""
        pieces = []
        while num_bytes > 0 and (piece := self._raw.read1(num_bytes)):
            self._state.check()
            pieces.append(piece)
            num_bytes -= len(piece)
        return b"".join(pieces)


class ModelStore:
    """The models that S3 has. All operations block, and raise ObjectError or ConfigError."""

    def __init__(self, settings: ControlSettings, objects: ObjectSettings) -> None:
        self._settings = settings
        self._objects = objects

    @contextmanager
    def _client(self, url: str) -> Iterator[Any]:
        """Connect for requests about a URL."""
        with translated(url), closing(make_client(self._objects)) as client:
            yield client

    def list(self, prefix: str) -> list[StoredFile]:
        """Return the files below a prefix, which is a folder."""
        folder = prefix.rstrip("/") + "/"
        found: list[StoredFile] = []
        with self._client(prefix) as client:
            location = bucket_and_key(folder)
            pages = client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=location["Bucket"], Prefix=location["Key"]):
                for each in page.get("Contents", ()):
                    name = each["Key"].removeprefix(location["Key"])
                    if name and not name.endswith("/"):
                        found.append(StoredFile(folder + name, name, int(each["Size"]), each["ETag"]))
                if len(found) > MAX_FILES:
                    raise ConfigError(f"{prefix} has more than {MAX_FILES} objects: give the prefix of one model")
        if not found:
            raise ObjectError(f"there is no object below {folder}")
        return found

    def find(self, url: str) -> StoredFile:
        """Return an object's file."""
        with self._client(url) as client:
            head = find_head(client, url)
            if head is None and not has_bucket(client, url):
                raise ObjectError(f"there is no bucket {bucket_and_key(url)['Bucket']}")
        if head is None:
            raise ObjectError(f"there is no {url}")
        return StoredFile(url, url.rpartition("/")[2], int(head["ContentLength"]))

    def download(self, files: Sequence[StoredFile], folder: Path, state: DownloadState) -> None:
        """Download files into a folder. An interrupted file is continued a few times."""
        num_bytes, free = sum(each.num_bytes for each in files), shutil.disk_usage(folder).free
        if num_bytes > self._settings.max_model_bytes:
            raise ConfigError(f"{files[0].url} has {num_bytes} bytes, more than control.max_model_bytes")
        if num_bytes + SPARE_BYTES > free:
            raise ConfigError(
                f"{files[0].url} has {num_bytes >> 20} MiB, and {folder} has {free >> 20} MiB, "
                f"of which {SPARE_BYTES >> 20} must stay free"
            )
        state.begin(num_bytes)
        with self._client(files[0].url) as client:
            _make_endable(client, state)
            for each in files:
                with translated(each.url):
                    self._fetch(client, each, folder, state)

    @staticmethod
    def _fetch(client: Any, file: StoredFile, folder: Path, state: DownloadState) -> None:
        target = folder / file.name
        if not target.resolve().is_relative_to(folder.resolve()):
            raise LocationRefused(f"{file.url} would be written outside the model's folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        location = bucket_and_key(file.url)
        try:
            client.download_file(location["Bucket"], location["Key"], str(target), Callback=state.count)
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            raise LaunchError(f"{folder} cannot hold {file.url}: {error.strerror}") from error
        if target.stat().st_size != file.num_bytes:
            raise ObjectError(f"{file.url} was replaced while it was downloaded: create the endpoint again")


def _make_endable(client: Any, state: DownloadState) -> None:
    """Let a client's requests and the bodies of its responses end with a download."""

    def replace_body(http_response: Any, parsed: dict[str, Any], **_: Any) -> None:
        if "Body" in parsed:
            parsed["Body"] = StreamingBody(EndableStream(http_response.raw, state), parsed.get("ContentLength"))

    client.meta.events.register("before-send.s3", state.check)
    client.meta.events.register("after-call.s3.GetObject", replace_body)
