"""Compute the answers of MiniLM's variants with transformers alone."""

import torch
import transformers as hf

from scripts.make_minilm import SCALED_TENSOR, TARGET, scale_of
from tests.torchserve.many.population import Variant

TEXTS = ("a red circle on the left", "what is the weather like?", "three green squares", "nothing of the kind")
# The smallest difference between two variants' answers to one of these texts is 7e-4.
TOLERANCE = 1e-4


class Reference:
    """The checkpoint and its half-precision twin; scaling one tensor of them gives each variant."""

    def __init__(self) -> None:
        self._models = {is_half: _load(is_half=is_half) for is_half in (False, True)}
        self._weights = {is_half: _told_by(model).detach().clone() for is_half, model in self._models.items()}
        self._tokenizer = hf.AutoTokenizer.from_pretrained(TARGET)
        self._known: dict[tuple[Variant, int], torch.Tensor] = {}

    def is_right(self, variant: Variant, text: int, embedding: list[float]) -> bool:
        """Return whether an embedding is this variant's of a text, given by number."""
        return bool((torch.tensor(embedding) - self._expected(variant, text)).norm() < TOLERANCE)

    def _expected(self, variant: Variant, text: int) -> torch.Tensor:
        key = (variant, text)
        if key not in self._known:
            model, weight = self._models[variant.is_half], self._weights[variant.is_half]
            scaled = weight * scale_of(variant.number)
            _told_by(model).data = scaled.half().float() if variant.is_half else scaled
            with torch.inference_mode():
                hidden = model(**self._tokenizer(TEXTS[text], return_tensors="pt")).last_hidden_state[0]
            pooled = hidden[0] if variant.is_first else hidden.mean(0)
            self._known[key] = pooled / pooled.norm()
        return self._known[key]


def _load(*, is_half: bool) -> torch.nn.Module:
    model: torch.nn.Module = hf.AutoModel.from_pretrained(TARGET).eval()
    return model.half().float() if is_half else model


def _told_by(model: torch.nn.Module) -> torch.nn.Parameter:
    return model.get_parameter(SCALED_TENSOR)
