"""Makes scenes: shapes that do not overlap on a plain background, with the labels that are certain.

Coordinates are fractions of the image's width and height, so the processor's squash to a square does not change them. A
label close to the border between two answers (a third of the image; small or large) is None, and no question asks for
it. Knows nothing of pixels or of language.
"""

import math
import random
from dataclasses import dataclass
from functools import cached_property

RGB = tuple[int, int, int]

SHAPES = ("circle", "square", "triangle", "star", "cross")
SIZES = ("small", "large")
CELLS = ("top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right")

# The shades of each color: pure RGB, and those of CSS and plotting palettes. A scene mixes two and adds jitter.
COLORS: dict[str, tuple[RGB, ...]] = {
    "red": ((255, 0, 0), (214, 39, 40), (220, 20, 60), (200, 0, 0), (230, 60, 50)),
    "green": ((0, 128, 0), (0, 255, 0), (44, 160, 44), (50, 205, 50), (34, 139, 34), (60, 180, 75)),
    "blue": ((0, 0, 255), (31, 119, 180), (65, 105, 225), (0, 0, 180), (30, 100, 255)),
    "yellow": ((255, 255, 0), (255, 255, 0), (240, 215, 40), (255, 222, 0), (250, 235, 70)),
    "orange": ((255, 165, 0), (255, 127, 14), (255, 140, 0), (245, 135, 30)),
    "purple": ((128, 0, 128), (148, 103, 189), (140, 60, 180), (102, 51, 153), (138, 43, 226)),
    "black": ((0, 0, 0), (0, 0, 0), (25, 25, 25)),
    "white": ((255, 255, 255), (255, 255, 255), (245, 245, 245)),
}
PLAIN_BACKGROUNDS: dict[str, tuple[RGB, ...]] = {
    "white": ((255, 255, 255), (255, 255, 255), (244, 244, 244)),
    "gray": ((128, 128, 128), (169, 169, 169), (211, 211, 211), (192, 192, 192), (100, 100, 100)),
    "black": ((0, 0, 0), (0, 0, 0), (28, 28, 28)),
}
TINTS: dict[str, tuple[RGB, ...]] = {
    "light blue": ((173, 216, 230), (190, 215, 255), (135, 206, 235)),
    "light green": ((144, 238, 144), (190, 240, 190)),
    "light yellow": ((255, 255, 190), (255, 250, 170)),
    "pink": ((255, 192, 203), (255, 175, 190)),
}
UNNAMED_TINTS: tuple[RGB, ...] = (
    (245, 245, 220),
    (230, 230, 250),
    (255, 240, 225),
    (225, 245, 245),
    (210, 180, 140),
)
BACKGROUND_NAMES = (*PLAIN_BACKGROUNDS, *TINTS, *(name for name in COLORS if name not in PLAIN_BACKGROUNDS))

SMALLEST, EASY_SMALLEST = 0.085, 0.2
SMALL_BELOW = 0.20
LARGE_ABOVE = 0.30
CELL_MARGIN = 0.03
MAX_THINGS = 6
COUNT_WEIGHTS = (28, 27, 21, 15, 6, 3)
EASY_COUNT_WEIGHTS = (50, 35, 15, 0, 0, 0)
MIN_CONTRAST = 100.0
MIN_GAP = 0.02
MIN_CENTER_DISTANCE = 0.16


