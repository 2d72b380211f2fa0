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

from handlers.chat.checks import check_unicode
from handlers.chat.images.decoding_budget import DecodingBudget
from handlers.chat.images.image_decoding import scale_down
from handlers.errors import ImageTooLarge, ImageUnreachable, ImageUrlForbidden, OutOfDisk
from handlers.requests.reply import PendingReply
from handlers.s3 import S3Error, make_client, read_object, translated
from handlers.settings.intake import IntakeSettings

WAIT_S = 0.2  # between two checks whether a waiting request is cancelled


class S3Images:
    """Reads images with AWS's usual configuration. Any thread. Raises SettingsError if that is invalid."""

    def __init__(self, settings: IntakeSettings, decoding: DecodingBudget) -> None:
        self._settings = settings
        self._decoding = decoding
        self._allowed = tuple(f"{allowed.removeprefix('s3://').strip('/')}/" for allowed in settings.allowed_buckets)
        self._scaling = threading.Lock()
        self._client = make_client(
            "handler.intake.allowed_buckets",
            settings.connect_timeout_s,
            settings.read_timeout_s,
            connections=settings.num_threads,
        )

    def read(self, url: str, reply: PendingReply, held_bytes: int = 0) -> bytes:
        """Read an image, scaled down to at most `max_bytes`.

        held_bytes: as for `DecodingBudget.lease`. Raises the BadImage family, OutOfMemory, OutOfDisk, and the reason
        for which the reply was cancelled.
        """
        transfer, is_small = self._find(url, reply)
        if is_small:
            return b"".join(transfer.pieces())
        with self._turn(transfer), tempfile.TemporaryFile(prefix="torchmoor-image-") as file:
            _save(transfer, file)
            return scale_down(file, self._settings, self._decoding, transfer.check, held_bytes)

    def read_small(self, url: str, reply: PendingReply) -> bytes | None:
        """Read an image as `read` does; None for one that must be scaled down."""
        transfer, is_small = self._find(url, reply)
        return b"".join(transfer.pieces()) if is_small else None

    def _find(self, url: str, reply: PendingReply) -> "tuple[Transfer, bool]":
        """Return the transfer of an image, and whether the image has at most `max_bytes`."""
        place = self._place(url)
        transfer = Transfer(self._client, place, time.monotonic() + self._settings.s3_timeout_s, reply)
        size = transfer.find_size()
        if size > self._settings.large_bytes:
            raise ImageTooLarge(f"the image has {size} bytes, more than {self._settings.large_bytes}")
        return transfer, size <= self._settings.max_bytes

    def _place(self, url: str) -> dict[str, str]:
        bucket, _, key = url[len("s3://") :].partition("/")
        if not bucket or not key:
            raise ImageUrlForbidden("an image address in S3 must be s3://bucket/key")
        if not {".", ".."}.isdisjoint(key.split("/")):  # some stores resolve them, perhaps to another bucket
            raise ImageUrlForbidden("the key of an image in S3 must not have the parts . and ..")
        check_unicode(key, "the key of an image in S3", None)
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

    def __init__(self, client: Any, place: dict[str, str], deadline: float, reply: PendingReply) -> None:
        self._client = client
        self._place = place
        self._deadline = deadline
        self._reply = reply
        self._tag = ""
        self._size = 0

    def check(self) -> None:
        """Raise ImageUnreachable after the deadline, or the reason for which the reply was cancelled."""
        self._reply.raise_if_cancelled()
        if time.monotonic() > self._deadline:
            raise ImageUnreachable("the image did not arrive in time")

    def find_size(self) -> int:
        with _as_image_errors():
            head = self._client.head_object(**self._place)
        self._tag, self._size = head["ETag"], head["ContentLength"]
        return self._size

    def pieces(self) -> Iterator[bytes]:
        with _as_image_errors():
            yield from read_object(self._client, self._place, self._tag, self._size, self.check)


def _save(transfer: Transfer, file: BinaryIO) -> None:
    try:
        for data in transfer.pieces():
            file.write(data)
        file.seek(0)
    except OSError as exc:
        raise OutOfDisk(f"the image cannot be stored while it is read: {exc.strerror}") from exc


@contextmanager
def _as_image_errors() -> Iterator[None]:
    """Translate S3's errors to errors of images."""
    try:
        with translated("the image's store"):
            yield
    except S3Error as exc:
        if not exc.code:
            raise ImageUnreachable(str(exc)) from exc
        reason = exc.code
        if exc.is_missing:
            reason = "there is no such object"
        elif exc.is_precondition:
            reason = "it was replaced while it was read"
        elif exc.code == "403":
            reason = "access is denied"
        raise ImageUnreachable(f"the image cannot be read from S3: {reason}") from exc
