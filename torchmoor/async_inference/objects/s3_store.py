"""Objects in S3 or a compatible store, through boto3 in threads.

An upload of unknown length is a multipart upload with a few parts in memory; S3 shows the object only when the upload
is completed. Publishing copies within the store, so that no byte passes through this process. Conditional writes
(If-None-Match) keep it from replacing another object; a tag in an object's metadata tells its own copy from others.
docs/decisions/0021-objects-by-boto3.md explains why boto3 is used.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from functools import partial
from typing import Any
from uuid import uuid4

from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from torchmoor.async_inference.objects.object_store import (
    NO_METADATA,
    Download,
    LocationRefused,
    ObjectConflict,
    ObjectDenied,
    ObjectError,
    ObjectMetadata,
    ObjectMissing,
    ObjectStore,
    ObjectTooLarge,
    ObjectUnavailable,
    check_output_bytes,
    join_chunks,
)
from torchmoor.async_inference.objects.s3_client import (
    bucket_and_key,
    code_of,
    find_head,
    make_client,
    status_of,
    translated,
)
from torchmoor.async_inference.objects.threads import Threads
from torchmoor.config.group import MIB
from torchmoor.config.objects import ObjectSettings

logger = logging.getLogger(__name__)

TAG = "torchmoor-tag"  # metadata of staged objects, which copies keep


class S3Store(ObjectStore):
    """Serves s3:// URLs. Makes no request before the first object is used."""

    def __init__(self, settings: ObjectSettings) -> None:
        self._settings = settings
        self._threads = Threads("objects-s3", settings.max_in_flight)
        self._lock = threading.Lock()
        self._client: Any = None
        self._undeletable: set[str] = set()  # buckets that were reported for this

    def check_input(self, url: str) -> None:
        bucket_and_key(url)
        prefixes = self._settings.input_prefixes
        if prefixes and not url.startswith(prefixes):
            raise LocationRefused(
                "inputs are read only from the places that an operator names (objects.input_prefixes)"
            )

    def check_output(self, url: str) -> None:
        bucket_and_key(url)

    async def open(self, url: str) -> Download:
        self.check_input(url)
        reader = _ObjectReader(self._connect, url, self._settings)
        opened = self._threads.submit(reader.open)
        try:
            await asyncio.wrap_future(opened)
        except BaseException:
            self._threads.submit(reader.close)
            raise

        def release() -> None:
            reader.interrupt()
            self._threads.submit(reader.close)

        return Download(reader.size, reader.metadata, self._read(reader), release)

    async def _read(self, reader: _ObjectReader) -> AsyncIterator[bytes]:
        while reader.num_left:
            yield await self._threads.run(reader.read)

    async def is_taken(self, url: str) -> bool:
        self.check_output(url)
        return await self._threads.run(self._is_taken, url)

    def _is_taken(self, url: str) -> bool:
        client = self._connect()
        with translated(url):
            return find_head(client, url) is not None

    async def find_shortage(self, url: str) -> str | None:
        return None

    async def sweep(self) -> int:
        return 0  # a lifecycle rule of the bucket does it

    async def upload(self, url: str, chunks: AsyncIterator[bytes], metadata: ObjectMetadata = NO_METADATA) -> str:
        self.check_output(url)
        tag = uuid4().hex
        upload = _MultipartUpload(self._connect, self._threads, url, _headers(metadata) | {"Metadata": {TAG: tag}})
        part_bytes, num_bytes = self._settings.part_bytes, 0
        try:
            async for part in join_chunks(chunks, part_bytes, self._settings.max_output_bytes):
                num_bytes += len(part)
                if len(part) >= part_bytes:
                    await upload.send(part, self._settings.parallel_parts)
                else:
                    await upload.finish(part, num_bytes)
        except BaseException:
            self._threads.submit(upload.abort)
            raise
        return tag

    async def put(self, url: str, body: bytes, metadata: ObjectMetadata = NO_METADATA) -> None:
        self.check_output(url)
        check_output_bytes(len(body), self._settings.max_output_bytes)
        await self._threads.run(self._put, url, body, metadata)

    def _put(self, url: str, body: bytes, metadata: ObjectMetadata) -> None:
        client = self._connect()
        with translated(url):
            try:
                client.put_object(**_object(url, body), **_headers(metadata), IfNoneMatch="*")
            except ClientError as error:
                found = find_head(client, url) if status_of(error) == 412 else None
                if found is None:
                    raise
                if found["ContentLength"] != len(body) or _read(client, url) != body:
                    raise ObjectConflict(url) from None

    async def publish(self, staged: str, tag: str, final: str) -> None:
        await self._threads.run(self._publish, staged, tag, final)

    def _publish(self, staged: str, tag: str, final: str) -> None:
        source, target = bucket_and_key(staged), bucket_and_key(final)
        client = self._connect()
        with translated(staged):
            try:
                client.copy_object(CopySource=source, **target, IfNoneMatch="*")
            except ClientError as error:
                if status_of(error) not in (404, 412) or code_of(error) == "NoSuchBucket":
                    raise
                found = find_head(client, final)
                if found is None and status_of(error) == 404:
                    raise ObjectMissing(f"neither {staged} nor {final} is there") from error
                if found is None:  # removed since
                    raise
                if found["Metadata"].get(TAG) != tag:
                    raise ObjectConflict(final) from None

    async def delete(self, url: str) -> None:
        """Remove an object. Without the right to, it stays, and the log says so once for its bucket."""
        self.check_output(url)
        await self._threads.run(self._delete, url)

    async def delete_all(self, prefix: str) -> None:
        """Remove the objects whose names begin like this; needs s3:ListBucket, too."""
        self.check_output(prefix)
        await self._threads.run(partial(self._delete, prefix, is_prefix=True))

    def _delete(self, url: str, *, is_prefix: bool = False) -> None:
        client, place = self._connect(), bucket_and_key(url)
        try:
            with translated(url):
                for key in _list_keys(client, place) if is_prefix else [place["Key"]]:
                    client.delete_object(Bucket=place["Bucket"], Key=key)
        except ObjectDenied as error:
            if place["Bucket"] not in self._undeletable:
                self._undeletable.add(place["Bucket"])
                right = "s3:ListBucket or s3:DeleteObject" if is_prefix else "s3:DeleteObject"
                logger.warning("staged objects stay, %s is refused url=%s error=%s", right, url, error)

    async def close(self) -> None:
        await self._threads.close()
        if self._client is not None:
            self._client.close()

    def _connect(self) -> Any:
        """Return the client. The first call makes it, which reads files and may query the machine for credentials."""
        with self._lock:
            if self._client is None:
                with translated("s3"):
                    self._client = make_client(self._settings)
            return self._client


