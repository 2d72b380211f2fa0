"""Decoding of images, and the limits on their pixels, checked on the header before a pixel is decoded."""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from PIL import Image, ImageOps, UnidentifiedImageError

from handlers.errors import BadImage, ImageTooLarge, NotAnImage, OutOfMemory
from handlers.settings import IntakeSettings

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")

Image.MAX_IMAGE_PIXELS = None  # of the whole process; each opened image's header is checked here instead

PNG_BYTES_PER_PIXEL = 3.1  # of noise, which cannot be compressed


def decode(data: bytes, settings: IntakeSettings) -> Image.Image:
    """Decode to RGB, upright, transparency on white; the first frame of an animation.

    Raises the BadImage family, OutOfMemory.
    """
    if not data:
        raise NotAnImage("the image has no bytes")
    with _opened(io.BytesIO(data)) as image:
        _check_pixels(image, settings.max_pixels)
        _check_shape(image, settings)
        return _to_rgb(image)


def scale_down(file: BinaryIO, settings: IntakeSettings) -> bytes:
    """Scale an image to about `scaled_pixels`, upright, as a PNG.

    A JPEG is decoded at a half to an eighth of its size, and only that size counts against `large_pixels`; others
    are decoded whole first. Raises the BadImage family, OutOfMemory.
    """
    with _opened(file) as image:
        _check_shape(image, settings)
        num_pixels = min(settings.scaled_pixels, settings.max_pixels, int(settings.max_bytes / PNG_BYTES_PER_PIXEL))
        ratio = math.sqrt(num_pixels / (image.width * image.height))
        size = (max(int(image.width * ratio), 1), max(int(image.height * ratio), 1))
        if ratio < 1:
            image.draft(None, size)  # only the decoder of JPEG can
        _check_pixels(image, settings.large_pixels)
        image.load()
        picture: Image.Image = image
        if ratio < 1:
            if picture.mode in ("1", "P", "PA"):  # numbers of colours cannot be averaged
                picture = picture.convert("RGBA" if image.has_transparency_data else "RGB")
            elif picture.mode.startswith("I;16"):  # which Pillow cannot average either
                picture = picture.convert("I")
            picture.thumbnail(size)
        encoded = io.BytesIO()
        _to_rgb(picture).save(encoded, "PNG", compress_level=1)
    return encoded.getvalue()


@contextmanager
def _opened(file: BinaryIO) -> Iterator[Image.Image]:
    """Open an image and translate the errors of its decoder."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            yield image
    except (BadImage, OutOfMemory):
        raise
    except MemoryError as exc:
        raise OutOfMemory("this machine ran out of memory while decoding an image; try again later") from exc
    except UnidentifiedImageError as exc:
        raise NotAnImage(f"the bytes are no image of a known format ({', '.join(FORMATS)})") from exc
    except Exception as exc:  # hostile bytes make decoders raise struct.error, KeyError, ZeroDivisionError, ...
        raise NotAnImage("the image is broken and cannot be decoded") from exc


def _check_pixels(image: Image.Image, max_pixels: int) -> None:
    if image.width * image.height > max_pixels:
        raise ImageTooLarge(f"the image has {image.width} x {image.height} pixels, more than {max_pixels}")


def _check_shape(image: Image.Image, settings: IntakeSettings) -> None:
    short, long = sorted(image.size)
    if long > short * settings.max_aspect_ratio:
        raise ImageTooLarge(f"the image is {image.width} x {image.height} pixels, too long for its width")


def _to_rgb(image: Image.Image) -> Image.Image:
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):  # 16-bit greys, which a plain conversion would cut off at 255
        upright = upright.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if upright.has_transparency_data:
        with_alpha = upright.convert("RGBA")
        canvas = Image.new("RGBA", with_alpha.size, "white")
        return Image.alpha_composite(canvas, with_alpha).convert("RGB")
    return upright.convert("RGB")
