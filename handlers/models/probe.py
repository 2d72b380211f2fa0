"""Checks during the load that a model computes here what it computes in transformers.

The packed step replaces a model's attention and applies its output embeddings. A family that needs more (a cap on
attention scores or logits, a state beside the keys and values, other positions) would silently answer wrongly, so it
is refused.
"""

from typing import Any

import torch
from torch import Tensor

from handlers.errors import SettingsError
from handlers.models.attention import PackedBatch, Part, in_place
from handlers.models.text import TextModel

_LENGTHS = (5, 9)  # of two sequences; each step computes a part of both
_SPLIT = 3
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")  # frequencies follow the longest sequence of a step


class Probe:
    """Keeps transformers' answers for comparison. Create it before the model's attention is replaced."""

    @torch.inference_mode()
    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or {}
        kinds = {rope.get("rope_type")} | {r.get("rope_type") for r in rope.values() if isinstance(r, dict)}
        if kinds & set(_BATCH_DEPENDENT_ROPE):
            raise SettingsError("models whose rope frequencies follow the length of the batch are not supported")
        generator = torch.Generator().manual_seed(0)
        first, last = config.vocab_size // 4, config.vocab_size  # the lowest ids are often special
        device = next(model.parameters()).device
        self._prompts = [torch.randint(first, last, (n,), generator=generator).to(device) for n in _LENGTHS]
        self._expected = torch.stack([model(input_ids=ids[None]).logits[0, -1].float() for ids in self._prompts])

    @torch.inference_mode()
    def check(self, model: TextModel) -> None:
        """Raise SettingsError if the model answers differently in packed steps."""
        found = self._run(model)
        # The order of summation changes half precision's rounding; a real difference is as large as the logits.
        tolerance = (1e-3 if model.dtype is torch.float32 else 0.1) * float(self._expected.abs().max())
        difference = float((found - self._expected).abs().max())
        if not difference <= tolerance:
            kind = model.model.config.model_type
            raise SettingsError(
                f"models of type {kind} are not supported: logits differ by {difference:.3g} in packed steps"
            )

    def _run(self, model: TextModel) -> Tensor:
        """Return the logits after each prompt, computed packed and in two steps."""
        offsets = [sum(_LENGTHS[:i]) for i in range(len(_LENGTHS))]  # where in storage each prompt lies
        size = (model.num_layers, 2, model.num_kv_heads, sum(_LENGTHS), model.head_size)
        storage = torch.zeros(size, dtype=model.dtype, device=model.device)
        logits = self._expected
        for start, end in ((0, _SPLIT), (_SPLIT, None)):
            ids = [prompt[start:end] for prompt in self._prompts]
            positions = torch.cat([torch.arange(start, start + len(part)) for part in ids]).to(model.device)
            slots = torch.cat(
                [torch.arange(o + start, o + start + len(part)) for o, part in zip(offsets, ids, strict=True)]
            ).to(model.device)
            last = torch.tensor([len(part) for part in ids]).cumsum(0).sub(1).to(model.device)
            parts = [
                Part(len(part), start + len(part), in_place(storage, o, start + len(part)))
                for o, part in zip(offsets, ids, strict=True)
            ]
            logits = model.forward(model.embed(torch.cat(ids)), positions, PackedBatch(storage, slots, parts), last)
        return logits
