"""The tokenizer, the image processor and the chat template of a vision checkpoint.

transformers' processors join the same three, but also load video support, which needs more packages.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoImageProcessor

from handlers.models.tokenizer import load_tokenizer

OLD_TEMPLATE = "chat_template.json"


@dataclass(frozen=True, slots=True)
class Processor:
    """image_token: stands for an image in the template."""

    tokenizer: Any
    image_processor: Any
    image_token: str
    chat_template: str | None

    @classmethod
    def load(cls, path: Path, image_token_id: int) -> "Processor":
        tokenizer = load_tokenizer(path)
        images = AutoImageProcessor.from_pretrained(path, local_files_only=True)
        template = tokenizer.chat_template
        if template is None and (path / OLD_TEMPLATE).is_file():
            template = json.loads((path / OLD_TEMPLATE).read_text())["chat_template"]
        return cls(tokenizer, images, str(tokenizer.convert_ids_to_tokens(image_token_id)), template)


def scaled_side(image_processor: Any) -> int | None:
    """Return the length to which an image processor scales the shorter side of any image, or more; None without one.

    For processors that give every image the same size.
    """
    if not getattr(image_processor, "do_resize", False):
        return None
    sizes = (image_processor.size or {}, getattr(image_processor, "crop_size", None) or {})
    keys = ("shortest_edge", "longest_edge", "height", "width")
    return max((size.get(key) or 0 for size in sizes for key in keys), default=0) or None
