"""LLaVA-like models: a vision tower, a projector, and a language model that reads both."""

from collections.abc import Sequence
from typing import Any

from PIL import Image
from torch import Tensor

from handlers.models.chat_template import ChatTemplate
from handlers.models.text import TextModel


class LlavaModel(TextModel):
    """A checkpoint of the LLaVA family.

    Source: Liu et al. 2023, "Improved Baselines with Visual Instruction Tuning".
    """

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor.tokenizer)
        self.processor = processor
        config = model.config
        self.image_token_id = getattr(config, "image_token_id", None) or config.image_token_index
        self.image_token: str = processor.image_token
        self.template = ChatTemplate(processor, processor.tokenizer, config.model_type, self.image_token)

    def _find_decoder(self) -> Any:
        return self.model.model.language_model

    def _adds_bos(self) -> bool:
        return True

    def _as_template_expects(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return list(messages)

    def preprocess(self, image: Image.Image) -> Any:
        """(1, channels, height, width) float32 on the CPU, normalised by the checkpoint's preprocessor config."""
        pixels: Tensor = self.processor.image_processor(images=[image], return_tensors="pt")["pixel_values"]
        return pixels

    def encode_image(self, pixels: Any) -> Tensor:
        """Vision tower and projector.

        pixels: (1, channels, height, width) in the model's type on its device.
        Returns (image tokens, hidden size) on the device.
        """
        features: Tensor = self.model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output[0]
        return features
