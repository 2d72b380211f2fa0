"""Images from allowed buckets in S3 or a compatible store, up to hundreds of MB.

A small image is read into memory. A large image is written to a temporary file and scaled down from there, one at a
time, so that disk and memory are used for one image only.
"""

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from handlers.chat.pictures.image_decoding import scale_down
from handlers.errors import ConfigError, ImageTooLarge, ImageUnreachable, ImageUrlForbidden, OutOfDisk
from handlers.reply import Reply
from handlers.settings import IntakeSettings

try:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
    from urllib3.exceptions import HTTPError
except ImportError as exc:
    raise ConfigError("images in S3 need boto3: pip install boto3") from exc

MAX_ATTEMPTS = 3  # of a request, and of the rest of a body whose connection broke
PIECE_BYTES = 1 << 20
_WORDS = {
    "404": "there is no such object",
    "NoSuchKey": "there is no such object",
    "403": "access is denied",
    "PreconditionFailed": "it was replaced while it was read",
}
WAIT_S = 0.2  # between two checks whether a waiting request is cancelled


class S3Images:
    """Reads images with AWS's usual configuration. Any thread. Raises ConfigError if that is invalid."""

    def __init__(self, settings: IntakeSettings) -> None:
        self._settings = settings
        self._allowed = tuple(f"{allowed.removeprefix('s3://').strip('/')}/" for allowed in settings.allowed_buckets)
        self._scaling = threading.Lock()
        try:
            self._client = boto3.session.Session().client(
                "s3",
                config=Config(
                    connect_timeout=settings.connect_timeout_s,
                    read_timeout=settings.read_timeout_s,
                    retries={"mode": "standard", "total_max_attempts": MAX_ATTEMPTS},
                    max_pool_connections=settings.num_threads,
                    response_checksum_validation="when_required",  # others that speak S3 do not all know the new ones
                ),
            )
        except BotoCoreError as exc:
            raise ConfigError(f"handler.intake.allowed_buckets: {exc}") from exc

    def read(self, url: str, reply: Reply | None) -> bytes:
        """Read an image, scaled down to at most `max_bytes`.

        Raises the BadImage family, OutOfMemory, OutOfDisk, and the reason for which the reply was cancelled.
        """
        place = self._place(url)
        transfer = Transfer(self._client, place, time.monotonic() + self._settings.s3_timeout_s, reply)
        size = transfer.find_size()
        if size > self._settings.large_bytes:
            raise ImageTooLarge(f"the image has {size} bytes, more than {self._settings.large_bytes}")
        if size <= self._settings.max_bytes:
            return b"".join(transfer.pieces())
        with self._turn(transfer), tempfile.TemporaryFile(prefix="torchmoor-image-") as file:
            _save(transfer, file)
            return scale_down(file, self._settings)

    def _place(self, url: str) -> dict[str, str]:
        bucket, _, key = url[len("s3://") :].partition("/")
        if not bucket or not key:
            raise ImageUrlForbidden("an image address in S3 must be s3://bucket/key")
        if not f"{bucket}/{key}".startswith(self._allowed):
            raise ImageUrlForbidden(
                f"this worker reads no such images from the bucket {bucket[:63]!r}; "
                "an operator can allow it with handler.intake.allowed_buckets"
            )
        return {"Bucket": bucket, "Key": key}

    @contextmanager
    def _turn(self, transfer: "Transfer") -> Iterator[None]:
        while not self._scaling.acquire(timeout=WAIT_S):
            transfer.check()
        try:
            yield
        finally:
            self._scaling.release()


class Transfer:
    """Reads one object in order. Resumes after a broken connection if the object is unchanged."""

    def __init__(self, client: Any, place: dict[str, str], deadline: float, reply: Reply | None) -> None:
        self._client = client
        self._place = place
        self._deadline = deadline
        self._reply = reply
        self._tag = ""
        self._size = 0

    def check(self) -> None:
        """Raise ImageUnreachable after the deadline, or the reason for which the reply was cancelled."""
        if self._reply is not None:
            self._reply.raise_if_cancelled()
        if time.monotonic() > self._deadline:
            raise ImageUnreachable("the image did not arrive in time")

    def find_size(self) -> int:
        with _translated():
            said = self._client.head_object(**self._place)
        self._tag, self._size = said["ETag"], said["ContentLength"]
        return self._size

    def pieces(self) -> Iterator[bytes]:
        at, num_failures = 0, 0
        with _translated():
            while at < self._size:
                try:
                    said = self._client.get_object(**self._place, IfMatch=self._tag, Range=f"bytes={at}-")
                    with said["Body"] as body:
                        while data := body.read(PIECE_BYTES):
                            self.check()
                            at += len(data)
                            yield data
                    if at < self._size:
                        raise HTTPClientError(error="the body ended early")
                except (BotoCoreError, HTTPError):
                    num_failures += 1
                    if num_failures == MAX_ATTEMPTS:
                        raise
                self.check()


def _save(transfer: Transfer, file: BinaryIO) -> None:
    try:
        for data in transfer.pieces():
            file.write(data)
        file.seek(0)
    except OSError as exc:
        raise OutOfDisk(f"the image cannot be stored while it is read: {exc.strerror}") from exc


@contextmanager
def _translated() -> Iterator[None]:
    """Translate the library's errors."""
    try:
        yield
    except ClientError as exc:
        code = exc.response.get("Error", {}).get("Code", "unknown")
        raise ImageUnreachable(f"the image cannot be read from S3: {_WORDS.get(code, code)}") from exc
    except (BotoCoreError, HTTPError) as exc:
        raise ImageUnreachable(f"the image's store cannot be reached ({type(exc).__name__})") from exc
