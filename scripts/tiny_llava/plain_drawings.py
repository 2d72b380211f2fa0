"""Makes the independent test set: plain drawings like those of users, with questions.

Shares no code with the training renderer. It uses Pillow's named colors, ellipses, rectangles and polygons of whole
pixels at the size of the file, without supersampling, and common image sizes and file formats.
"""

import io
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image, ImageDraw

SIZES = (
    (64, 64),
    (96, 96),
    (336, 336),
    (200, 300),
    (640, 480),
    (1024, 768),
    (300, 200),
    (512, 512),
    (400, 225),
)
FORMATS = ("PNG", "PNG", "JPEG", "WEBP", "GIF", "RGBA", "P")
FILLS = {
    "red": ("red", "crimson"),
    "green": ("green", "lime"),
    "blue": ("blue", "royalblue"),
    "yellow": ("yellow",),
    "orange": ("orange", "darkorange"),
    "purple": ("purple",),
    "black": ("black",),
}
BACKGROUNDS = {"white": "white", "gray": "lightgray", "black": "black"}
KINDS = ("circle", "square", "triangle", "star", "cross")
ROWS, COLUMNS = ("top", "", "bottom"), ("left", "", "right")
WORDS = ("no", "one", "two", "three", "four")
MAX_TRIES = 200


@dataclass(frozen=True)
class Mark:
    """A shape in whole pixels. x, y: its center; radius: half the width of its box."""

    color: str
    kind: str
    x: int
    y: int
    radius: int


@dataclass(frozen=True)
class Drawing:
    image: Image.Image
    background: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Item:
    """One question about one drawing."""

    type: str
    image: Image.Image
    question: str
    answer: str


def polygon_of(mark: Mark) -> list[tuple[float, float]]:
    x, y, r = mark.x, mark.y, mark.radius
    if mark.kind == "triangle":
        return [(x, y - r), (x - r, y + r), (x + r, y + r)]
    if mark.kind == "star":
        points = []
        for corner in range(10):
            reach = r if corner % 2 == 0 else 0.42 * r
            turn = math.radians(36 * corner)
            points.append((x + reach * math.sin(turn), y - reach * math.cos(turn)))
        return points
    raise ValueError(mark.kind)


