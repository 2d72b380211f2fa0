"""Makes questions about a scene, each with its only right answer, with one function for each kind of question.

A function returns None if the scene does not determine the answer, for example for "What color is the circle?" with two
circles. Knows nothing of turns, tokens or pixels.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import phrasings
from .phrasings import phrase
from .scenes import CELLS, COLORS, SHAPES, Scene, Thing

NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
OTHER_NOUNS = (
    "dog",
    "cat",
    "car",
    "house",
    "tree",
    "person",
    "flower",
    "bird",
    "boat",
    "heart",
    "moon",
    "cup",
)
SIDES = {
    "on the left": (0, False),
    "on the right": (0, True),
    "at the top": (1, False),
    "at the bottom": (1, True),
}
CORNERS_AND_CENTER = (0, 2, 4, 6, 8)
HALF_MARGIN = 0.06
P_CROSSED = 0.6  # how often a thing that does not exist has the color of one thing and the shape of another


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its answer. subject: the thing that "it" means in a follow-up, if any."""

    kind: str
    text: str
    answer: str
    subject: Thing | None = None


Asker = Callable[[random.Random, Scene], Question | None]


def a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def plural(noun: str) -> str:
    return noun + ("es" if noun.endswith("s") else "s")


def place(cell: int) -> str:
    return "in the center" if CELLS[cell] == "center" else f"at the {CELLS[cell]}"


def listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def only(things: Sequence[Thing]) -> Thing | None:
    return things[0] if len(things) == 1 else None


def has_only_shape(scene: Scene, thing: Thing) -> bool:
    return sum(o.shape == thing.shape for o in scene.things) == 1


def has_only_color(scene: Scene, thing: Thing) -> bool:
    return sum(o.color == thing.color for o in scene.things) == 1


def pick_named(rng: random.Random, scene: Scene) -> tuple[Thing, str] | None:
    """Return a thing and a name that fits no other thing, most often its full name; None if there is none."""
    thing = rng.choice(scene.things)
    names = [thing.name] if sum(o.name == thing.name for o in scene.things) == 1 else []
    if has_only_shape(scene, thing):
        names.append(thing.shape)
    if has_only_color(scene, thing):
        names.append(f"{thing.color} object")
    if not names:
        return None
    return thing, names[0] if rng.random() < 0.5 else rng.choice(names)


def ask_color(rng: random.Random, scene: Scene) -> Question | None:
    thing = rng.choice(scene.things)
    if only(scene.things) and rng.random() < 0.5:
        return Question("color", phrase(rng, phrasings.COLOR_OF_IT), f"It is {thing.color}.", thing)
    if not has_only_shape(scene, thing):
        return None
    text = phrase(rng, phrasings.COLOR, noun=thing.shape)
    return Question("color", text, f"The {thing.shape} is {thing.color}.", thing)


def ask_shape(rng: random.Random, scene: Scene) -> Question | None:
    thing = rng.choice(scene.things)
    if only(scene.things) and rng.random() < 0.5:
        return Question("shape", phrase(rng, phrasings.SHAPE_OF_IT), f"It is {a(thing.shape)}.", thing)
    if not has_only_color(scene, thing):
        return None
    text = phrase(rng, phrasings.SHAPE, color=thing.color)
    return Question("shape", text, f"The {thing.color} object is {a(thing.shape)}.", thing)


def ask_identity(rng: random.Random, scene: Scene) -> Question | None:
    thing = only(scene.things)
    if thing is None:
        return None
    return Question("identity", phrase(rng, phrasings.IDENTITY), f"It is {a(thing.name)}.", thing)


def name_for_search(rng: random.Random, scene: Scene, form: str) -> str:
    """Return a noun that may be in the scene. Often only its color or only its shape occurs there."""
    thing = rng.choice(scene.things)
    color = rng.choice([o.color for o in scene.things] if rng.random() < 0.5 else list(COLORS))
    shape = rng.choice([o.shape for o in scene.things] if rng.random() < 0.5 else SHAPES)
    if rng.random() < 0.5:
        if rng.random() < 0.5:
            color, shape = thing.color, rng.choice(SHAPES)
        else:
            color, shape = rng.choice(list(COLORS)), thing.shape
    return {"shape": rng.choice(SHAPES), "color": rng.choice(list(COLORS)), "name": f"{color} {shape}"}[form]


