"""The tokenizer, the image processor and the chat template of a vision checkpoint.

transformers' processors join the same three, but also load video support, which needs more packages.
"""

import json
from pathlib import Path
from typing import Any

from transformers import AutoImageProcessor, AutoTokenizer

OLD_TEMPLATE = "chat_template.json"


class Processor:
    """Holds the tokenizer, the image processor and the template."""

    def __init__(self, tokenizer: Any, image_processor: Any, image_token: str, chat_template: str | None) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.image_token = image_token
        self.chat_template = chat_template

    @classmethod
    def load(cls, path: Path, image_token_id: int) -> "Processor":
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        images = AutoImageProcessor.from_pretrained(path, local_files_only=True)
        template = tokenizer.chat_template
        if template is None and (path / OLD_TEMPLATE).is_file():
            template = json.loads((path / OLD_TEMPLATE).read_text())["chat_template"]
        return cls(tokenizer, images, str(tokenizer.convert_ids_to_tokens(image_token_id)), template)