def put(pen: ImageDraw.ImageDraw, mark: Mark, fill: str) -> None:
    x, y, r = mark.x, mark.y, mark.radius
    if mark.kind == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    elif mark.kind == "square":
        pen.rectangle((x - r, y - r, x + r, y + r), fill=fill)
    elif mark.kind == "cross":
        arm = max(1, r // 3)
        pen.rectangle((x - r, y - arm, x + r, y + arm), fill=fill)
        pen.rectangle((x - arm, y - r, x + arm, y + r), fill=fill)
    else:
        pen.polygon(polygon_of(mark), fill=fill)


def through_format(image: Image.Image, name: str) -> Image.Image:
    """Return the image after saving it in a file format and reading it again."""
    if name in ("RGBA", "P"):
        return image.convert(name)
    file = io.BytesIO()
    image.save(file, name)
    file.seek(0)
    reopened = Image.open(file)
    reopened.load()
    return reopened


def draw_plain(rng: random.Random) -> Drawing:
    """Draw one to four shapes of 9 to 60 % of the image's width, anywhere. A single shape is often in the center."""
    width, height = rng.choice(SIZES)
    background = rng.choice(("white", "white", "white", "gray", "black"))
    image = Image.new("RGB", (width, height), BACKGROUNDS[background])
    pen = ImageDraw.Draw(image)
    wanted = rng.choice((1, 1, 2, 2, 3, 4))
    marks: list[Mark] = []
    colors = [color for color in FILLS if color != background]
    for _try in range(MAX_TRIES):
        biggest = min(0.3 if wanted == 1 else 0.2 if wanted == 2 else 0.14, 0.45 * height / width)
        radius = max(5, round(width * rng.uniform(0.045, biggest)))
        if wanted == 1 and rng.random() < 0.5:
            x, y = width // 2, height // 2
        else:
            x, y = rng.randint(radius, width - radius), rng.randint(radius, height - radius)
        mark = Mark(rng.choice(colors), rng.choice(KINDS), x, y, radius)
        if all(max(abs(x - o.x), abs(y - o.y)) > radius + o.radius + width // 25 for o in marks):
            marks.append(mark)
            put(pen, mark, rng.choice(FILLS[mark.color]))
        if len(marks) == wanted:
            break
    return Drawing(through_format(image, rng.choice(FORMATS)), background, tuple(marks))


def spot_of(mark: Mark, image: Image.Image) -> str | None:
    """Return the phrase for a mark's position; None within 4 % of a border between thirds."""
    spots = []
    for part, whole, names in ((mark.y, image.height, ROWS), (mark.x, image.width, COLUMNS)):
        share = 3 * part / whole
        if min(abs(share - 1), abs(share - 2)) < 0.12:
            return None
        spots.append(names[int(share)])
    spot = " ".join(filter(None, spots))
    return f"at the {spot}" if spot else "in the center"


def article(words: str) -> str:
    return ("an " if words[0] in "aeio" else "a ") + words


def many(word: str) -> str:
    return "crosses" if word == "cross" else word + "s"


def counted(number: int, word: str) -> str:
    return f"There is one {word}." if number == 1 else f"There are {WORDS[number]} {many(word)}."


def quiz(drawing: Drawing, rng: random.Random) -> Iterator[tuple[str, str, str]]:
    """Yield type, question and answer of each question that has one right answer for this drawing."""
    marks, image = drawing.marks, drawing.image
    mark = rng.choice(marks)
    kinds, colors = [m.kind for m in marks], [m.color for m in marks]
    pairs = list(zip(colors, kinds, strict=True))
    if len(marks) == 1:
        yield "color", rng.choice(("What color is it?", "What color is the shape?")), f"It is {mark.color}."
        yield (
            "shape",
            rng.choice(("What shape is this?", "What shape is it?")),
            f"It is {article(mark.kind)}.",
        )
    if kinds.count(mark.kind) == 1:
        yield "color", f"What color is the {mark.kind}?", f"The {mark.kind} is {mark.color}."
    if colors.count(mark.color) == 1:
        yield (
            "shape",
            f"What shape is the {mark.color} object?",
            f"The {mark.color} object is {article(mark.kind)}.",
        )
    noun = rng.choice(("shapes", "objects"))
    yield (
        "count",
        rng.choice((f"How many {noun} are there?", f"How many {noun} are in the image?")),
        counted(len(marks), "object"),
    )
    kind = rng.choice((mark.kind, rng.choice(KINDS)))
    yield "count of a kind", f"How many {many(kind)} are there?", counted(kinds.count(kind), kind)
    present = f"{mark.color} {mark.kind}"
    yield "existence", f"Is there {article(present)}?", f"Yes, there is {article(present)}."
    absent = (mark.color, rng.choice(KINDS)) if rng.random() < 0.5 else (rng.choice(list(FILLS)), mark.kind)
    if absent not in pairs:
        name = " ".join(absent)
        yield "existence", f"Is there {article(name)}?", f"No, there is no {name}."
    crossed = (marks[0].color, marks[-1].kind)
    if crossed not in pairs:
        name = " ".join(crossed)
        yield "existence of a crossed pair", f"Is there {article(name)}?", f"No, there is no {name}."
    kind = rng.choice(KINDS)
    verdict = f"Yes, there is {article(kind)}." if kind in kinds else f"No, there is no {kind}."
    yield "existence", f"Is there {article(kind)}?", verdict
    spot = spot_of(mark, image)
    if spot and pairs.count((mark.color, mark.kind)) == 1:
        yield "position", f"Where is the {present}?", f"The {present} is {spot}."
    yield "background", "What color is the background?", f"The background is {drawing.background}."
    spread = math.sqrt(4 * mark.radius**2 / (image.width * image.height))
    if kinds.count(mark.kind) == 1 and not 0.18 < spread < 0.32:
        size = "small" if spread < 0.2 else "large"
        yield "size", f"Is the {mark.kind} large or small?", f"The {mark.kind} is {size}."
    if len(marks) == 2:
        left, right = sorted(marks, key=lambda m: m.x)
        if left.x < 0.42 * image.width and right.x > 0.58 * image.width:
            yield "what is at", "What is on the left?", f"{article(left.color).capitalize()} {left.kind}."
    spots = [spot_of(m, image) for m in marks]
    if len(marks) == 1 and spot:
        yield "describe", "Describe the image.", f"The image shows {article(present)} {spot}."
    elif None not in spots and len(set(spots)) == len(spots):
        order = sorted(marks, key=lambda m: (3 * m.y // image.height, 3 * m.x // image.width))
        parts = [f"{article(m.color)} {m.kind} {spot_of(m, image)}" for m in order]
        yield "describe", "Describe the image.", f"The image shows {', '.join(parts[:-1])} and {parts[-1]}."


def plain_items(num_drawings: int, seed: int) -> list[Item]:
    """Return the test set: every question of every drawing."""
    rng = random.Random(seed)
    items = []
    for _drawing in range(num_drawings):
        drawing = draw_plain(rng)
        items += [Item(kind, drawing.image, text, answer) for kind, text, answer in quiz(drawing, rng)]
    return items
