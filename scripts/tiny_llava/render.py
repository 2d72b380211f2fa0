"""Draws scenes with Pillow, at random resolutions and with the artifacts of file formats.

Knows nothing of labels, which come from the scene. The last step is the processor's resize.
"""

import io
import math
import random

from PIL import Image, ImageDraw

from .scenes import Scene, Thing

IMAGE_SIZE = 112
MIN_THING_PX = 9.0

Point = tuple[float, float]


def outline_of(shape: str, rng: random.Random) -> list[Point]:
    """Return the corners of a shape in a box from -1 to 1, with y down. Raises ValueError for a circle."""
    match shape:
        case "square":
            return [(-1, -1), (1, -1), (1, 1), (-1, 1)]
        case "triangle":
            kind = rng.random()
            if kind < 0.12:
                return [(-1, -1), (1, -1), (0, 1)]
            if kind < 0.22:
                return [(-1, -1), (-1, 1), (1, 1)]
            return [(0, -1), (1, 1), (-1, 1)]
        case "star":
            inner = rng.uniform(0.36, 0.5)
            radii = [1.0, inner] * 5
            angles = [math.pi * (i / 5 - 0.5) for i in range(10)]
            return [(r * math.cos(a) / 0.951, r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]
        case "cross":
            t = rng.uniform(0.2, 0.4)
            quarter = [(-t, -1), (t, -1), (t, -t)]
            corners: list[Point] = []
            for _turn in range(4):
                corners += quarter
                quarter = [(-y, x) for x, y in quarter]
            return corners
    raise ValueError(f"no outline for {shape!r}")


def draw_thing(draw: ImageDraw.ImageDraw, thing: Thing, size: tuple[int, int], rng: random.Random) -> None:
    width, height = size
    x, y = thing.x * width, thing.y * height
    half_width, half_height = thing.width * width / 2, thing.height * height / 2
    if thing.shape == "circle":
        draw.ellipse([x - half_width, y - half_height, x + half_width, y + half_height], fill=thing.rgb)
    else:
        corners = [(x + u * half_width, y + v * half_height) for u, v in outline_of(thing.shape, rng)]
        draw.polygon(corners, fill=thing.rgb)


def sample_resolution(scene: Scene, rng: random.Random) -> tuple[int, int]:
    """Return width and height in pixels, large enough for the shape of the smallest thing to be visible."""
    side = math.exp(rng.uniform(math.log(64), math.log(300)))
    smallest = min(math.sqrt(thing.width * thing.height) for thing in scene.things)
    side = max(side, MIN_THING_PX / smallest)
    return max(8, round(side * math.sqrt(scene.aspect))), max(8, round(side / math.sqrt(scene.aspect)))


def degrade(image: Image.Image, rng: random.Random) -> Image.Image:
    """Return the image with the artifacts of a JPEG or of a palette, or, for most images, unchanged."""
    kind = rng.random()
    if kind < 0.25:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=rng.randint(55, 95))
        return Image.open(buffer).convert("RGB")
    if kind < 0.30:
        return image.quantize(rng.choice((16, 64, 256))).convert("RGB")
    return image


def render(scene: Scene, rng: random.Random) -> Image.Image:
    """Return the scene as an RGB image of a random resolution."""
    width, height = sample_resolution(scene, rng)
    scale = rng.choice((1, 1, 1, 2, 3)) if width * height < 30_000 else rng.choice((1, 1, 2))
    image = Image.new("RGB", (width * scale, height * scale), scene.background_rgb)
    draw = ImageDraw.Draw(image)
    for thing in scene.things:
        draw_thing(draw, thing, image.size, rng)
    if scale > 1:
        image = image.resize((width, height), rng.choice((Image.Resampling.BOX, Image.Resampling.LANCZOS)))
    return degrade(image, rng)


def render_input(scene: Scene, rng: random.Random) -> Image.Image:
    """Return the image as the processor prepares it: squashed to a square with bicubic resampling."""
    return render(scene, rng).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)