def third(position: float) -> int | None:
    """Return the third of the image in which a coordinate lies: 0, 1 or 2; None close to a border."""
    for border in (1 / 3, 2 / 3):
        if abs(position - border) < CELL_MARGIN:
            return None
    return int(position * 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """A filled shape. Center and extents are fractions of the image's width and height."""

    color: str
    shape: str
    rgb: RGB
    x: float
    y: float
    width: float
    height: float

    @property
    def name(self) -> str:
        return f"{self.color} {self.shape}"

    @property
    def cell(self) -> int | None:
        """The index into CELLS; None if the center is close to a border between cells."""
        column, row = third(self.x), third(self.y)
        return None if column is None or row is None else 3 * row + column

    @property
    def size(self) -> str | None:
        """ "small", "large", or None between the two."""
        diameter = math.sqrt(self.width * self.height)
        if diameter < SMALL_BELOW:
            return "small"
        return "large" if diameter > LARGE_ABOVE else None

    def is_apart_from(self, other: "Thing") -> bool:
        dx, dy = abs(self.x - other.x), abs(self.y - other.y)
        gap = max(dx - (self.width + other.width) / 2, dy - (self.height + other.height) / 2)
        return gap >= MIN_GAP and max(dx, dy) >= MIN_CENTER_DISTANCE


@dataclass(frozen=True)
class Scene:
    """A scene to draw. background: name of its color; None if it has no certain name. aspect: width / height."""

    background: str | None
    background_rgb: RGB
    things: tuple[Thing, ...]
    aspect: float

    @cached_property
    def has_certain_cells(self) -> bool:
        """Whether each thing has a different cell, so that only one description is right."""
        cells = [thing.cell for thing in self.things]
        return None not in cells and len(set(cells)) == len(cells)


def shade(rng: random.Random, shades: tuple[RGB, ...], jitter: int) -> RGB:
    """Return a random mixture of two shades with jitter; often one of the shades itself."""
    first, second = rng.choice(shades), rng.choice(shades)
    mix = rng.choice((0.0, 0.0, rng.random()))
    jitter = rng.choice((0, jitter))
    red, green, blue = (
        min(255, max(0, round(a + (b - a) * mix + rng.uniform(-jitter, jitter))))
        for a, b in zip(first, second, strict=True)
    )
    return red, green, blue


def contrast(first: RGB, second: RGB) -> float:
    return math.dist(first, second)


def sample_background(rng: random.Random) -> tuple[str | None, RGB]:
    kind = rng.random()
    if kind < 0.12:
        return None, shade(rng, (rng.choice(UNNAMED_TINTS),), 6)
    if kind < 0.27:
        palette, jitter = TINTS, 6
    elif kind < 0.37:
        palette, jitter = {name: COLORS[name] for name in COLORS if name not in PLAIN_BACKGROUNDS}, 10
    else:
        palette, jitter = PLAIN_BACKGROUNDS, 6
    name = rng.choice(list(palette))
    return name, shade(rng, palette[name], jitter)


def sample_aspect(rng: random.Random) -> float:
    """Return width / height: mostly common formats, all between 1:2 and 2:1."""
    if rng.random() < 0.4:
        return 1.0
    aspect = rng.choice((4 / 3, 3 / 2, 16 / 9, 2.0, math.exp(rng.uniform(0, math.log(2)))))
    return aspect if rng.random() < 0.6 else 1 / aspect


def sample_thing(
    rng: random.Random, color: str, rgb: RGB, shape: str, *, smallest: float, num_things: int, aspect: float
) -> Thing:
    """Return a shape at a random position, of a size that leaves room for num_things shapes."""
    largest = {1: 0.85, 2: 0.55, 3: 0.42}.get(num_things, 0.36)
    diameter = math.exp(rng.uniform(math.log(smallest), math.log(largest)))
    stretch = math.exp(rng.uniform(-0.12, 0.12)) if rng.random() < 0.3 else 1.0
    width = min(0.97, diameter / math.sqrt(aspect) * stretch)
    height = min(0.97, diameter * math.sqrt(aspect) / stretch)
    if num_things == 1 and rng.random() < 0.45:
        x, y = 0.5 + rng.uniform(-0.02, 0.02), 0.5 + rng.uniform(-0.02, 0.02)
        x, y = min(max(x, width / 2), 1 - width / 2), min(max(y, height / 2), 1 - height / 2)
    else:
        x, y = rng.uniform(width / 2, 1 - width / 2), rng.uniform(height / 2, 1 - height / 2)
    return Thing(color=color, shape=shape, rgb=rgb, x=x, y=y, width=width, height=height)


def sample_scene(rng: random.Random, *, is_easy: bool = False) -> Scene:
    """Return a random scene. An easy scene has at most three things, and no tiny ones."""
    background, background_rgb = sample_background(rng)
    smallest = EASY_SMALLEST if is_easy else SMALLEST
    weights = EASY_COUNT_WEIGHTS if is_easy else COUNT_WEIGHTS
    wanted = rng.choices(range(1, MAX_THINGS + 1), weights)[0]
    aspect = sample_aspect(rng)
    is_repetitive = rng.random() < 0.4  # otherwise the count of a kind is almost always one
    colors = rng.sample(list(COLORS), 2) if is_repetitive else list(COLORS)
    shapes = rng.sample(SHAPES, 2) if is_repetitive else SHAPES
    wants_cells = rng.random() < 0.75
    things: list[Thing] = []
    for _attempt in range(60):
        color, shape = rng.choice(colors), rng.choice(shapes)
        rgb = shade(rng, COLORS[color], 12)
        if contrast(rgb, background_rgb) < MIN_CONTRAST or color == background:
            colors = list(COLORS)
            continue
        thing = sample_thing(rng, color, rgb, shape, smallest=smallest, num_things=wanted, aspect=aspect)
        if wants_cells and thing.cell is None:
            continue
        if all(thing.is_apart_from(other) for other in things):
            things.append(thing)
        if len(things) == wanted:
            break
    if not things:
        return sample_scene(rng, is_easy=is_easy)
    return Scene(background, background_rgb, tuple(things), aspect)
