"""Objects in S3, or a store that speaks it, by boto3 in threads.

An upload of unknown length is sent in parts, a few in memory at a time; S3 shows the object when the last request has
put the parts together, and not before. Publishing copies within the store: no byte comes here.
Why boto3 and not a library of asyncio: docs/decisions/0021-objects-by-boto3.md.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
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
)
from torchmoor.async_inference.objects.threads import Threads
from torchmoor.config.group import MIB
from torchmoor.config.objects import ObjectSettings

logger = logging.getLogger(__name__)

PIECE_BYTES = MIB


class S3Store(ObjectStore):
    """s3:// URLs. Makes no request before the first object is asked for."""

    def __init__(self, settings: ObjectSettings) -> None:
        self._settings = settings
        self._threads = Threads("objects-s3", settings.max_in_flight)
        self._lock = threading.Lock()
        self._client: Any = None

    def check_input(self, url: str) -> None:
        _parse(url)
        prefixes = self._settings.input_prefixes
        if prefixes and not url.startswith(prefixes):
            raise LocationRefused(
                "inputs are read only from the places that an operator names (objects.input_prefixes)"
            )

    def check_output(self, url: str) -> None:
        _parse(url)

    async def open(self, url: str) -> Download:
        self.check_input(url)
        body = _Body(self._connect, url, self._settings)
        opened = self._threads.submit(body.open)
        try:
            await asyncio.wrap_future(opened)
        except BaseException:
            self._threads.submit(body.close)
            raise
        return Download(body.size, body.content_type, self._read(body), lambda: self._release(body))

    async def _read(self, body: _Body) -> AsyncIterator[bytes]:
        while body.num_left:
            yield await self._threads.run(body.read)

    def _release(self, body: _Body) -> None:
        body.cut()
        self._threads.submit(body.close)

    async def upload(
        self,
        url: str,
        chunks: AsyncIterator[bytes],
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> int:
        self.check_output(url)
        upload = _Upload(self._connect, self._threads, url, _headers(content_type, metadata))
        part: list[bytes] = []
        num_bytes = num_waiting = 0
        try:
            async for chunk in chunks:
                part.append(chunk)
                num_bytes += len(chunk)
                num_waiting += len(chunk)
                if num_bytes > self._settings.max_output_bytes:
                    raise TooLarge(f"the result has more than {self._settings.max_output_bytes} bytes")
                if num_waiting >= self._settings.part_bytes:
                    await upload.send(_take(part), self._settings.parallel_parts)
                    num_waiting = 0
            await upload.finish(_take(part), num_bytes)
        except BaseException:
            self._threads.submit(upload.abort)
            raise
        return num_bytes

    async def put(self, url: str, body: bytes, content_type: str = "") -> None:
        self.check_output(url)
        await self._threads.run(_put, self._connect, url, body, _headers(content_type, None))

    async def publish(self, staged: str, final: str) -> None:
        self.check_output(staged)
        self.check_output(final)
        await self._threads.run(self._publish, staged, final)

    def _publish(self, staged: str, final: str) -> None:
        source, target = _where(staged), _where(final)
        client = self._connect()
        with _translated(staged):
            try:
                client.copy_object(CopySource=source, **target)
            except ClientError as exc:
                if not _is_missing_key(exc):
                    raise
                self._require(client, final, f"neither {staged} nor {final} is there")
                return
            client.delete_object(**source)

    def _require(self, client: Any, url: str, words: str) -> None:
        try:
            client.head_object(**_where(url))
        except ClientError as exc:
            if _status(exc) == 404:
                raise ObjectMissing(words) from exc
            raise

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
        """The client, made by the first who needs it: that reads files, and may ask the machine for credentials."""
        with self._lock:
            if self._client is None:
                with _translated("s3"):
                    self._client = _make_client(self._settings)
            return self._client


class _Body:
    """An object's bytes in order, read from a thread. A connection that breaks is opened again where it stood."""

    def __init__(self, connect: Callable[[], Any], url: str, settings: ObjectSettings) -> None:
        self.size = 0
        self.content_type = ""
        self.num_left = 0
        self._connect = connect
        self._url = url
        self._settings = settings
        self._tag = ""
        self._lock = threading.Lock()  # held by a read
        self._stream: Any = None
        self._is_cut = False

    def open(self) -> None:
        with self._lock, _translated(self._url):
            said = self._connect().get_object(**_where(self._url))
            self._stream = said["Body"]
            self.size = self.num_left = said["ContentLength"]
            self.content_type = said.get("ContentType", "")
            self._tag = said["ETag"]
        if self.size > self._settings.max_input_bytes:
            raise TooLarge(f"{self._url} has {self.size} bytes, more than {self._settings.max_input_bytes}")

    def read(self) -> bytes:
        with self._lock, _translated(self._url):
            for attempt in range(1, self._settings.max_attempts + 1):
                try:
                    if self._stream is None and not self._is_cut:
                        self._stream = self._open_rest()
                    if self._is_cut:  # after the stream is there for `cut` to see, so that neither misses the other
                        break
                    data: bytes = self._stream.read(min(PIECE_BYTES, self.num_left))
                    if data:
                        self.num_left -= len(data)
                        return data
                except (BotoCoreError, HTTPError, OSError):
                    if attempt == self._settings.max_attempts:
                        raise
                self._drop()
        raise ObjectUnavailable(f"{self._url} ended before its last byte")

    def _open_rest(self) -> Any:
        """Of the same object: one that was replaced is answered by an error."""
        start = self.size - self.num_left
        said = self._connect().get_object(**_where(self._url), Range=f"bytes={start}-", IfMatch=self._tag)
        return said["Body"]

    def cut(self) -> None:
        """Wake a thread that waits for bytes. From another thread."""
        self._is_cut = True
        stream = self._stream
        if stream is not None:
            with suppress(Exception):  # it may have ended by itself
                stream._raw_stream.shutdown()

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._stream is not None:
            with suppress(Exception):
                self._stream.close()
            self._stream = None


class _Upload:
    """A multipart upload, begun with the first part; one request if there is no more than one part."""

    def __init__(self, connect: Callable[[], Any], threads: Threads, url: str, headers: dict[str, Any]) -> None:
        self._connect = connect
        self._threads = threads
        self._url = url
        self._headers = headers
        self._lock = threading.Lock()  # held while the upload is begun, put together or taken back
        self._id = ""
        self._parts: deque[Future[str]] = deque()
        self._tags: list[str] = []
        self._is_over = False

    async def send(self, data: bytes, parallel: int) -> None:
        """One more part. Returns when less than `parallel` are on their way."""
        if not self._id:
            await self._threads.run(self._begin)
        number = len(self._tags) + len(self._parts) + 1
        self._parts.append(self._threads.submit(self._send_part, number, data))
        while len(self._parts) >= parallel:
            await self._collect()

    async def finish(self, data: bytes, num_bytes: int) -> None:
        """The last part, which may be small, and the object is there."""
        if not self._id:
            await self._threads.run(_put, self._connect, self._url, data, self._headers)
            return
        if data:
            await self.send(data, 1)
        while self._parts:
            await self._collect()
        await self._threads.run(self._complete, num_bytes)

    async def _collect(self) -> None:
        tag = await asyncio.shield(asyncio.wrap_future(self._parts[0]))
        self._parts.popleft()
        self._tags.append(tag)

    def _begin(self) -> None:
        with self._lock, _translated(self._url):
            if not self._is_over:
                self._id = self._connect().create_multipart_upload(**_where(self._url), **self._headers)["UploadId"]

    def _send_part(self, number: int, data: bytes) -> str:
        with _translated(self._url):
            said = self._connect().upload_part(
                **_where(self._url), UploadId=self._id, PartNumber=number, Body=data, ContentMD5=_md5(data)
            )
        return str(said["ETag"])

    def _complete(self, num_bytes: int) -> None:
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(self._tags, 1)]
        client = self._connect()
        with self._lock, _translated(self._url):
            if self._is_over:
                return
            try:
                client.complete_multipart_upload(
                    **_where(self._url), UploadId=self._id, MultipartUpload={"Parts": parts}
                )
            except ClientError as exc:  # the answer to a first try was lost: is the object there?
                if (
                    _code(exc) != "NoSuchUpload"
                    or client.head_object(**_where(self._url))["ContentLength"] != num_bytes
                ):
                    raise
            self._is_over = True

    def abort(self) -> None:
        """Take back what was sent. Waits for parts on their way, which would come into being afterwards."""
        running = [part for part in self._parts if not part.cancel()]
        wait(running)
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            if self._id:
                try:
                    self._connect().abort_multipart_upload(**_where(self._url), UploadId=self._id)
                except (ClientError, BotoCoreError, ObjectError) as exc:
                    logger.warning(
                        "upload left behind, a lifecycle rule of the bucket should remove it url=%s error=%s",
                        self._url,
                        type(exc).__name__,
                    )


