"""Decodes images. Checks the limits on pixels from an image's header, before a pixel is decoded."""

import io
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, BinaryIO, cast

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TILELENGTH, TILEWIDTH, TiffImageFile

from handlers.chat.images.decoding_budget import DecodingBudget
from handlers.errors import HandlerError, ImageTooLarge, NotAnImage, OutOfMemory
from handlers.settings.intake import IntakeSettings

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")

Image.MAX_IMAGE_PIXELS = None  # Pillow's limit is per process; here each image's header is checked instead

PNG_BYTES_PER_PIXEL = 3.1  # of noise, which cannot be compressed
STRIP_PIXELS = 1 << 20
ORIENTATION = ExifTags.Base.Orientation

# Memory per pixel, measured: an image is decoded (4), converted to RGB (8), and scaled by the preprocessor (14).
DECODED_BYTES_PER_PIXEL = 4
RGB_BYTES_PER_PIXEL = 10  # for the conversion and the preprocessor
DECODER_BYTES_PER_PIXEL = {"WEBP": 18, "TIFF": 8}  # of decoders that keep copies, a TIFF's if it is turned upright
COEFFICIENT_BYTES = 2  # of each band of each pixel, which the decoder of a JPEG with several scans keeps at full size
TILE_BYTES_PER_PIXEL = 8  # of a TIFF's tile, which is decoded whole, however small the image is
START_OF_SCAN = b"\xda"
BARE_MARKERS = bytes((0x00, 0x01, *range(0xD0, 0xD9), 0xFF))  # of a JPEG; all others begin a segment
MAX_MARKER_BYTES = 10_000  # that are read to find a JPEG's first scan; then it counts as one of several
MAX_READS = 1_000_000  # of a file; Pillow reads heads byte by byte, and 20 MB of them took 27 s

# Pillow's own for thumbnails: an image is reduced by whole factors, without a filter, to no less than twice the size
# that is wanted. The preprocessor scales the rest with its filter.
REDUCING_GAP = 2


@contextmanager
def decoded(
    data: bytes,
    settings: IntakeSettings,
    budget: DecodingBudget,
    check: Callable[[], None],
    side: int | None = None,
    held_bytes: int = 0,
) -> Iterator[Image.Image]:
    """Decode to RGB, upright, transparency on white; the first frame of an animation.

    side: the length to which a preprocessor then scales the shorter side. Much larger images are reduced while they are
    decoded, since the preprocessor would drop most pixels anyway. None: decode at full size. held_bytes: as for
    `DecodingBudget.lease`.

    The image is valid and holds its share of the memory budget until the end of the `with` block. Raises the BadImage
    family, OutOfMemory, and what `check` raises while the image waits for its share.
    """
    if not data:
        raise NotAnImage("the image has no bytes")
    with ExitStack() as held:
        with _opened(io.BytesIO(data)) as opened:
            _check_pixels(opened, settings.max_pixels)
            _check_shape(opened, settings)
            extra = _extra_bytes(opened)
            factor = _reduce(opened, side)
            width, height = _reduced(opened.size, factor)
            num_bytes = opened.width * opened.height * DECODED_BYTES_PER_PIXEL + width * height * RGB_BYTES_PER_PIXEL
            held.enter_context(budget.lease(max(num_bytes, _decoder_bytes(opened) + extra), check, held_bytes))
            image = _to_rgb(opened, factor)
        del opened  # WebP's decoder keeps pixels
        held.callback(image.close)  # before the share is returned, although the caller still has the image
        yield image


def scale_down(
    file: BinaryIO, settings: IntakeSettings, budget: DecodingBudget, check: Callable[[], None], held_bytes: int = 0
) -> bytes:
    """Scale an image to about `scaled_pixels`, upright, as a PNG.

    A JPEG is decoded at a half to an eighth of its size, and only that size counts against `large_pixels`; others
    are decoded whole first. Raises as `decoded` does.
    """
    with _opened(file) as image:
        _check_shape(image, settings)
        num_pixels = min(settings.scaled_pixels, settings.max_pixels, int(settings.max_bytes / PNG_BYTES_PER_PIXEL))
        ratio = math.sqrt(num_pixels / (image.width * image.height))
        size = (max(int(image.width * ratio), 1), max(int(image.height * ratio), 1))
        extra = _extra_bytes(image)
        if ratio < 1:
            image.draft(None, size)  # only JPEG's decoder can scale
        _check_pixels(image, settings.large_pixels)
        num_bytes = image.width * image.height * DECODED_BYTES_PER_PIXEL * (2 if image.has_transparency_data else 1)
        with budget.lease(max(num_bytes, _decoder_bytes(image) + extra), check, held_bytes):
            return _scaled(image, size if ratio < 1 else image.size)


def _scaled(image: Image.Image, size: tuple[int, int]) -> bytes:
    image.load()
    scaled = image
    if size != image.size:
        if image.mode in ("1", "P", "PA"):  # indexes of a palette cannot be averaged
            scaled = image.convert("RGBA" if image.has_transparency_data else "RGB")
        elif image.mode.startswith("I;16"):  # which Pillow cannot average either
            scaled = image.convert("I")
        scaled.thumbnail(size)
    encoded = io.BytesIO()
    _to_rgb(scaled).save(encoded, "PNG", compress_level=1)
    return encoded.getvalue()


