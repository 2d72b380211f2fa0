"""A picture as an any-resolution vision tower wants it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pixels:
    """A picture cut into patches, and how large it was: without its size the patches cannot be put together again.

    values: (1, patches, channels, height, width); size: height and width of the picture itself.
    """

    values: Tensor
    size: tuple[int, int]

    def to(self, device: torch.device, dtype: torch.dtype) -> "Pixels":
        return Pixels(self.values.to(device, dtype), self.size)