def _take(chunks: list[bytes]) -> bytes:
    """All of them as one, and the list empty: what is sent is in memory once."""
    data = b"".join(chunks)
    chunks.clear()
    return data


def _put(connect: Callable[[], Any], url: str, body: bytes, headers: dict[str, Any]) -> None:
    client = connect()
    with _translated(url):
        client.put_object(**_where(url), Body=body, ContentMD5=_md5(body), **headers)


def _make_client(settings: ObjectSettings) -> Any:
    session = boto3.session.Session()
    if session.get_credentials() is None:  # a client made now would have none for ever
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
            request_checksum_calculation="when_required",  # others that speak S3 do not all know the new ones
            response_checksum_validation="when_required",
        ),
    )
    client.meta.events.register_last("before-call.s3", _send_at_once)
    return client


def _send_at_once(params: Any, **kwargs: Any) -> None:
    """Without asking first whether the body is welcome, as botocore would: that is one more round trip a part."""
    params["headers"].pop("Expect", None)


def _headers(content_type: str, metadata: Mapping[str, str] | None) -> dict[str, Any]:
    headers: dict[str, Any] = {}
    if content_type:
        headers["ContentType"] = content_type
    if metadata:
        headers["Metadata"] = dict(metadata)
    return headers


def _md5(data: bytes) -> str:
    """By which a store knows a body that was cut off or changed on its way."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _parse(url: str) -> tuple[str, str]:
    """Bucket and key, as they are: a URL of S3 quotes nothing."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    if not url.startswith("s3://") or not bucket or not key or not url.isprintable():
        raise LocationRefused("an object's location must be s3://bucket/key")
    if any(part in (".", "..") for part in key.split("/")):
        raise LocationRefused("an object's key must not have /./ or /../ in it: stores disagree on what it means")
    return bucket, key