def _reduce(image: Image.Image, side: int | None) -> int:
    """Let the decoder reduce the image as far as it can. Return the factor that is left for a later reduction."""
    if side is None:
        return 1
    least = side * REDUCING_GAP
    image.draft(None, (least, least))  # only JPEG's decoder can
    return max(min(image.size) // least, 1)


def _decoder_bytes(image: Image.Image) -> int:
    """Return the most memory that it takes to decode the image, without `_extra_bytes`."""
    return image.width * image.height * DECODER_BYTES_PER_PIXEL.get(image.format or "", DECODED_BYTES_PER_PIXEL)


def _extra_bytes(image: Image.Image) -> int:
    """Return the memory of a JPEG's coefficients or of a TIFF's tile. Call it before `draft`, which reduces neither."""
    if isinstance(image, TiffImageFile):
        return int(image.tag_v2.get(TILEWIDTH, 0) * image.tag_v2.get(TILELENGTH, 0)) * TILE_BYTES_PER_PIXEL
    num_bands = len(image.getbands())
    if isinstance(image, JpegImageFile):
        file = cast(BinaryIO, image.fp)
        if image.info.get("progressive") or _first_scan(file) < num_bands:
            return image.width * image.height * num_bands * COEFFICIENT_BYTES
    return 0


def _first_scan(file: BinaryIO) -> int:
    """Return how many of a JPEG's components its first scan has, 0 if it is not found.

    The decoder keeps the coefficients of these until it has the others.
    """
    file.seek(0)
    is_marker = False
    for _ in range(MAX_MARKER_BYTES):
        byte = file.read(1)
        if not is_marker or byte in BARE_MARKERS:
            is_marker = byte == b"\xff"
            continue
        length = int.from_bytes(file.read(2))
        if byte == START_OF_SCAN:
            return int.from_bytes(file.read(1))
        file.seek(length - 2, io.SEEK_CUR)
        is_marker = False
    return 0


def _reduced(size: tuple[int, int], factor: int) -> tuple[int, int]:
    return math.ceil(size[0] / factor), math.ceil(size[1] / factor)


class _LimitedReads:
    """A file that raises ValueError after MAX_READS reads."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = MAX_READS

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int = -1) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise ValueError("the file has too many parts")
        return self._file.read(size)


@contextmanager
def _opened(file: BinaryIO) -> Iterator[Image.Image]:
    """Open an image and translate the errors of its decoder."""
    try:
        with Image.open(cast(BinaryIO, _LimitedReads(file)), formats=FORMATS) as image:
            try:
                yield image
            finally:
                image.close()  # frees its pixels, which an error's traceback may still refer to
    except HandlerError:
        raise
    except MemoryError as exc:
        raise OutOfMemory("this machine ran out of memory while decoding an image; try again later") from exc
    except UnidentifiedImageError as exc:
        raise NotAnImage(f"the bytes are not an image of a known format ({', '.join(FORMATS)})") from exc
    except Exception as exc:  # hostile bytes make decoders raise struct.error, KeyError, ZeroDivisionError, ...
        raise NotAnImage("the image is broken and cannot be decoded; send the whole file, or save it again") from exc


def _check_pixels(image: Image.Image, max_pixels: int) -> None:
    if image.width * image.height > max_pixels:
        size = f"{image.width} x {image.height}"
        raise ImageTooLarge(f"the image has {size} pixels, more than {max_pixels}; scale it down")


def _check_shape(image: Image.Image, settings: IntakeSettings) -> None:
    short, long = sorted(image.size)
    if long > short * settings.max_aspect_ratio:
        size, most = f"{image.width} x {image.height}", settings.max_aspect_ratio
        raise ImageTooLarge(f"the image is {size} pixels; one side may be at most {most:g} times the other; crop it")


def _to_rgb(image: Image.Image, factor: int = 1) -> Image.Image:
    """Return the image upright as RGB, reduced. Converts it in strips, so that memory holds no other full-size copy."""
    rgb = Image.new("RGB", _reduced(image.size, factor), None)  # not filled, which would hold all threads up
    rows = max(STRIP_PIXELS // (image.width * factor), 1) * factor
    for top in range(0, image.height, rows):
        strip = _strip_to_rgb(image.crop((0, top, image.width, min(top + rows, image.height))))
        rgb.paste(strip if factor == 1 else strip.reduce(factor), (0, top // factor))
    with suppress(SyntaxError):  # a damaged EXIF of a PNG or WebP; Pillow ignores that of a JPEG
        rgb.getexif()[ORIENTATION] = image.getexif().get(ORIENTATION)
        ImageOps.exif_transpose(rgb, in_place=True)
    return rgb


def _strip_to_rgb(strip: Image.Image) -> Image.Image:
    if strip.mode.startswith("I"):  # 16-bit greys, which a plain conversion would cut off at 255
        deep, clear = strip.convert("I"), strip.info.get("transparency")
        strip = deep.point(lambda value: value * (1 / 256)).convert("L")
        if clear is not None:  # a grey of 16 bits
            del strip.info["transparency"]
            strip.putalpha(deep.point([0 if value == clear else 255 for value in range(1 << 16)], "L"))
    if strip.has_transparency_data:
        with_alpha = strip if strip.mode == "RGBA" else strip.convert("RGBA")
        least, most = cast(tuple[int, int], with_alpha.getchannel("A").getextrema())
        if most == 0:
            return Image.new("RGB", with_alpha.size, "white")
        if least < 255:
            canvas = Image.new("RGBA", with_alpha.size, "white")
            with_alpha = Image.alpha_composite(canvas, with_alpha)
        return with_alpha.convert("RGB")
    return strip if strip.mode == "RGB" else strip.convert("RGB")