def crossed_names(scene: Scene) -> list[str]:
    """Return the names of things that are not in the scene, though their color and their shape are."""
    names = {f"{one.color} {other.shape}" for one in scene.things for other in scene.things}
    return sorted(names - {o.name for o in scene.things})


def ask_existence(rng: random.Random, scene: Scene) -> Question:
    """Ask whether a thing exists. Half of the answers are no, mostly about things similar to existing ones."""
    wants_yes = rng.random() < 0.5
    form = rng.choice(("shape", "color", "name", "name"))
    held = [{"shape": o.shape, "color": o.color, "name": o.name}[form] for o in scene.things]
    noun = rng.choice(held)
    crossed = crossed_names(scene) if form == "name" and not wants_yes else []
    if crossed and rng.random() < P_CROSSED:
        noun = rng.choice(crossed)
    for _attempt in range(20):  # if the scene has all shapes, the answer stays yes
        if wants_yes or noun not in held:
            break
        noun = name_for_search(rng, scene, form)
    hits = [thing for thing, name in zip(scene.things, held, strict=True) if name == noun]
    noun = f"{noun} object" if form == "color" else noun
    text = phrase(rng, phrasings.EXISTENCE, noun=noun, a_noun=a(noun), nouns=plural(noun))
    answer = f"Yes, there is {a(noun)}." if hits else f"No, there is no {noun}."
    return Question("existence", text, answer, only(hits))


def ask_verify(rng: random.Random, scene: Scene) -> Question | None:
    """Ask to verify a color: "Is the circle red?", "Is it red or blue?"."""
    thing = rng.choice(scene.things)
    if not has_only_shape(scene, thing):
        return None
    others = [o.color for o in scene.things if o.color != thing.color] or list(COLORS)
    color = thing.color if rng.random() < 0.4 else rng.choice(others if rng.random() < 0.5 else list(COLORS))
    noun = "it" if only(scene.things) and rng.random() < 0.4 else f"the {thing.shape}"
    if color != thing.color and rng.random() < 0.3:
        first, second = rng.sample((color, thing.color), 2)
        answer = f"{noun.capitalize()} is {thing.color}."
        return Question("verify", f"Is {noun} {first} or {second}?", answer, thing)
    verdict = "Yes" if color == thing.color else "No"
    return Question("verify", f"Is {noun} {color}?", f"{verdict}, {noun} is {thing.color}.", thing)


def count_answer(number: int, noun: str) -> str:
    return f"There is one {noun}." if number == 1 else f"There are {NUMBERS[number]} {plural(noun)}."


def ask_count(rng: random.Random, scene: Scene) -> Question:
    text = phrase(rng, phrasings.COUNT, nouns=rng.choice(("objects", "shapes", "objects", "shapes", "things")))
    return Question("count", text, count_answer(len(scene.things), "object"), only(scene.things))


def ask_count_kind(rng: random.Random, scene: Scene) -> Question:
    """Ask for the number of things of a color, a shape, or both, which may be zero."""
    color, shape = rng.choice([(o.color, o.shape) for o in scene.things])
    if rng.random() < 0.25:
        color, shape = rng.choice(list(COLORS)), rng.choice(SHAPES)
    elif rng.random() < 0.25:
        shape = rng.choice([o.shape for o in scene.things])  # perhaps of another thing
    form = rng.choice(("shape", "shape", "color", "name"))
    noun = {"shape": shape, "color": f"{color} object", "name": f"{color} {shape}"}[form]
    wanted_color = None if form == "shape" else color
    wanted_shape = None if form == "color" else shape
    hits = [o for o in scene.things if wanted_color in (None, o.color) and wanted_shape in (None, o.shape)]
    text = phrase(rng, phrasings.COUNT, nouns=plural(noun))
    return Question("count of a kind", text, count_answer(len(hits), noun), only(hits))


