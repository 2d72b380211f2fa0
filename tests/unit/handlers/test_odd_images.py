"""Images that are legal but unusual: their memory is counted, and their pixels are right."""

import struct
import zlib
from typing import Any

import pytest
from PIL import Image

from handlers.chat.images.loader import ImageLoader
from handlers.errors import ImageTooLarge, NotAnImage
from handlers.settings.intake import IntakeSettings
from tests.torchserve.drawings import encoded

SIDE = 800
PIXELS = SIDE * SIDE


def decode(data: bytes, side: int | None = None, **settings: Any) -> Image.Image:
    loader = ImageLoader(IntakeSettings(**settings))
    with loader.decoded(data, lambda: None, side) as image:
        return image.copy()


def one_scan_per_component() -> bytes:
    """Return a JPEG that is not progressive and has a scan of its own for each of three components."""
    grey = encoded(Image.new("L", (SIDE, SIDE), 100), "JPEG")
    components = b"".join(bytes([number, 0x11, 0]) for number in (1, 2, 3))
    found, at = bytearray(b"\xff\xd8"), 2
    while True:
        marker, length = grey[at + 1], int.from_bytes(grey[at + 2 : at + 4])
        segment, at = grey[at : at + 2 + length], at + 2 + length
        if marker == 0xDA:
            break
        if marker == 0xC0:
            segment = b"\xff\xc0" + struct.pack(">HBHHB", 17, 8, SIDE, SIDE, 3) + components
        found += segment
    for number in (1, 2, 3):
        found += b"\xff\xda" + struct.pack(">HB", 8, 1) + bytes([number, 0, 0, 63, 0]) + grey[at:-2]
    return bytes(found + b"\xff\xd9")


def two_pictures() -> bytes:
    """Return a progressive JPEG with a second image behind it, as some cameras write."""
    picture = Image.new("RGB", (SIDE, SIDE))
    return encoded(picture, "MPO", save_all=True, append_images=[picture], progressive=True)


@pytest.mark.parametrize("data", [one_scan_per_component(), two_pictures()])
def test_coefficients_of_several_scans_are_counted(data: bytes) -> None:
    """A JPEG of several scans is decoded whole, however small it becomes, so its coefficients count."""
    with pytest.raises(ImageTooLarge, match="bytes of memory"):
        decode(data, 50, decoding_bytes=6 * PIXELS - 1)

    assert decode(data, 50, decoding_bytes=7 * PIXELS).size == (100, 100)


def test_a_jpeg_of_one_scan_needs_no_coefficients() -> None:
    """A JPEG with all components in one scan takes the memory of the reduced size."""
    plain = encoded(Image.new("RGB", (SIDE, SIDE)), "JPEG", comment=b"\xff\xda\xff")

    assert decode(plain, 50, decoding_bytes=PIXELS // 4).size == (100, 100)


@pytest.mark.parametrize("filler", [b"\xff" * 1_100_000, b"\xff\xfe\0\2" * 500_000])
def test_a_head_of_very_many_parts_is_refused(filler: bytes) -> None:
    """Pillow reads fill bytes and empty segments one by one, which takes a minute for the largest images."""
    jpeg = encoded(Image.new("RGB", (8, 8)), "JPEG")

    assert decode(jpeg[:2] + filler[:100_000] + jpeg[2:]).size == (8, 8)
    with pytest.raises(NotAnImage):
        decode(jpeg[:2] + filler + jpeg[2:])


def tiled(side: int, tile: int) -> bytes:
    """Return a grey TIFF in tiles of this side, compressed."""
    content = zlib.compress(bytes(tile * tile), 9)
    short, long = 3, 4
    fields = [(256, long, side), (257, long, side), (258, short, 8), (259, short, 8), (262, short, 1), (277, short, 1)]
    begin = 8 + 2 + 12 * 10 + 4
    fields += [(322, long, tile), (323, long, tile), (324, long, begin), (325, long, len(content))]
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in fields)
    return b"II*\0" + struct.pack("<IH", 8, len(fields)) + entries + bytes(4) + content


def test_a_tile_counts_even_if_the_image_is_small() -> None:
    """A TIFF's decoder unpacks a whole tile, so 16 KB with 16 x 16 pixels could otherwise fill the memory."""
    data = tiled(16, 4096)

    with pytest.raises(ImageTooLarge, match="bytes of memory"):
        decode(data, decoding_bytes=64 << 20)
    assert decode(tiled(16, 64), decoding_bytes=64 << 20).size == (16, 16)


def with_transparent_grey(grey: int) -> bytes:
    """Return a PNG of 16-bit greys, 1000 and 50,000, of which one value is transparent."""
    image = Image.new("I;16", (2, 1), 50_000)
    image.putpixel((0, 0), 1000)
    png = encoded(image, "PNG")
    kind, content = b"tRNS", struct.pack(">H", grey)
    at = png.index(b"IDAT") - 4
    chunk = struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return png[:at] + chunk + png[at:]


def test_a_transparent_grey_is_one_of_16_bits() -> None:
    """Pixels of exactly this grey become white, and no others."""
    white, dark, bright = (255, 255, 255), (3, 3, 3), (195, 195, 195)

    def pixels(data: bytes) -> list[Any]:
        image = decode(data)
        return [image.getpixel((0, 0)), image.getpixel((1, 0))]

    assert pixels(with_transparent_grey(1000)) == [white, bright]
    assert pixels(with_transparent_grey(50_000)) == [dark, white]
    assert pixels(with_transparent_grey(3)) == [dark, bright]
