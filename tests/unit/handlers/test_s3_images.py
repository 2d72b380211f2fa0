"""Images from S3: allowed buckets, sizes, and scaling of large ones."""

import io
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from handlers.chat.images.decoding_budget import DecodingBudget
from handlers.chat.images.image_decoding import FORMATS, decoded, scale_down
from handlers.chat.images.loader import ImageLoader
from handlers.chat.images.s3 import Transfer
from handlers.errors import (
    ClientGone,
    ImageTooLarge,
    ImageUnreachable,
    ImageUrlForbidden,
    InvalidRequest,
    NotAnImage,
    OutOfDisk,
)
from handlers.requests.reply import PendingReply
from handlers.settings.intake import IntakeSettings
from tests.servers import S3Server
from tests.torchserve.drawings import draw, encoded

pytestmark = pytest.mark.s3
BUCKET = "pictures"
SETTINGS = IntakeSettings(scaled_pixels=10_000)


def drawing(mode: str = "RGB", size: tuple[int, int] = (800, 400)) -> Image.Image:
    """Return an image that is red on the left and blue on the right."""
    image = Image.new("RGB", size, (220, 0, 0))
    ImageDraw.Draw(image).rectangle((size[0] // 2, 0, *size), fill=(0, 0, 220))
    if mode == "I;16":
        return Image.fromarray(np.asarray(image.convert("L"), dtype=np.uint16) * 257)
    if mode == "1":
        return image.convert("L").point(lambda value: 255 * (value > 40), "1")
    return image.quantize(8) if mode == "P" else image.convert(mode)


def budget(max_bytes: int = 1 << 30) -> DecodingBudget:
    return DecodingBudget(max_bytes, max_wait_s=60)


def decode(data: bytes, settings: IntakeSettings = SETTINGS) -> Image.Image:
    with decoded(data, settings, budget(), lambda: None) as picture:
        return picture.copy()


def shrink(data: bytes, settings: IntakeSettings, max_bytes: int = 1 << 30) -> bytes:
    return scale_down(io.BytesIO(data), settings, budget(max_bytes), lambda: None)


def scaled(data: bytes, settings: IntakeSettings = SETTINGS) -> Image.Image:
    return decode(shrink(data, settings), settings)


# Scaling


@pytest.mark.parametrize("form", FORMATS)
def test_large_images_of_every_format_are_scaled_down(form: str) -> None:
    """A scaled image shows the same content at the requested size."""
    picture = scaled(encoded(drawing(), form))

    assert 9_000 < picture.width * picture.height <= 10_000
    assert picture.width / picture.height == pytest.approx(2, rel=0.05)
    assert picture.getpixel((20, 30))[0] > 180
    assert picture.getpixel((120, 30))[2] > 180


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "LA", "I;16"])
def test_images_of_every_mode_are_scaled_down(mode: str) -> None:
    """Palettes, greys of 8 and 16 bits and transparency look as in small images."""
    small = decode(encoded(drawing(mode, (140, 70))))

    picture = scaled(encoded(drawing(mode)))

    for at in ((20, 30), (120, 30)):
        near = small.getpixel(at)
        assert picture.getpixel(at) == pytest.approx(near, abs=12)


def test_an_image_is_scaled_upright() -> None:
    """The orientation is applied once."""
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees

    assert scaled(encoded(drawing(), "JPEG", exif=exif)).size == (70, 140)


def test_a_jpeg_counts_as_it_is_decoded() -> None:
    """A JPEG decoded at an eighth needs a 64th of the memory; a PNG of the same size is refused by its header."""
    settings = IntakeSettings(scaled_pixels=1_000, large_pixels=100_000)

    assert scaled(encoded(drawing(), "JPEG"), settings).width < 50
    with pytest.raises(ImageTooLarge, match="800 x 400 pixels, more than 100000"):
        scaled(encoded(drawing()), settings)


def test_scaling_counts_against_the_budget_of_decoding() -> None:
    """A large image is scaled within the worker's budget; transparency needs twice the memory."""
    plain, clear = encoded(drawing()), encoded(drawing("RGBA"))  # of 320,000 pixels

    assert shrink(plain, SETTINGS, max_bytes=1_300_000)
    assert shrink(clear, SETTINGS, max_bytes=2_600_000)
    with pytest.raises(ImageTooLarge, match="takes 2560000 bytes of memory to decode, more than 2500000"):
        shrink(clear, SETTINGS, max_bytes=2_500_000)


