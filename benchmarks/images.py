"""Measures the processor time to read an image, with every pixel decoded and at the handler's reduced size.

Measures from the bytes of an image to the input of a vision tower of 336 x 336 pixels (CLIP-L/14-336, LLaVA-1.5), on
one thread. One arm decodes every pixel, as transformers does, and one works as the handler; they take turns. The images
are noise of the size of photos, since the decoders' time does not depend on the motif. `difference` is the mean
difference between both inputs, in steps of 8 bits.

    make bench NAME=images [QUICK=1]
    python -m benchmarks.images [--quick] [--rounds 5] [--save]
"""

import io
import os
import time
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from PIL import Image
from transformers import CLIPImageProcessor

from benchmarks.report import parse_options, print_report
from handlers.chat.images.loader import ImageLoader
from handlers.chat.images.store import content_key
from handlers.models.processor import scaled_side
from handlers.settings.intake import IntakeSettings

SIDE = 336
PHOTOS = {  # by name: format, mode and size
    "a photo of 12 million pixels, JPEG": ("JPEG", "RGB", (4032, 3024)),
    "the same as PNG": ("PNG", "RGB", (4032, 3024)),
    "the largest allowed, PNG with transparency": ("PNG", "RGBA", (7070, 7070)),
}


def make_photo(form: str, mode: str, size: tuple[int, int]) -> bytes:
    """Return an encoded image of soft noise."""
    small = np.random.default_rng(0).integers(0, 256, (size[1] // 16, size[0] // 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).convert(mode).save(file, form, compress_level=1)
    return file.getvalue()


def read(loader: ImageLoader, processor: Any, data: bytes, side: int | None) -> tuple[float, torch.Tensor]:
    """Return the processor seconds, and the input of the vision tower."""
    begin = time.process_time()
    with loader.decoded(data, lambda: None, side) as image:
        content_key("", image)
        pixels = processor(images=[image], return_tensors="pt")["pixel_values"]
    return time.process_time() - begin, pixels


def main() -> None:
    options = parse_options(__doc__, quick="one round")
    torch.set_num_threads(1)
    processor = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    loader = ImageLoader(IntakeSettings())
    rows, ratios = [], {}
    for number, (name, photo) in enumerate(PHOTOS.items()):
        data = make_photo(*photo)
        spent: dict[str, list[float]] = {"whole": [], "reduced": []}
        pixels = {}
        for _ in range(options.rounds):
            for arm, side in (("whole", None), ("reduced", scaled_side(processor))):
                seconds, pixels[arm] = read(loader, processor, data, side)
                spent[arm].append(seconds)
        cpu_s = {arm: median(values) for arm, values in spent.items()}
        steps = 255 * float(np.mean(processor.image_std))  # steps of 8 bits per unit of a normalised value
        difference = float((pixels["whole"] - pixels["reduced"]).abs().mean()) * steps
        differences = {"whole": 0.0, "reduced": difference}
        rows += [
            {"image": name, "arm": arm, "cpu_s": cpu_s[arm], "difference": differences[arm]} for arm in differences
        ]
        ratios[("cpu_photo_jpeg", "cpu_photo_png", "cpu_largest_png")[number]] = cpu_s["reduced"] / cpu_s["whole"]
    print_report("images", rows, ratios, options)


if __name__ == "__main__":
    main()