class _ObjectReader:
    """Reads an object in order, from one thread at a time. Resumes where a connection broke."""

    def __init__(self, connect: Callable[[], Any], url: str, settings: ObjectSettings) -> None:
        self.size = 0
        self.metadata = NO_METADATA
        self.num_left = 0
        self._connect = connect
        self._url = url
        self._settings = settings
        self._tag = ""
        self._lock = threading.Lock()  # held during a read
        self._stream: Any = None
        self._is_interrupted = False

    def open(self) -> None:
        with self._lock, translated(self._url):
            found = self._connect().get_object(**bucket_and_key(self._url))
            self._stream = found["Body"]
            self.size = self.num_left = found["ContentLength"]
            self.metadata = ObjectMetadata(found.get("ContentType", ""))
            self._tag = found["ETag"]
        if self.size > self._settings.max_input_bytes:
            raise ObjectTooLarge(f"{self._url} has {self.size} bytes, more than {self._settings.max_input_bytes}")

    def read(self) -> bytes:
        with self._lock, translated(self._url):
            for attempt in range(1, self._settings.max_attempts + 1):
                try:
                    if self._stream is None and not self._is_interrupted:
                        self._stream = self._open_rest()
                    if self._is_interrupted:  # checked after `interrupt` can see the stream, so that one sees the other
                        break
                    data: bytes = self._stream.read(min(MIB, self.num_left))
                    if data:
                        self.num_left -= len(data)
                        return data
                except (BotoCoreError, HTTPError, OSError):
                    if attempt == self._settings.max_attempts:
                        raise
                self._drop()
        raise ObjectUnavailable(f"{self._url} ended before its last byte")

    def _open_rest(self) -> Any:
        """Open the rest of the same object; fails if the object was replaced meanwhile."""
        start = self.size - self.num_left
        found = self._connect().get_object(**bucket_and_key(self._url), Range=f"bytes={start}-", IfMatch=self._tag)
        return found["Body"]

    def interrupt(self) -> None:
        """Wake a thread that waits for bytes. Called from another thread."""
        self._is_interrupted = True
        stream = self._stream
        if stream is not None:
            with suppress(Exception):  # the stream may have ended
                stream._raw_stream.shutdown()

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._stream is not None:
            with suppress(Exception):
                self._stream.close()
            self._stream = None


