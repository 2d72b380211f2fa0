"""Draw plain images for the tests with Pillow."""

import base64
import io

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
    encoded = io.BytesIO()
    image.save(encoded, form)
    return encoded.getvalue()


def data_url(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()