def _where(url: str) -> dict[str, str]:
    bucket, key = _parse(url)
    return {"Bucket": bucket, "Key": key}


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", "unknown"))


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _is_missing_key(error: ClientError) -> bool:
    return _status(error) == 404 and _code(error) != "NoSuchBucket"


_LATER = {"RequestTimeTooSkewed", "ExpiredToken", "RequestTimeout", "SlowDown"}  # though their status is 4xx


@contextmanager
def _translated(url: str) -> Iterator[None]:
    """The library's errors as ours."""
    try:
        yield
    except ClientError as exc:
        raise _translate(url, exc) from exc
    except NoCredentialsError as exc:
        raise ObjectDenied(f"{url}: there are no AWS credentials on this machine") from exc
    except ParamValidationError as exc:
        raise LocationRefused(f"{url} is no valid bucket and key") from exc
    except (BotoCoreError, HTTPError, OSError) as exc:
        logger.warning("object store failed url=%s error=%s", url, type(exc).__name__)
        raise ObjectUnavailable(f"{url}: the store cannot be reached ({type(exc).__name__})") from exc


def _translate(url: str, error: ClientError) -> ObjectError:
    code, status = _code(error), _status(error)
    if status >= 500 or status == 429 or code in _LATER:
        logger.warning("object store failed url=%s status=%s code=%s", url, status, code)
        return ObjectUnavailable(f"{url}: the store cannot serve it now ({code})")
    if code == "NoSuchBucket":
        return ObjectMissing(f"there is no bucket {_parse(url)[0]}")
    if status == 404:
        return ObjectMissing(f"there is no {url}")
    if status == 412:
        return ObjectUnavailable(f"{url} was replaced while it was read")
    if status in (301, 307):
        return LocationRefused(f"{url} is in another region than the one that this endpoint uses")
    return ObjectDenied(f"{url}: the store refused {error.operation_name} ({code})")
