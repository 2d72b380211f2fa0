"""LLaVA-NeXT and LLaVA-OneVision: pictures of any shape, seen in patches of the vision tower's size."""

import torch
from PIL import Image
from torch import Tensor

from handlers.models.llava import LlavaModel
from handlers.models.pixels import Pixels


class LlavaNextModel(LlavaModel):
    """A LLaVA whose pictures have as many tokens as their shape asks for.

    Every picture is seen as if it were alone. That is what LLaVA-NeXT does; LLaVA-OneVision's own processor sees the
    pictures of a conversation coarser when there are several, which would change what earlier turns have seen.
    Source: Li et al. 2024, "LLaVA-OneVision: Easy Visual Task Transfer".
    """

    def preprocess(self, image: Image.Image) -> Pixels:
        """Patches of float32 on the CPU, normalised by the checkpoint's preprocessor config."""
        found = self.processor.image_processor(images=[image], return_tensors="pt")
        height, width = found["image_sizes"][0].tolist()
        return Pixels(found["pixel_values"], (height, width))

    def encode_image(self, pixels: Pixels) -> Tensor:
        """Vision tower and projector over all patches, padding cut off, a token at the end of each row.

        pixels: in the model's type on its device. Returns (image tokens, hidden size) on the device.
        """
        sizes = torch.tensor([pixels.size], device=pixels.values.device)
        features: Tensor = self.model.get_image_features(
            pixel_values=pixels.values, image_sizes=sizes, return_dict=True
        ).pooler_output[0]
        return features
