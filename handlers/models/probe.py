"""Checks during the load that a model computes here what it computes in transformers.

The packed step replaces a model's attention and applies its output embeddings. A family that needs more (a cap on
attention scores or logits, a state beside the keys and values, other positions) would silently answer wrongly, so it
is refused.
"""

from typing import Any

import torch
from torch import Tensor

from handlers.errors import SettingsError
from handlers.models.attention import PackedBatch, Part, Rows, in_place
from handlers.models.text import TextModel

_LENGTHS = (5, 9)  # of two sequences; each step computes a part of both
_SPLIT = 3
# In parts of the logits' norm. The order of summation changes rounding: in 16 bits by about 1e-2 after many layers.
TOLERANCE = 1e-3
TOLERANCE_16_BITS = 3e-2
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
        for kind, as_rows in (("packed steps", False), ("steps of one token per row", True)):
            difference = self._difference(self._run(model, as_rows=as_rows))
            if not difference <= (TOLERANCE if model.dtype is torch.float32 else TOLERANCE_16_BITS):
                raise SettingsError(
                    f"models of type {model.model.config.model_type} are not supported: logits differ by "
                    f"{difference:.2g} of their size in {kind}"
                )

    def _difference(self, found: Tensor) -> float:
        """Return the norm of the difference, in parts of the norm of the logits about their mean."""
        size = (self._expected - self._expected.mean(dim=-1, keepdim=True)).norm()
        return float((found - self._expected).norm() / size)

    def _run(self, model: TextModel, *, as_rows: bool) -> Tensor:
        """Return the logits after each prompt, computed packed and in several steps.

        as_rows: the last token of each prompt is computed as a decoding row.
        """
        first = [sum(_LENGTHS[:i]) for i in range(len(_LENGTHS))]  # where in storage each prompt lies
        size = (model.num_layers, 2, model.num_kv_heads, sum(_LENGTHS), model.head_size)
        storage = torch.zeros(size, dtype=model.dtype, device=model.device)
        steps = [[(0, _SPLIT)] * len(_LENGTHS), [(_SPLIT, n - as_rows) for n in _LENGTHS]]
        rows: list[Rows | None] = [None, None]
        if as_rows:
            steps.append([(n - 1, n) for n in _LENGTHS])
            rows.append(_rows(first, model.device))
        logits = self._expected
        for spans, own_rows in zip(steps, rows, strict=True):
            ids = [prompt[start:end] for prompt, (start, end) in zip(self._prompts, spans, strict=True)]
            positions = torch.cat([torch.arange(start, end) for start, end in spans]).to(model.device)
            places = [torch.arange(o + start, o + end) for o, (start, end) in zip(first, spans, strict=True)]
            last = torch.tensor([len(part) for part in ids]).cumsum(0).sub(1).to(model.device)
            parts = [
                Part(end - start, end, in_place(storage, o, end)) for o, (start, end) in zip(first, spans, strict=True)
            ]
            batch = PackedBatch(storage, torch.cat(places).to(model.device), [] if own_rows else parts, own_rows)
            logits = model.forward(model.embed(torch.cat(ids)), positions, batch, last)
        return logits


def _rows(first: list[int], device: torch.device) -> Rows:
    """Return the whole prompts as decoding rows, in blocks of one position."""
    blocks = [torch.arange(o, o + n, dtype=torch.int32) for o, n in zip(first, _LENGTHS, strict=True)]
    table = torch.nn.utils.rnn.pad_sequence(blocks, batch_first=True)
    return Rows(table.to(device), torch.tensor(_LENGTHS, dtype=torch.int32, device=device), 1)