def test_what_is_left_is_within_the_limits_of_any_image() -> None:
    """Noise, which cannot be compressed, stays within the limits, whatever size the setting requests."""
    noise = Image.effect_noise((600, 600), 200).convert("RGB")
    settings = IntakeSettings(max_bytes=50_000, max_pixels=400_000)

    assert len(shrink(encoded(noise), settings)) <= 50_000


def test_broken_and_odd_images_are_refused() -> None:
    """Broken large images give the same errors as small ones."""
    with pytest.raises(NotAnImage):
        scaled(b"no picture")
    with pytest.raises(NotAnImage):
        scaled(encoded(drawing())[:600])
    with pytest.raises(ImageTooLarge, match="one side may be at most 100 times the other"):
        scaled(encoded(drawing(size=(3000, 3))))


# S3


@pytest.fixture(scope="module")
def bucket(s3_server: S3Server) -> Iterator[Any]:
    """Return the test's own client; the intake is configured as by an operator."""
    client = s3_server.client()
    client.create_bucket(Bucket=BUCKET)
    for name, picture in PICTURES.items():
        client.put_object(Bucket=BUCKET, Key=name, Body=picture)
    with pytest.MonkeyPatch.context() as patch:
        s3_server.use_in(patch)
        yield client
    client.close()


PICTURES = {
    "open/red blue.png": encoded(drawing()),
    "opened.png": encoded(drawing()),
    "big.tif": encoded(drawing(size=(2000, 1000)), "TIFF"),
    "circle.tif": draw("circle", "red", (2000, 1500), "TIFF"),
}
URL = f"s3://{BUCKET}/open/red blue.png"


def read(loader: ImageLoader, reference: bytes | str) -> bytes:
    return loader.read(reference, PendingReply(lambda: None))


def intake(**values: Any) -> ImageLoader:
    return ImageLoader(IntakeSettings(**{"allowed_buckets": (BUCKET,), "scaled_pixels": 10_000, **values}))


@pytest.fixture(scope="module")
def door(bucket: Any) -> ImageLoader:
    """Return an intake that allows the whole bucket; more than 1 MB is large."""
    return intake(max_bytes=1_000_000, large_bytes=7_000_000)


def test_an_image_is_read_as_it_is(door: ImageLoader) -> None:
    """A small image keeps its bytes."""
    assert read(door, URL) == PICTURES["open/red blue.png"]


def test_a_large_image_goes_through_a_file(door: ImageLoader) -> None:
    """Larger images are scaled down through a file, also several at once."""
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(read(door, f"s3://{BUCKET}/big.tif")), daemon=True)
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert len(found) == 3
    assert len(set(found)) == 1
    assert decode(found[0]).size == (140, 70)


def test_a_session_is_opened_on_a_large_image(bucket: Any, make_client: Callable[..., Any], demo_llava: Any) -> None:
    """The model sees the image, and the host keeps the scaled version instead of 9 MB."""
    client = make_client(
        demo_llava, intake={"allowed_buckets": (BUCKET,), "max_bytes": 1_000_000, "scaled_pixels": 300_000}
    )

    session = client.open(f"s3://{BUCKET}/circle.tif")

    assert client.answer(session, "What color is the circle?") == "The circle is red."
    assert 0 < client.service.images.host_bytes < 1_000_000
    assert client.service.numbers()["images"]["fetched"] == 1


def test_a_large_image_is_left_to_its_request(door: ImageLoader) -> None:
    """Several large ones that a request fetched at once would wait for each other within their times."""
    reply = PendingReply(lambda: None)

    assert door.read_early(URL, reply) == PICTURES["open/red blue.png"]
    assert door.read_early(f"s3://{BUCKET}/big.tif", reply) is None


