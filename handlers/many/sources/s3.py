"""Models below a prefix in S3, or a store that speaks it: an object `a/b.tar.gz`, or objects below `a/b/`.

Nothing is listed but a folder that is asked for, so a prefix may hold any number of models.
"""

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, cast

from handlers.errors import ConfigError, ModelBroken, ModelUnknown, SourceUnavailable
from handlers.many.model import LoadProgress
from handlers.many.sources.source import ARCHIVES, File, Found, Replaced, is_archive, version_of
from handlers.settings import ManySettings

try:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
    from urllib3.exceptions import HTTPError
except ImportError as exc:
    raise ConfigError("models in S3 need boto3: pip install boto3") from exc

MAX_ATTEMPTS = 3  # of a request, and of the rest of a body whose connection broke
PIECE_BYTES = 1 << 20


class S3Source:
    """prefix: empty, or with a slash at its end."""

    def __init__(self, client: Any, bucket: str, prefix: str, max_files: int) -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = prefix
        self._max_files = max_files

    def find(self, name: str) -> Found:
        with _translated():
            if is_archive(name):
                try:
                    said = self._client.head_object(Bucket=self._bucket, Key=self._prefix + name)
                except ClientError as exc:
                    if exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode") != 404:
                        raise
                else:
                    archive = File(name, said["ContentLength"], said["ETag"])
                    return Found(name, _short(archive.tag), [archive], is_archive=True)
            files = self._list(f"{self._prefix}{name}/")
        if not files:
            raise ModelUnknown(f"there is no model {name!r}; models are {', '.join(ARCHIVES)} objects and folders")
        return Found(name, version_of(files), files, is_archive=False)

    def _list(self, folder: str) -> list[File]:
        files: list[File] = []
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=folder)
        for page in pages:
            for item in page.get("Contents", ()):
                path = item["Key"].removeprefix(folder)
                if path and not any(part.startswith(".") or not part for part in path.split("/")):
                    files.append(File(path, item["Size"], item["ETag"]))
            if len(files) > self._max_files:
                raise ModelBroken(f"its folder has more files than handler.many.max_files ({self._max_files})")
        return files

    def open(self, found: Found, file: File, progress: LoadProgress) -> BinaryIO:
        key = self._prefix + (found.name if found.is_archive else f"{found.name}/{file.path}")
        body = _Body(self._client, self._bucket, key, file, progress)
        return cast(BinaryIO, io.BufferedReader(body, PIECE_BYTES))


class _Body(io.RawIOBase):
    """An object's bytes in order. A broken connection is opened again where it stood, if the object is the same."""

    def __init__(self, client: Any, bucket: str, key: str, file: File, progress: LoadProgress) -> None:
        self._client = client
        self._where = {"Bucket": bucket, "Key": key}
        self._file = file
        self._progress = progress
        self._at = 0
        self._stream: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._at == self._file.num_bytes:
            return 0
        data = self._read(min(len(buffer), PIECE_BYTES))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _read(self, size: int) -> bytes:
        with _translated():
            for attempt in range(1, MAX_ATTEMPTS + 1):
                self._progress.check()
                try:
                    if self._stream is None:
                        self._stream = self._get()
                    data: bytes = self._stream.read(size)
                    if data:
                        return data
                    raise HTTPClientError(error="the body ended early")
                except (BotoCoreError, HTTPError):
                    self._drop()
                    if attempt == MAX_ATTEMPTS:
                        raise
        raise AssertionError("unreachable")

    def _get(self) -> Any:
        rest = {"Range": f"bytes={self._at}-"} if self._at else {}
        said = self._client.get_object(**self._where, **rest)
        if said["ETag"] != self._file.tag:
            said["Body"].close()
            raise Replaced("it was replaced while it was downloaded")
        return said["Body"]

    def _drop(self) -> None:
        if self._stream is not None:
            with suppress(Exception):
                self._stream.close()
            self._stream = None

    def close(self) -> None:
        self._drop()
        super().close()


def open_s3(settings: ManySettings) -> S3Source:
    """By the usual AWS environment and files; makes no request. Raises ConfigError."""
    bucket, _, prefix = settings.source.removeprefix("s3://").partition("/")
    prefix = prefix.strip("/")
    if not bucket:
        raise ConfigError(f"handler.many.source must be s3://bucket/prefix, not {settings.source!r}")
    try:
        client = boto3.session.Session().client(
            "s3",
            config=Config(
                connect_timeout=settings.connect_timeout_s,
                read_timeout=settings.read_timeout_s,
                retries={"mode": "standard", "total_max_attempts": MAX_ATTEMPTS},
                max_pool_connections=settings.num_downloads + 2,
                response_checksum_validation="when_required",  # others that speak S3 do not all know the new ones
            ),
        )
    except BotoCoreError as exc:
        raise ConfigError(f"handler.many.source: {exc}") from exc
    return S3Source(client, bucket, f"{prefix}/" if prefix else "", settings.max_files)


def _short(tag: str) -> str:
    return hashlib.sha256(tag.encode()).hexdigest()[:32]


@contextmanager
def _translated() -> Iterator[None]:
    """The library's errors as ours. A model that is gone while it is read is looked for again, which will tell."""
    try:
        yield
    except ClientError as exc:
        code = exc.response.get("Error", {}).get("Code", "unknown")
        status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if status in (404, 416) and code != "NoSuchBucket":
            raise Replaced("it was removed or replaced while it was downloaded") from exc
        raise SourceUnavailable(f"the models' store refused {exc.operation_name} ({code})") from exc
    except (BotoCoreError, HTTPError) as exc:
        raise SourceUnavailable(f"the models' store cannot be reached ({type(exc).__name__})") from exc
