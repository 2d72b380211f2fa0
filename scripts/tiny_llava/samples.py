"""Draws the checkpoint's sample images with their questions, which the demo and the tests use.

The images are drawn with Pillow directly, not with the training renderer.
"""

import json
from pathlib import Path

from PIL import Image, ImageDraw

Pair = tuple[str, str]

QUESTIONS: dict[str, tuple[Pair, ...]] = {
    "red_circle.png": (
        ("What color is the circle?", "The circle is red."),
        ("What shape is this?", "It is a circle."),
        ("How many shapes are there?", "There is one object."),
        ("Is there a square?", "No, there is no square."),
        ("What color is the background?", "The background is white."),
    ),
    "blue_square_yellow_star.png": (
        ("What color is the star?", "The star is yellow."),
        ("What shape is the blue object?", "The blue object is a square."),
        ("Where is the blue square?", "The blue square is at the top left."),
        ("How many objects are in the image?", "There are two objects."),
    ),
    "green_triangle.jpg": (
        ("What color is the triangle?", "The triangle is green."),
        ("What shape is the green object?", "The green object is a triangle."),
        ("Is there a green triangle?", "Yes, there is a green triangle."),
    ),
    "three_shapes.png": (
        ("How many shapes are there?", "There are three objects."),
        ("What color is the cross?", "The cross is purple."),
        ("What shape is the orange object?", "The orange object is a circle."),
        ("Is there a red square?", "Yes, there is a red square."),
    ),
    "yellow_square_on_black.png": (
        ("What color is it?", "It is yellow."),
        ("What shape is it?", "It is a square."),
        ("Where is the square?", "The square is in the center."),
        ("What color is the background?", "The background is black."),
    ),
}


def draw_samples() -> dict[str, Image.Image]:
    """Return the sample images by file name."""
    images = {
        "red_circle.png": Image.new("RGB", (336, 336), "white"),
        "blue_square_yellow_star.png": Image.new("RGB", (300, 200), "black"),
        "green_triangle.jpg": Image.new("RGB", (640, 480), "white"),
        "three_shapes.png": Image.new("RGB", (512, 512), "white"),
        "yellow_square_on_black.png": Image.new("RGB", (96, 96), "black"),
    }
    pens = {name: ImageDraw.Draw(image) for name, image in images.items()}
    pens["red_circle.png"].ellipse((88, 88, 248, 248), fill="red")
    pen = pens["blue_square_yellow_star.png"]
    pen.rectangle((22, 10, 72, 60), fill="blue")
    star = [
        (250, 105),
        (259, 133),
        (288, 133),
        (265, 150),
        (273, 178),
        (250, 161),
        (227, 178),
        (235, 150),
        (212, 133),
        (241, 133),
    ]
    pen.polygon(star, fill="yellow")
    pens["green_triangle.jpg"].polygon([(320, 120), (200, 360), (440, 360)], fill="green")
    pen = pens["three_shapes.png"]
    pen.rectangle((40, 50, 140, 150), fill="red")
    pen.ellipse((370, 190, 480, 300), fill="orange")
    pen.rectangle((190, 412, 310, 448), fill="purple")
    pen.rectangle((232, 370, 268, 490), fill="purple")
    pens["yellow_square_on_black.png"].rectangle((28, 28, 67, 67), fill="yellow")
    return images


def write_samples(folder: Path) -> None:
    """Write the images, and questions.json: a list of image, question and right answer."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, image in draw_samples().items():
        image.save(folder / name, optimize=True)
    rows = [
        {"image": name, "question": question, "answer": answer}
        for name, pairs in QUESTIONS.items()
        for question, answer in pairs
    ]
    (folder / "questions.json").write_text(json.dumps(rows, indent=2) + "\n")