class _MultipartUpload:
    """An upload that begins with its first full part; an object of at most one part is one plain request."""

    def __init__(self, connect: Callable[[], Any], threads: Threads, url: str, headers: dict[str, Any]) -> None:
        self._connect = connect
        self._threads = threads
        self._url = url
        self._headers = headers
        self._begun: Future[str] | None = None  # the upload's id
        self._parts: list[Future[str]] = []  # their tags
        self._completed: Future[None] | None = None  # the request that makes the object visible

    async def send(self, data: bytes, parallel: int) -> None:
        """Send one more part. Returns when fewer than `parallel` parts are in flight."""
        if self._begun is None:
            self._begun = self._threads.submit(self._begin)
        upload_id = await asyncio.wrap_future(self._begun)
        self._parts.append(self._threads.submit(self._send_part, upload_id, len(self._parts) + 1, data))
        if len(self._parts) >= parallel:
            await asyncio.wrap_future(self._parts[-parallel])

    async def finish(self, data: bytes, num_bytes: int) -> None:
        """Send the last part, of any size, and make the object visible."""
        if self._begun is None:
            self._completed = self._threads.submit(self._put, data)
        else:
            if data:
                await self.send(data, 1)
            tags = [await asyncio.wrap_future(part) for part in self._parts]
            upload_id = await asyncio.wrap_future(self._begun)
            self._completed = self._threads.submit(self._complete, upload_id, tags, num_bytes)
        await asyncio.wrap_future(self._completed)

    def _put(self, data: bytes) -> None:
        client = self._connect()
        with translated(self._url):
            client.put_object(**_object(self._url, data), **self._headers)

    def _begin(self) -> str:
        client = self._connect()
        with translated(self._url):
            begun = client.create_multipart_upload(**bucket_and_key(self._url), **self._headers)
        return str(begun["UploadId"])

    def _send_part(self, upload_id: str, number: int, data: bytes) -> str:
        with translated(self._url):
            sent = self._connect().upload_part(
                **bucket_and_key(self._url), UploadId=upload_id, PartNumber=number, Body=data, ContentMD5=_md5(data)
            )
        return str(sent["ETag"])

    def _complete(self, upload_id: str, tags: list[str], num_bytes: int) -> None:
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
        client, where = self._connect(), bucket_and_key(self._url)
        with translated(self._url):
            try:
                client.complete_multipart_upload(**where, UploadId=upload_id, MultipartUpload={"Parts": parts})
            except ClientError as exc:  # the answer to an earlier try was lost: does the object exist?
                if code_of(exc) != "NoSuchUpload" or client.head_object(**where)["ContentLength"] != num_bytes:
                    raise

    def abort(self) -> None:
        """Abort the upload, or remove its object. Waits for requests in flight, which would create them later."""
        steps: list[Future[Any] | None] = [self._begun, *self._parts, self._completed]
        wait([step for step in steps if step is not None and not step.cancel()])
        try:
            client, where = self._connect(), bucket_and_key(self._url)
            if _has_succeeded(self._completed):
                client.delete_object(**where)
            elif self._begun is not None and _has_succeeded(self._begun):
                client.abort_multipart_upload(**where, UploadId=self._begun.result())
        except (ClientError, BotoCoreError, ObjectError) as exc:
            logger.warning(
                "upload not aborted, a lifecycle rule of the bucket should remove it url=%s error=%s",
                self._url,
                type(exc).__name__,
            )


def _list_keys(client: Any, place: dict[str, str]) -> list[str]:
    """Return the keys that begin with the key of a place."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=place["Bucket"], Prefix=place["Key"])
    return [each["Key"] for page in pages for each in page.get("Contents", ())]


def _has_succeeded(step: Future[Any] | None) -> bool:
    return step is not None and not step.cancelled() and step.exception() is None


def _object(url: str, body: bytes) -> dict[str, Any]:
    return {**bucket_and_key(url), "Body": body, "ContentMD5": _md5(body)}


def _read(client: Any, url: str) -> bytes:
    """Read a small object."""
    with closing(client.get_object(**bucket_and_key(url))["Body"]) as stream:
        return bytes(stream.read())


def _headers(metadata: ObjectMetadata) -> dict[str, Any]:
    return {"ContentType": metadata.content_type} if metadata.content_type else {}


def _md5(data: bytes) -> str:
    """Return the checksum by which the store detects a truncated or changed body."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
