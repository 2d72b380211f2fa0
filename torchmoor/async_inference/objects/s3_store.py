"""Objects in S3 or a compatible store, through boto3 in threads.

An upload of unknown length is a multipart upload with a few parts in memory; S3 shows the object only when the upload
is completed. Publishing copies within the store, so that no byte passes through this process.
docs/decisions/0021-objects-by-boto3.md explains why boto3 is used.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ParamValidationError
from urllib3.exceptions import HTTPError

from torchmoor.async_inference.objects.object_store import (
    Download,
    LocationRefused,
    ObjectDenied,
    ObjectError,
    ObjectMissing,
    ObjectStore,
    ObjectUnavailable,
    TooLarge,
    join_chunks,
)
from torchmoor.async_inference.objects.threads import Threads
from torchmoor.config.group import MIB
from torchmoor.config.objects import ObjectSettings

logger = logging.getLogger(__name__)

RETRYABLE_CODES = {"RequestTimeTooSkewed", "ExpiredToken", "RequestTimeout", "SlowDown"}  # despite their status of 4xx


class S3Store(ObjectStore):
    """Serves s3:// URLs. Makes no request before the first object is used."""

    def __init__(self, settings: ObjectSettings) -> None:
        self._settings = settings
        self._threads = Threads("objects-s3", settings.max_in_flight)
        self._lock = threading.Lock()
        self._client: Any = None

    def check_input(self, url: str) -> None:
        _where(url)
        prefixes = self._settings.input_prefixes
        if prefixes and not url.startswith(prefixes):
            raise LocationRefused(
                "inputs are read only from the places that an operator names (objects.input_prefixes)"
            )

    def check_output(self, url: str) -> None:
        _where(url)

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

        return Download(reader.size, reader.content_type, self._read(reader), release)

    async def _read(self, reader: _ObjectReader) -> AsyncIterator[bytes]:
        while reader.num_left:
            yield await self._threads.run(reader.read)

    async def upload(self, url: str, chunks: AsyncIterator[bytes], content_type: str = "") -> int:
        self.check_output(url)
        upload = _MultipartUpload(self._connect, self._threads, url, content_type)
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
        return num_bytes

    async def put(self, url: str, body: bytes, content_type: str = "") -> None:
        self.check_output(url)
        await self._threads.run(_put, self._connect, url, body, content_type)

    async def publish(self, staged: str, final: str) -> None:
        await self._threads.run(self._publish, staged, final)

    def _publish(self, staged: str, final: str) -> None:
        source, target = _where(staged), _where(final)
        client = self._connect()
        with _translated(staged):
            try:
                client.copy_object(CopySource=source, **target)
            except ClientError as error:
                if _status(error) != 404 or _code(error) == "NoSuchBucket":
                    raise
                try:
                    client.head_object(**target)
                except ClientError as exc:
                    if _status(exc) == 404:
                        raise ObjectMissing(f"neither {staged} nor {final} is there") from exc
                    raise
            else:
                client.delete_object(**source)

    async def delete(self, url: str) -> None:
        self.check_output(url)
        await self._threads.run(self._delete, url)

    def _delete(self, url: str) -> None:
        client = self._connect()
        with _translated(url):
            client.delete_object(**_where(url))

    async def close(self) -> None:
        await self._threads.close()
        if self._client is not None:
            self._client.close()

    def _connect(self) -> Any:
        """Return the client. The first call makes it, which reads files and may query the machine for credentials."""
        with self._lock:
            if self._client is None:
                with _translated("s3"):
                    self._client = _make_client(self._settings)
            return self._client


