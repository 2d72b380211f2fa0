"""Models below a prefix in S3: an object `a/b.tar.gz`, or objects below `a/b/`.

Only a requested folder is listed, so a prefix may hold any number of models.
"""

import hashlib
import io
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from handlers.errors import SettingsError, SourceUnavailable
from handlers.many.model import LoadProgress
from handlers.many.sources.source import (
    SOURCE,
    Replaced,
    SourceFile,
    SourceModel,
    check_number_of_files,
    is_archive,
    unknown_model,
    version_of,
)
from handlers.s3 import PIECE_BYTES, PieceReader, S3Error, list_objects, make_client, read_object, split_url, translated
from handlers.settings.many import ManySettings


class S3Source:
    """prefix: empty, or with a slash at its end."""

    def __init__(self, client: Any, bucket: str, prefix: str, max_files: int) -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = prefix
        self._max_files = max_files

    @property
    def store(self) -> str:
        """The store's URL, wherever the client has it from; empty for AWS, where no two buckets have one name."""
        url = str(self._client.meta.endpoint_url)
        return "" if (urlsplit(url).hostname or "").endswith(".amazonaws.com") else url

    def find(self, name: str) -> SourceModel:
        if is_archive(name):
            try:
                with translated("the models' store"):
                    head = self._client.head_object(Bucket=self._bucket, Key=self._prefix + name)
            except S3Error as exc:
                if exc.status != 404:
                    raise SourceUnavailable(str(exc)) from exc
            else:
                archive = SourceFile(name, head["ContentLength"], head["ETag"])
                version = hashlib.sha256(archive.tag.encode()).hexdigest()[:32]
                return SourceModel(name, version, [archive], is_archive=True, open=partial(self._open, self._prefix))
        with _as_source_errors():
            folder = f"{self._prefix}{name}/"
            files = self._list(folder)
        if not files:
            raise unknown_model(name)
        return SourceModel(name, version_of(files), files, is_archive=False, open=partial(self._open, folder))

    def _list(self, folder: str) -> list[SourceFile]:
        files: list[SourceFile] = []
        for item in list_objects(self._client, self._bucket, folder):
            path = item["Key"].removeprefix(folder)
            if path and not any(part.startswith(".") or not part for part in path.split("/")):
                files.append(SourceFile(path, item["Size"], item["ETag"]))
                check_number_of_files(len(files), self._max_files)
        return files

    def _open(self, folder: str, file: SourceFile, progress: LoadProgress) -> BinaryIO:
        place = {"Bucket": self._bucket, "Key": folder + file.path}
        reader = PieceReader(self._read(place, file, progress))
        return cast(BinaryIO, io.BufferedReader(reader, PIECE_BYTES))

    def _read(self, place: dict[str, str], file: SourceFile, progress: LoadProgress) -> Generator[bytes, None, None]:
        with _as_source_errors():
            yield from read_object(self._client, place, file.tag, file.num_bytes, progress.check)


@contextmanager
def _as_source_errors() -> Iterator[None]:
    try:
        with translated("the models' store"):
            yield
    except S3Error as exc:
        if exc.is_missing or exc.is_precondition:  # the next look-up finds what has become of it
            raise Replaced("it was removed or replaced while it was downloaded") from exc
        raise SourceUnavailable(str(exc)) from exc


def open_s3(settings: ManySettings, setting: str = SOURCE) -> S3Source:
    """Make the source; makes no request. setting: the key that names it, for errors. Raises SettingsError."""
    bucket, prefix = split_url(settings.source)
    if not bucket:
        raise SettingsError(f"{setting} must be s3://bucket/prefix, not {settings.source!r}")
    client = make_client(
        setting,
        settings.connect_timeout_s,
        settings.read_timeout_s,
        connections=settings.num_downloads + 2,
    )
    return S3Source(client, bucket, prefix, settings.max_files)
