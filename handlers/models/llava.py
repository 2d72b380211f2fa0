"""Models of the LLaVA family: a vision tower, a projector, and a language model that reads both."""

from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from handlers.models.processor import scaled_side
from handlers.models.text import TextModel


@dataclass(frozen=True, slots=True)
class Pixels:
    """An image cut into patches, and its size, without which the patches cannot be joined.

    values: (1, patches, channels, height, width); size: height and width of the image itself.
    """

    values: Tensor
    size: tuple[int, int]

    def to(self, device: torch.device, dtype: torch.dtype) -> "Pixels":
        return Pixels(self.values.to(device, dtype), self.size)


class LlavaModel(TextModel):
    """A LLaVA checkpoint.

    has_patches: images of any shape are cut into patches of the vision tower's size (LLaVA-NeXT, LLaVA-OneVision).
    Each image is then encoded as if it were alone. LLaVA-OneVision's processor encodes several images of one
    conversation more coarsely, which would change what earlier turns have seen.
    Sources: Liu et al. 2023, "Improved Baselines with Visual Instruction Tuning"; Li et al. 2024, "LLaVA-OneVision:
    Easy Visual Task Transfer".
    """

    def __init__(self, model: Any, processor: Any, *, has_patches: bool = False) -> None:
        super().__init__(model, processor.tokenizer, processor)
        self.processor = processor
        self.has_equal_images = not has_patches
        self.image_side = None if has_patches else scaled_side(processor.image_processor)
        self._has_patches = has_patches

    def _find_decoder(self) -> Any:
        return self.model.model.language_model

    def preprocess(self, image: Image.Image) -> Tensor | Pixels:
        """Return float32 on the CPU, normalised by the checkpoint's preprocessor config.

        (1, channels, height, width), or Pixels of a model with patches.
        """
        found = self.processor.image_processor(images=[image], return_tensors="pt")
        pixels: Tensor = found["pixel_values"]
        if not self._has_patches:
            return pixels
        height, width = found["image_sizes"][0].tolist()
        return Pixels(pixels, (height, width))

    def encode_image(self, pixels: Any) -> Tensor:
        """Run the vision tower and the projector; patches lose their padding and get a token at the end of each row.

        pixels: in the model's type on its device. Returns (image tokens, hidden size) on the device.
        """
        options = {"pixel_values": pixels}
        if isinstance(pixels, Pixels):
            sizes = torch.tensor([pixels.size], device=pixels.values.device)
            options = {"pixel_values": pixels.values, "image_sizes": sizes}
        features: Tensor = self.model.get_image_features(**options, return_dict=True).pooler_output[0]
        return features