class _ObjectReader:
    """Reads an object in order, from one thread at a time. Resumes where a connection broke."""

    def __init__(self, connect: Callable[[], Any], url: str, settings: ObjectSettings) -> None:
        self.size = 0
        self.content_type = ""
        self.num_left = 0
        self._connect = connect
        self._url = url
        self._settings = settings
        self._tag = ""
        self._lock = threading.Lock()  # held during a read
        self._stream: Any = None
        self._is_interrupted = False

    def open(self) -> None:
        with self._lock, _translated(self._url):
            found = self._connect().get_object(**_where(self._url))
            self._stream = found["Body"]
            self.size = self.num_left = found["ContentLength"]
            self.content_type = found.get("ContentType", "")
            self._tag = found["ETag"]
        if self.size > self._settings.max_input_bytes:
            raise TooLarge(f"{self._url} has {self.size} bytes, more than {self._settings.max_input_bytes}")

    def read(self) -> bytes:
        with self._lock, _translated(self._url):
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
        found = self._connect().get_object(**_where(self._url), Range=f"bytes={start}-", IfMatch=self._tag)
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

    def __init__(self, connect: Callable[[], Any], threads: Threads, url: str, content_type: str) -> None:
        self._connect = connect
        self._threads = threads
        self._url = url
        self._content_type = content_type
        self._begun: Future[str] | None = None  # the upload's id
        self._parts: list[Future[str]] = []  # their tags
        self._completed: Future[None] | None = None

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
            await self._threads.run(_put, self._connect, self._url, data, self._content_type)
            return
        if data:
            await self.send(data, 1)
        tags = [await asyncio.wrap_future(part) for part in self._parts]
        self._completed = self._threads.submit(self._complete, await asyncio.wrap_future(self._begun), tags, num_bytes)
        await asyncio.wrap_future(self._completed)

    def _begin(self) -> str:
        client = self._connect()
        with _translated(self._url):
            begun = client.create_multipart_upload(**_where(self._url), **_headers(self._content_type))
        return str(begun["UploadId"])

    def _send_part(self, upload_id: str, number: int, data: bytes) -> str:
        with _translated(self._url):
            sent = self._connect().upload_part(
                **_where(self._url), UploadId=upload_id, PartNumber=number, Body=data, ContentMD5=_md5(data)
            )
        return str(sent["ETag"])

    def _complete(self, upload_id: str, tags: list[str], num_bytes: int) -> None:
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
        client, where = self._connect(), _where(self._url)
        with _translated(self._url):
            try:
                client.complete_multipart_upload(**where, UploadId=upload_id, MultipartUpload={"Parts": parts})
            except ClientError as exc:  # the answer to an earlier try was lost: does the object exist?
                if _code(exc) != "NoSuchUpload" or client.head_object(**where)["ContentLength"] != num_bytes:
                    raise

    def abort(self) -> None:
        """Abort the upload unless it is complete. Waits for requests in flight, which would create parts later."""
        steps: list[Future[Any] | None] = [self._begun, *self._parts, self._completed]
        wait([step for step in steps if step is not None and not step.cancel()])
        if self._begun is None or not _has_succeeded(self._begun):
            return
        if self._completed is not None and _has_succeeded(self._completed):
            return
        try:
            self._connect().abort_multipart_upload(**_where(self._url), UploadId=self._begun.result())
        except (ClientError, BotoCoreError, ObjectError) as exc:
            logger.warning(
                "upload not aborted, a lifecycle rule of the bucket should remove it url=%s error=%s",
                self._url,
                type(exc).__name__,
            )


def _has_succeeded(step: Future[Any]) -> bool:
    return not step.cancelled() and step.exception() is None


def _put(connect: Callable[[], Any], url: str, body: bytes, content_type: str) -> None:
    client = connect()
    with _translated(url):
        client.put_object(**_where(url), Body=body, ContentMD5=_md5(body), **_headers(content_type))


def _headers(content_type: str) -> dict[str, str]:
    return {"ContentType": content_type} if content_type else {}


def _md5(data: bytes) -> str:
    """Return the checksum by which the store detects a truncated or changed body."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _make_client(settings: ObjectSettings) -> Any:
    session = boto3.session.Session()
    if session.get_credentials() is None:  # the client would never look for them again
        raise NoCredentialsError
    client = session.client(
        "s3",
        endpoint_url=settings.s3_endpoint_url or None,
        region_name=settings.s3_region or None,
        config=Config(
            connect_timeout=settings.connect_timeout_s,
            read_timeout=settings.read_timeout_s,
            retries={"mode": "standard", "total_max_attempts": settings.max_attempts},
            max_pool_connections=settings.max_in_flight,
            request_checksum_calculation="when_required",  # some compatible stores reject the newer checksums
            response_checksum_validation="when_required",
        ),
    )
    client.meta.events.register_last("before-call.s3", _drop_expect)
    return client


def _drop_expect(params: Any, **kwargs: Any) -> None:
    """Remove `Expect: 100-continue`, which costs one more round trip per part."""
    params["headers"].pop("Expect", None)


def _where(url: str) -> dict[str, str]:
    """Return bucket and key, unquoted: an s3:// URL escapes nothing. Raises LocationRefused."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    if not url.startswith("s3://") or not bucket or not key or not url.isprintable():
        raise LocationRefused("an object's location must be s3://bucket/key")
    if any(part in (".", "..") for part in key.split("/")):
        raise LocationRefused("an object's key must not have /./ or /../ in it: stores disagree on what it means")
    return {"Bucket": bucket, "Key": key}


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", "unknown"))


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


@contextmanager
def _translated(url: str) -> Iterator[None]:
    """Raise boto3's errors as ObjectError."""
    try:
        yield
    except ClientError as exc:
        raise _translate(url, exc) from exc
    except NoCredentialsError as exc:
        raise ObjectDenied(f"{url}: there are no AWS credentials on this machine") from exc
    except ParamValidationError as exc:
        raise LocationRefused(f"{url} is no valid bucket and key") from exc  # prose: allow
    except (BotoCoreError, HTTPError, OSError) as exc:
        logger.warning("object store failed url=%s error=%s", url, type(exc).__name__)
        raise ObjectUnavailable(f"{url}: the store cannot be reached ({type(exc).__name__})") from exc


def _translate(url: str, error: ClientError) -> ObjectError:
    code, status = _code(error), _status(error)
    if status >= 500 or status == 429 or code in RETRYABLE_CODES:
        logger.warning("object store failed url=%s status=%s code=%s", url, status, code)
        return ObjectUnavailable(f"{url}: the store cannot serve it now ({code})")
    if code == "NoSuchBucket":
        return ObjectMissing(f"there is no bucket {_where(url)['Bucket']}")
    if status == 404:
        return ObjectMissing(f"there is no {url}")
    if status == 412:
        return ObjectUnavailable(f"{url} was replaced while it was read")
    if status in (301, 307):
        return LocationRefused(f"{url} is in another region than the one that this endpoint uses")
    return ObjectDenied(f"{url}: the store refused {error.operation_name} ({code})")
