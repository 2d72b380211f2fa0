"""Whether a checkpoint computes here what it computes in transformers; asked once, while it is loaded.

The packed step replaces a model's attention and applies its output embeddings itself. A family that does more than
that (a cap on attention scores or logits, a state beside the keys and values, positions of another kind) would give
wrong answers in silence, so it is refused instead.
"""

from typing import Any

import torch
from torch import Tensor

from handlers.errors import ConfigError
from handlers.models.text import TextModel

_LENGTHS = (5, 9)  # two sequences, of which each step computes a part
_SPLIT = 3
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")  # their frequencies follow the longest sequence of a step


class _Layers:
    """A cache that grows by concatenation."""

    def __init__(self) -> None:
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self._stored:
            old_keys, old_values = self._stored[layer]
            keys, values = torch.cat([old_keys, keys], dim=2), torch.cat([old_values, values], dim=2)
        self._stored[layer] = (keys, values)
        return keys, values


class Probe:
    """Made before the model's attention is replaced: it keeps transformers' own answers to compare with."""

    @torch.inference_mode()
    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or {}
        kinds = {rope.get("rope_type")} | {r.get("rope_type") for r in rope.values() if isinstance(r, dict)}
        if kinds & set(_BATCH_DEPENDENT_ROPE):
            raise ConfigError("models whose rope frequencies follow the length of the batch are not supported")
        generator = torch.Generator().manual_seed(0)
        first, last = config.vocab_size // 4, config.vocab_size  # the lowest ids are often special
        device = next(model.parameters()).device
        self._prompts = [torch.randint(first, last, (n,), generator=generator).to(device) for n in _LENGTHS]
        self._expected = torch.stack([model(input_ids=ids[None]).logits[0, -1].float() for ids in self._prompts])

    @torch.inference_mode()
    def check(self, model: TextModel) -> None:
        """Raises ConfigError if the model answers otherwise in packed steps, or cannot render a conversation."""
        if not model.template.chat_template:
            raise ConfigError("the checkpoint has no chat template; add a chat_template.jinja to it")
        found = self._run(model)
        # Half precision rounds otherwise in another order of summation; a real difference is of the logits' own size.
        tolerance = (1e-3 if model.dtype is torch.float32 else 0.1) * float(self._expected.abs().max())
        difference = float((found - self._expected).abs().max())
        if not difference <= tolerance:
            kind = model.model.config.model_type
            raise ConfigError(
                f"models of type {kind} are not supported: logits differ by {difference:.3g} in packed steps"
            )

    def _run(self, model: TextModel) -> Tensor:
        """Logits after each prompt, all prompts packed, in two steps."""
        caches = [_Layers() for _ in self._prompts]
        logits = self._expected
        for start, end in ((0, _SPLIT), (_SPLIT, None)):
            parts = [ids[start:end] for ids in self._prompts]
            positions = torch.cat([torch.arange(start, start + len(ids)) for ids in parts]).to(model.device)
            lengths = [len(ids) for ids in parts]
            last = torch.tensor(lengths).cumsum(0).sub(1).to(model.device)
            pairs = list(zip(caches, lengths, strict=True))
            logits = model.forward(model.embed(torch.cat(parts)), positions, pairs, last)
        return logits
