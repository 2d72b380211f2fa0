"""The loader of images: reads every kind of reference.

A reference is raw bytes, a data URL, base64 text, or an address: http(s), which http.py fetches, or s3:// in an allowed
bucket, which s3.py fetches. The limits on pixels are in image_decoding.py.
"""

import base64
import binascii
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from PIL import Image

from handlers.chat.images import image_decoding
from handlers.chat.images.decoding_budget import DecodingBudget
from handlers.chat.images.http import HttpImages, Resolver
from handlers.chat.images.schemes import DATA, HTTP, S3, SCHEMES, find_scheme
from handlers.chat.messages import ImageReference, KeptImage
from handlers.errors import ImageTooLarge, ImageUrlForbidden, NotAnImage
from handlers.requests.incoming import refuse_other_media
from handlers.requests.reply import PendingReply
from handlers.settings.intake import IntakeSettings
from torchmoor.wire.public_addresses import resolve

if TYPE_CHECKING:
    from handlers.chat.images.s3 import S3Images


class ImageLoader:
    """Reads and decodes images within limits. Safe to call from several threads."""

    def __init__(
        self, settings: IntakeSettings, resolver: Resolver = resolve, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._http = HttpImages(settings, resolver, clock)
        self._lock = threading.Lock()
        self._s3: S3Images | None = None
        self.decoding = DecodingBudget(settings.decoding_bytes, settings.decoding_timeout_s)

    def read(self, reference: ImageReference, reply: PendingReply, held_bytes: int = 0) -> bytes:
        """Return the encoded bytes, at most `max_bytes`. If the reply is cancelled, a running fetch ends.

        held_bytes: as for `DecodingBudget.lease`, since a large image from S3 is scaled down.
        """
        if isinstance(reference, KeptImage):
            return self._within_limit(reference.read())
        if isinstance(reference, bytes | bytearray):
            return self._within_limit(bytes(reference))
        text = reference.strip()
        scheme = find_scheme(text)
        if scheme == DATA:
            return self._within_limit(_decode_data_url(text, self._settings.max_bytes))
        if scheme in HTTP:
            return self._http.read(text, reply)
        if scheme == S3:
            return self._open_s3().read(text, reply, held_bytes)
        if scheme:
            raise ImageUrlForbidden(f"an image address must be {SCHEMES}, not {scheme[:20]}")
        if len(text) > self._settings.max_bytes * 4 // 3 + 4:
            raise ImageTooLarge(f"the image is larger than {self._settings.max_bytes} bytes")
        return self._within_limit(_decode_base64(text))

    def read_early(self, address: str, reply: PendingReply) -> bytes | None:
        """Fetch an image while its request reads others. Return None for one from S3 that must be scaled down."""
        text = address.strip()
        return self._open_s3().read_small(text, reply) if find_scheme(text) == S3 else self.read(text, reply)

    def _within_limit(self, data: bytes) -> bytes:
        if len(data) > self._settings.max_bytes:
            raise ImageTooLarge(f"the image has {len(data)} bytes, more than {self._settings.max_bytes}")
        return data

    def decoded(
        self, data: bytes, check: Callable[[], None], side: int | None = None, held_bytes: int = 0
    ) -> AbstractContextManager[Image.Image]:
        """Decode to RGB within the worker's memory budget; see `image_decoding.decoded`."""
        return image_decoding.decoded(data, self._settings, self.decoding, check, side, held_bytes)

    def _open_s3(self) -> "S3Images":
        with self._lock:
            if self._s3 is None and self._settings.allowed_buckets:
                from handlers.chat.images.s3 import S3Images  # the AWS library is slow to load

                self._s3 = S3Images(self._settings, self.decoding)
            s3 = self._s3
        if s3 is None:
            raise ImageUrlForbidden(
                "this worker reads no images from S3; an operator can allow buckets with handler.intake.allowed_buckets"
            )
        return s3


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text.encode("ascii").translate(None, b" \t\r\n\f\v"), validate=True)
    except (binascii.Error, ValueError) as exc:
        raise NotAnImage("the image is neither an http(s) address, a data URL, nor valid base64") from exc


def _decode_data_url(text: str, max_bytes: int) -> bytes:
    header, comma, payload = text.partition(",")
    if not comma:
        raise NotAnImage("the data URL has no comma")
    refuse_other_media(header[len("data:") :].strip().lower())
    if len(payload) > max_bytes * 4:
        raise ImageTooLarge(f"the image is larger than {max_bytes} bytes")
    if header.lower().endswith(";base64"):
        return _decode_base64(payload)
    return unquote_to_bytes(payload.encode(errors="replace"))
