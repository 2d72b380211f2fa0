"""Lists the phrasings of each question. A repeated phrasing is more likely; {image} is "image" or "picture"."""

import random

COLOR = (
    "What color is the {noun}?",
    "What color is the {noun}?",
    "What color is the {noun}?",
    "Which color is the {noun}?",
    "What is the color of the {noun}?",
    "Which color does the {noun} have?",
    "What color does the {noun} have?",
    "What color is the {noun} in the {image}?",
)
COLOR_OF_IT = (
    "What color is it?",
    "What color is it?",
    "What color is this?",
    "What color is this shape?",
    "What color is this object?",
    "What color is the shape?",
    "What color is the object?",
    "What color is the shape in the {image}?",
    "What color is the object in the {image}?",
    "What is the color of the shape?",
    "What is the color of the object?",
    "What is the color?",
)
SHAPE = (
    "What shape is the {color} object?",
    "What shape is the {color} object?",
    "What shape is the {color} object?",
    "What is the {color} object?",
    "What shape is the {color} thing?",
    "What is the {color} thing?",
    "What is the shape of the {color} object?",
    "What shape is the {color} object in the {image}?",
    "What shape is the {color} one?",
    "Which shape is {color}?",
    "What shape is {color}?",
)
SHAPE_OF_IT = (
    "What shape is this?",
    "What shape is this?",
    "What shape is it?",
    "What shape is it?",
    "What shape is the object?",
    "Which shape is this?",
    "What shape is in the {image}?",
    "What shape do you see?",
    "What shape is shown?",
    "What is the shape?",
    "What kind of shape is this?",
)
IDENTITY = (
    "What is this?",
    "What is it?",
    "What object is this?",
    "What object is in the {image}?",
)
EXISTENCE = (
    "Is there {a_noun}?",
    "Is there {a_noun}?",
    "Is there {a_noun}?",
    "Is there {a_noun} in the {image}?",
    "Is there {a_noun} in this {image}?",
    "Do you see {a_noun}?",
    "Can you see {a_noun}?",
    "Does the {image} contain {a_noun}?",
    "Are there any {nouns}?",
    "Is there any {noun}?",
)
COUNT = (
    "How many {nouns} are there?",
    "How many {nouns} are there?",
    "How many {nouns} do you see?",
    "How many {nouns} can you see?",
    "How many {nouns} are in the {image}?",
    "How many {nouns} are there in the {image}?",
    "Count the {nouns}.",
)
POSITION = (
    "Where is the {noun}?",
    "Where is the {noun}?",
    "Where do you see the {noun}?",
    "Where is the {noun} in the {image}?",
    "In which part of the {image} is the {noun}?",
)
SIZE = (
    "How big is {noun}?",
    "How large is {noun}?",
    "What size is {noun}?",
    "Is {noun} small or large?",
    "Is {noun} large or small?",
    "Is {noun} big or small?",
)
WHAT_AT = (
    "What is {where}?",
    "What is {where}?",
    "What is {where} of the {image}?",
    "What do you see {where}?",
    "What object is {where}?",
    "Which object is {where}?",
)
DESCRIBE = (
    "Describe the {image}.",
    "Describe the {image}.",
    "Describe this {image}.",
    "What is in the {image}?",
    "What is in this {image}?",
    "What is shown in the {image}?",
    "What does the {image} show?",
    "What do you see?",
    "What can you see in the {image}?",
    "Tell me what you see.",
)
DESCRIBE_SEVERAL = (
    "What objects are in the {image}?",
    "What shapes are in the {image}?",
)
BACKGROUND = (
    "What color is the background?",
    "What color is the background?",
    "Which color is the background?",
    "What is the background color?",
    "What is the color of the background?",
)
ABSENT = (
    ("What color is the {shape}?", "{shape}"),
    ("Where is the {shape}?", "{shape}"),
    ("How big is the {shape}?", "{shape}"),
    ("What shape is the {color} object?", "{color} object"),
    ("Where is the {color} {shape}?", "{color} {shape}"),
)


def phrase(rng: random.Random, phrasings: tuple[str, ...], **words: str) -> str:
    """Return a random phrasing with its words filled in."""
    return rng.choice(phrasings).format(image=rng.choice(("image", "image", "picture")), **words)
