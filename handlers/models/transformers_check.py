"""Checks, while a model loads, that it gives the same logits here as in transformers.

The packed step replaces a model's attention and applies its output embeddings. A family that needs more (a cap on
attention scores or logits, other positions) would silently answer wrongly, so it becomes a PlainModel. A family that a
PlainModel does not compute either, for example one with a state beside the keys and values, is refused.
"""

from typing import Any

import torch
from torch import Tensor

from handlers.errors import SettingsError
from handlers.models.attention import DecodingRows, PackedBatch, PackedShare, in_place
from handlers.models.memory import is_out_of_memory
from handlers.models.text import TextModel

_LENGTHS = (5, 9)  # of two sequences; each step computes a part of both
_SPLIT = 3
# Relative to the norm of the logits. Summation order changes rounding: in bfloat16 by 0.01 to 0.2 after many layers.
TOLERANCE = 1e-3
TOLERANCE_16_BITS, MOST_16_BITS = 3e-2, 0.5
ROUNDINGS = 5.0  # in 16 bits, relative to what rounding changes in transformers itself


class TransformersCheck:
    """Keeps transformers' answers for comparison. Create it before the model's attention is replaced."""

    @torch.inference_mode()
    def __init__(self, model: Any) -> None:
        try:
            vocabulary = model.config.get_text_config().vocab_size
            device = next(model.parameters()).device
            generator = torch.Generator().manual_seed(0)
            # The lowest ids are often special.
            prompts = [torch.randint(vocabulary // 4, vocabulary, (n,), generator=generator) for n in _LENGTHS]
            self._prompts = [prompt.to(device) for prompt in prompts]
            self._expected = torch.stack([model(input_ids=ids[None]).logits[0, -1].float() for ids in self._prompts])
            self._tolerance = TOLERANCE if model.dtype is torch.float32 else self._measure_rounding(model)
        except Exception as exc:  # each of transformers' families fails in its own way
            if is_out_of_memory(exc):
                raise
            raise SettingsError(
                f"models of type {model.config.model_type} are not supported: their own forward pass in transformers "
                f"fails ({type(exc).__name__}: {str(exc)[:300]})"
            ) from exc
        if not self._expected.isfinite().all():
            raise SettingsError(
                "the model's logits are not finite: its weights are damaged, or the range of "
                f"{str(model.dtype).removeprefix('torch.')} is too small for it (handler.model.dtype)"
            )

    def _measure_rounding(self, model: Any) -> float:
        """Return the tolerance: by how much transformers' logits change if it reads the prompts in several steps."""
        try:
            found = [self._difference(self._read_in_steps(model, size)) for size in (1, 2, _SPLIT)]
        except (AttributeError, TypeError, ValueError):  # a family without such a cache
            return TOLERANCE_16_BITS
        return min(max(TOLERANCE_16_BITS, ROUNDINGS * max(found)), MOST_16_BITS)

    def _read_in_steps(self, model: Any, size: int) -> Tensor:
        """Return transformers' own logits after each prompt, read in steps of `size` tokens."""
        logits = []
        for ids in self._prompts:
            cache = None
            for part in ids.split(size):
                output = model(input_ids=part[None], past_key_values=cache, use_cache=True)
                cache = output.past_key_values
            logits.append(output.logits[0, -1].float())
        return torch.stack(logits)

    def check(self, model: TextModel) -> None:
        """Raise SettingsError if the model answers differently in the engine's steps."""
        difference = self.compare(model, as_rows=False) or self.compare(model, as_rows=True)
        if difference is not None:
            raise SettingsError(f"models of type {model.model.config.model_type} are not supported: {difference}")

    @torch.inference_mode()
    def compare(self, model: TextModel, *, as_rows: bool) -> str | None:
        """Return how the model's answers differ in the engine's steps, None if they do not.

        as_rows: with a last step of one token per row.
        """
        difference = self._difference(self._run(model, as_rows=as_rows))
        if difference <= self._tolerance:
            return None
        kind = "steps of one token per row" if as_rows else "steps of several tokens"
        return f"logits differ by {difference:.2g} of their size in {kind}"

    def _difference(self, found: Tensor) -> float:
        """Return the norm of the difference, relative to the norm of the logits about their mean."""
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
        rows: list[DecodingRows | None] = [None, None]
        if as_rows:
            steps.append([(n - 1, n) for n in _LENGTHS])
            rows.append(_rows(first, model.device) if model.is_packed else None)
        logits = self._expected
        for spans, own_rows in zip(steps, rows, strict=True):
            ids = [prompt[start:end] for prompt, (start, end) in zip(self._prompts, spans, strict=True)]
            positions = torch.cat([torch.arange(start, end) for start, end in spans]).to(model.device)
            places = [torch.arange(o + start, o + end) for o, (start, end) in zip(first, spans, strict=True)]
            last = torch.tensor([len(part) for part in ids]).cumsum(0).sub(1).to(model.device)
            shares = [
                PackedShare(end - start, end, in_place(storage, o, end))
                for o, (start, end) in zip(first, spans, strict=True)
            ]
            batch = PackedBatch(storage, torch.cat(places).to(model.device), [] if own_rows else shares, own_rows)
            logits = model.forward(model.embed(torch.cat(ids)), positions, batch, last)
        return logits


def _rows(first: list[int], device: torch.device) -> DecodingRows:
    """Return the whole prompts as decoding rows, in blocks of one position."""
    blocks = [torch.arange(o, o + n, dtype=torch.int32) for o, n in zip(first, _LENGTHS, strict=True)]
    table = torch.nn.utils.rnn.pad_sequence(blocks, batch_first=True)
    return DecodingRows(table.to(device), torch.tensor(_LENGTHS, dtype=torch.int32, device=device), 1)
