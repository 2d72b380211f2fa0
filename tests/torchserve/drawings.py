"""Draw plain images for the tests with Pillow."""

import base64
import io
from typing import Any

from PIL import Image, ImageDraw


def draw(shape: str, color: str, size: tuple[int, int] = (320, 240), form: str = "PNG") -> bytes:
    """Return an encoded image of one filled shape in the middle of a white background."""
    image = Image.new("RGB", size, "white")
    canvas = ImageDraw.Draw(image)
    radius = min(size) * 0.3
    x, y = size[0] / 2, size[1] / 2
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        canvas.ellipse(box, fill=color)
    elif shape == "square":
        canvas.rectangle(box, fill=color)
    else:
        canvas.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=color)
    return encoded(image, form)


def draw_image(shape: str, color: str, size: int = 96) -> Image.Image:
    """Return a square image of one filled shape, `ellipse` or `rectangle`, in the middle of a white background."""
    image = Image.new("RGB", (size, size), "white")
    box = (size // 4, size // 4, size * 3 // 4, size * 3 // 4)
    getattr(ImageDraw.Draw(image), shape)(box, fill=color)
    return image


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """Return an image's file; options: Pillow's, of this format."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def data_url(image: Image.Image | bytes) -> str:
    """Return a URL that contains an image, or its file, as PNG."""
    data = image if isinstance(image, bytes) else encoded(image)
    return "data:image/png;base64," + base64.b64encode(data).decode()