def test_a_request_reads_small_and_large_images(bucket: Any, make_client: Callable[..., Any]) -> None:
    client = make_client(intake={"allowed_buckets": (BUCKET,), "max_bytes": 1_000_000, "scaled_pixels": 10_000})

    session = client.open(URL, f"s3://{BUCKET}/big.tif", URL)

    first, second, third = client.service.store.find(session).pending_images
    assert first.digest == third.digest != second.digest
    assert client.service.numbers()["images"]["fetched"] == 3


def test_only_allowed_places_are_read(bucket: Any) -> None:
    """Without a setting no bucket is allowed; with a prefix, only keys below it. The error gives advice."""
    narrow = intake(allowed_buckets=(f"s3://{BUCKET}/open/",))

    assert read(narrow, URL.replace("s3:", "S3:"))
    for refused in (f"s3://{BUCKET}/opened.png", f"s3://{BUCKET}-2/open/a.png", f"s3://{BUCKET}", "s3:///open/a.png"):
        with pytest.raises(ImageUrlForbidden):
            read(narrow, refused)
    for path in ("open/../opened.png", "open/./red blue.png", "../other/a.png", "open/.."):
        with pytest.raises(ImageUrlForbidden, match="must not have the parts"):
            read(narrow, f"s3://{BUCKET}/{path}")
    with pytest.raises(ImageUrlForbidden, match="allowed_buckets"):
        read(intake(allowed_buckets=()), URL)
    with pytest.raises(InvalidRequest, match="valid Unicode"):
        read(narrow, f"s3://{BUCKET}/open/\ud800.png")


def test_what_cannot_be_read_is_told(door: ImageLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing objects, too many bytes, time-outs and missing servers have clear errors."""
    with pytest.raises(ImageUnreachable, match="no such object"):
        read(door, f"s3://{BUCKET}/other.png")
    with pytest.raises(ImageTooLarge, match="more than 100"):
        read(intake(large_bytes=100), URL)
    with pytest.raises(ImageUnreachable, match="in time"):
        read(intake(s3_timeout_s=1e-9), URL)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    with pytest.raises(ImageUnreachable, match="cannot be reached"):
        read(intake(connect_timeout_s=0.2), URL)


class Unsteady:
    """A store's client whose bodies break off after 1,000 bytes, a given number of times."""

    def __init__(self, data: bytes, num_breaks: int) -> None:
        self._data = data
        self.num_breaks = num_breaks
        self.ranges: list[str] = []

    def head_object(self, **place: str) -> dict[str, Any]:
        return {"ETag": '"1"', "ContentLength": len(self._data)}

    def get_object(self, *, Range: str, IfMatch: str, **place: str) -> dict[str, Any]:
        assert IfMatch == '"1"'
        self.ranges.append(Range)
        rest = self._data[int(Range.removeprefix("bytes=").rstrip("-")) :]
        is_broken, self.num_breaks = self.num_breaks > 0, self.num_breaks - 1
        return {"Body": io.BytesIO(rest[:1000] if is_broken else rest)}


def test_a_broken_connection_goes_on_where_it_stood() -> None:
    """No byte is read twice; a store that always breaks off is an error."""
    data = bytes(range(256)) * 20
    unsteady = Unsteady(data, num_breaks=2)
    transfer = Transfer(unsteady, {"Bucket": BUCKET, "Key": "a"}, time.monotonic() + 60, PendingReply(lambda: None))

    assert transfer.find_size() == len(data)
    assert b"".join(transfer.pieces()) == data
    assert unsteady.ranges == ["bytes=0-", "bytes=1000-", "bytes=2000-"]

    unsteady.num_breaks = 100
    with pytest.raises(ImageUnreachable, match="cannot be reached"):
        list(transfer.pieces())


def test_a_client_that_left_ends_the_reading(door: ImageLoader) -> None:
    """An image whose client disconnected is not scaled."""
    reply = PendingReply(lambda: None)
    reply.cancel(ClientGone("left"))

    with pytest.raises(ClientGone):
        door.read(URL, reply)


def test_a_disk_without_room_is_told(door: ImageLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large image needs temporary disk space; here every write to it fails."""
    full = Path("/dev/full")
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: io.FileIO(full, "r+"))

    with pytest.raises(OutOfDisk):
        read(door, f"s3://{BUCKET}/big.tif")
