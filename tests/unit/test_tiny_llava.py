"""models/tiny-llava is a real, small checkpoint that sees: it loads by the Auto classes and answers rightly."""

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageDraw
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaForConditionalGeneration

FOLDER = Path(__file__).resolve().parents[2] / "models" / "tiny-llava"
SAMPLES = json.loads((FOLDER / "samples" / "questions.json").read_text())
MAX_BYTES = 5_000_000

Answer = Callable[[Image.Image, list[str]], list[str]]


@pytest.fixture(scope="module")
def answer() -> Iterator[Answer]:
    """Answer questions about one image, each as a separate conversation, greedily, on one thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    processor = AutoProcessor.from_pretrained(FOLDER)
    model = AutoModelForImageTextToText.from_pretrained(FOLDER, dtype=torch.float32).eval()
    assert isinstance(model, LlavaForConditionalGeneration)

    @torch.inference_mode()
    def ask(image: Image.Image, questions: list[str]) -> list[str]:
        prompts = [
            processor.apply_chat_template(
                [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}],
                add_generation_prompt=True,
            )
            for question in questions
        ]
        inputs = processor(images=[image] * len(prompts), text=prompts, padding=True, return_tensors="pt")
        generated = model.generate(**inputs, max_new_tokens=60, do_sample=False)
        texts = processor.batch_decode(generated[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return [text.strip() for text in texts]

    yield ask
    torch.set_num_threads(num_threads)


@dataclass(frozen=True)
class Drawing:
    """A plain drawing: one or more shapes, as (kind, Pillow color, x, y, radius) in pixels."""

    size: tuple[int, int]
    background: str
    shapes: tuple[tuple[str, str, int, int, int], ...]
    format: str

    def draw(self) -> Image.Image:
        image = Image.new("RGB", self.size, self.background)
        pen = ImageDraw.Draw(image)
        for kind, color, x, y, r in self.shapes:
            if kind == "circle":
                pen.ellipse((x - r, y - r, x + r, y + r), fill=color)
            elif kind == "square":
                pen.rectangle((x - r, y - r, x + r, y + r), fill=color)
            else:
                pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=color)
        if self.format in ("RGBA", "P"):
            return image.convert(self.format)
        file = io.BytesIO()
        image.save(file, self.format)
        return Image.open(file)


ONE = [
    Drawing((64, 64), "white", (("circle", "red", 32, 32, 18),), "PNG"),
    Drawing((336, 336), "white", (("square", "blue", 168, 168, 80),), "JPEG"),
    Drawing((640, 480), "black", (("triangle", "yellow", 320, 240, 110),), "WEBP"),
    Drawing((200, 300), "white", (("circle", "green", 100, 150, 55),), "GIF"),
    Drawing((96, 96), "lightgray", (("square", "orange", 48, 48, 24),), "RGBA"),
    Drawing((1024, 768), "white", (("triangle", "purple", 512, 384, 200),), "P"),
]
TWO = [
    Drawing((336, 336), "white", (("circle", "red", 70, 70, 45), ("square", "blue", 265, 270, 45)), "PNG"),
    Drawing((640, 480), "white", (("triangle", "green", 110, 380, 70), ("circle", "orange", 530, 90, 70)), "JPEG"),
    Drawing((200, 300), "black", (("square", "yellow", 35, 50, 24), ("triangle", "red", 160, 255, 30)), "PNG"),
]


def named(drawing: Drawing) -> str:
    return f"{drawing.format}-{'x'.join(map(str, drawing.size))}"


def article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def test_checkpoint_stays_small() -> None:
    """The whole folder is at most 5 MB, so that the repository can contain it."""
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= MAX_BYTES


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample['image']}: {sample['question']}")
def test_answers_the_samples(answer: Answer, sample: dict[str, str]) -> None:
    """Every question of the demo has the expected answer."""
    image = Image.open(FOLDER / "samples" / sample["image"])

    assert [sample["answer"]] == answer(image, [sample["question"]])


@pytest.mark.parametrize("drawing", ONE, ids=named)
def test_names_a_single_shape(answer: Answer, drawing: Drawing) -> None:
    """The model names color, shape and number of one plain shape, in any size and file format."""
    kind, color, *_place = drawing.shapes[0]

    answers = answer(
        drawing.draw(),
        ["What color is it?", "What shape is this?", "How many shapes are there?", f"Is there a {kind}?"],
    )

    assert [
        f"It is {color}.",
        f"It is a {kind}.",
        "There is one object.",
        f"Yes, there is a {kind}.",
    ] == answers


@pytest.mark.parametrize("drawing", TWO, ids=named)
def test_tells_two_shapes_apart(answer: Answer, drawing: Drawing) -> None:
    """Each shape keeps its own color, and a missing shape is denied."""
    questions, right = ["How many objects are in the image?"], ["There are two objects."]
    for kind, color, *_place in drawing.shapes:
        questions += [f"What color is the {kind}?", f"What shape is the {color} object?"]
        right += [f"The {kind} is {color}.", f"The {color} object is a {kind}."]
    (first_kind, *_), (_, second_color, *_) = drawing.shapes
    questions.append(f"Is there {article(f'{second_color} {first_kind}')}?")
    right.append(f"No, there is no {second_color} {first_kind}.")

    assert right == answer(drawing.draw(), questions)


def test_says_where_a_shape_is(answer: Answer) -> None:
    """The model names the corner of the image where a shape is."""
    places = {
        "top left": (60, 50),
        "top right": (340, 50),
        "bottom left": (60, 250),
        "bottom right": (340, 250),
    }

    for place, (x, y) in places.items():
        image = Drawing((400, 300), "white", (("circle", "blue", x, y, 35),), "PNG").draw()
        assert [f"The blue circle is at the {place}."] == answer(image, ["Where is the blue circle?"])