def ask_position(rng: random.Random, scene: Scene) -> Question | None:
    named = pick_named(rng, scene)
    if named is None:
        return None
    thing, name = named
    cell = thing.cell
    if cell is None:
        return None
    if only(scene.things) and rng.random() < 0.25:
        noun = rng.choice(("it", "the shape", "the object"))
        return Question("position", f"Where is {noun}?", f"It is {place(cell)}.", thing)
    text = phrase(rng, phrasings.POSITION, noun=name)
    return Question("position", text, f"The {name} is {place(cell)}.", thing)


def ask_size(rng: random.Random, scene: Scene) -> Question | None:
    named = pick_named(rng, scene)
    if named is None or named[0].size is None:
        return None
    thing, name = named
    noun = "it" if only(scene.things) and rng.random() < 0.4 else f"the {name}"
    return Question("size", phrase(rng, phrasings.SIZE, noun=noun), f"{noun.capitalize()} is {thing.size}.", thing)


def things_on_side(scene: Scene, where: str) -> list[Thing] | None:
    """Return the things in one half of the image; None if a thing is too close to the middle line."""
    axis, is_far = SIDES[where]
    positions = [(o.x, o.y)[axis] for o in scene.things]
    if any(abs(position - 0.5) < HALF_MARGIN for position in positions):
        return None
    return [o for o, position in zip(scene.things, positions, strict=True) if (position > 0.5) == is_far]


def ask_what_at(rng: random.Random, scene: Scene) -> Question | None:
    """Ask for the thing in one half of the image, in a corner, or in the center."""
    hits: list[Thing] | None
    if rng.random() < 0.5:
        where = rng.choice(list(SIDES))
        hits = things_on_side(scene, where)
    else:
        cells = [o.cell for o in scene.things if o.cell is not None]
        filled = [cell for cell in cells if cell in CORNERS_AND_CENTER]
        cell = rng.choice(filled) if filled and rng.random() < 0.75 else rng.choice(CORNERS_AND_CENTER)
        where = place(cell)
        hits = [o for o in scene.things if o.cell == cell] if len(cells) == len(scene.things) else None
    if hits is None or len(hits) > 1:
        return None
    answer = f"{a(hits[0].name).capitalize()}." if hits else "There is nothing there."
    return Question("what is at", phrase(rng, phrasings.WHAT_AT, where=where), answer, only(hits))


def ask_describe(rng: random.Random, scene: Scene) -> Question | None:
    """Ask for a description, which lists the things row by row."""
    if not scene.has_certain_cells:
        return None
    things = sorted(((o.cell, o) for o in scene.things if o.cell is not None), key=lambda pair: pair[0])
    is_several = only(scene.things) is None and rng.random() < 0.15
    text = phrase(rng, phrasings.DESCRIBE_SEVERAL if is_several else phrasings.DESCRIBE)
    parts = [f"{a(o.name)} {place(cell)}" for cell, o in things]
    return Question("describe", text, f"The image shows {listed(parts)}.", only(scene.things))


def ask_background(rng: random.Random, scene: Scene) -> Question | None:
    if scene.background is None:
        return None
    return Question("background", phrase(rng, phrasings.BACKGROUND), f"The background is {scene.background}.")


def ask_absent(rng: random.Random, scene: Scene) -> Question | None:
    """Ask about a thing that does not exist; the answer says so."""
    absent_shapes = [shape for shape in SHAPES if all(o.shape != shape for o in scene.things)]
    absent_colors = [color for color in COLORS if all(o.color != color for o in scene.things)]
    if not absent_shapes:
        return None
    shape, color = rng.choice(absent_shapes), rng.choice(absent_colors)
    text, noun = (part.format(shape=shape, color=color) for part in rng.choice(phrasings.ABSENT))
    return Question("absent", text, f"There is no {noun}.")


KINDS: dict[str, Asker] = {
    "color": ask_color,
    "shape": ask_shape,
    "identity": ask_identity,
    "existence": ask_existence,
    "verify": ask_verify,
    "count": ask_count,
    "count of a kind": ask_count_kind,
    "position": ask_position,
    "what is at": ask_what_at,
    "size": ask_size,
    "describe": ask_describe,
    "background": ask_background,
    "absent": ask_absent,
}


def ask(rng: random.Random, scene: Scene, kind: str) -> Question | None:
    """Return a question of this kind, or None if the scene does not determine the answer."""
    return KINDS[kind](rng, scene)
