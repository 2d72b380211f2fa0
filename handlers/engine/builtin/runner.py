"""Runs one step on the device and returns a row of logits for each share of the batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from handlers.engine.builtin.kv_cache import BLOCK, BlockPool, SequenceCache, cache_shape
from handlers.engine.builtin.row_steps import RowSteps
from handlers.engine.builtin.scheduler import StepShare
from handlers.models.attention import DecodingRows, PackedBatch, PackedShare, in_place
from handlers.models.lora import LoraAdapter
from handlers.models.text import TextModel


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step for each share of its batch.

    logits: (shares, vocabulary) float32 on the device, valid until the next step.
    greedy: the token of the largest logit; logprobs: its log probability, not finite if the model has failed.
    drawn: the rows of what `draw` returned, if anything.
    """

    logits: Tensor
    greedy: list[int]
    logprobs: list[float]
    drawn: list[list[float]]


class ModelRunner:
    """Makes tensors of scheduled work and runs the model. Engine thread only.

    max_rows: limit of sequences in a step. is_row_batched: compute the attention of all decoding rows in one call,
    which is faster on a GPU; a CPU is faster with one call per row. has_graphs: on a GPU, run steps of few tokens as
    CUDA graphs. has_prompt_rows: let a short prompt take a row per token; None: where that is faster.
    """

    def __init__(
        self,
        model: TextModel,
        kv_bytes: int,
        max_rows: int = 64,
        is_row_batched: bool | None = None,
        *,
        has_graphs: bool = True,
        has_prompt_rows: bool | None = None,
    ) -> None:
        self.model = model
        if is_row_batched is None:
            is_row_batched = model.is_packed and model.device.type != "cpu"
        self.pool = BlockPool(cache_shape(model), kv_bytes, num_spare=int(is_row_batched))
        self._row_steps: RowSteps | None = None
        if is_row_batched:
            self._row_steps = RowSteps(model, self.pool, max_rows, has_graphs=has_graphs, has_prompts=has_prompt_rows)

    def close(self) -> None:
        """Free the memory of the KV cache and the graphs. No step may follow."""
        self._row_steps = None
        self.pool.close()

    @torch.inference_mode()
    def run(self, batch: Sequence[StepShare], draw: Callable[[Tensor], Tensor | None]) -> StepResult:
        """Compute the batch. Advances the caches when the device has computed everything without an error.

        draw: called with the logits, which the device may not have computed yet, so that its work is queued meanwhile;
        what it returns, (n, 2) float64, is read together with the results.
        """
        adapted = _find_adapted(batch)
        shares = [(share.tokens, share.sequence.cache) for share in batch]
        if self._row_steps is not None and not adapted and self._row_steps.takes(shares):  # graphs have no adapters
            logits = self._row_steps.run(shares)
        elif adapted and self.model.adapted is not None:
            with self.model.adapted.adding(adapted):
                logits = self._forward(batch)
        else:
            logits = self._forward(batch)
        greedy = logits.argmax(dim=-1, keepdim=True)
        logprobs = logits.gather(1, greedy).double() - logits.logsumexp(dim=-1, keepdim=True).double()
        values, drawn = torch.cat((greedy.double(), logprobs), dim=-1), draw(logits)
        read = (values if drawn is None else torch.cat((values, drawn))).tolist()  # waits for the device
        for share in batch:
            share.sequence.cache.advance(share.tokens)
        num_rows = len(batch)
        found = read[:num_rows]
        return StepResult(logits, [int(row[0]) for row in found], [row[1] for row in found], read[num_rows:])

    @torch.inference_mode()
    def encode_image(self, pixels: Tensor) -> Tensor:
        """Return features, (image tokens, hidden size) on the device.

        pixels: (1, channels, height, width) float32, CPU.
        """
        return self.model.encode_image(pixels.to(self.model.device, self.model.dtype))

    def _forward(self, batch: Sequence[StepShare]) -> Tensor:
        """Return logits after each share's last token, (shares, vocabulary) float32."""
        lengths = [len(share.tokens) for share in batch]
        starts = [share.sequence.cache.length for share in batch]
        ids = [max(token, 0) for share in batch for token in share.tokens]
        positions = [p for start, n in zip(starts, lengths, strict=True) for p in range(start, start + n)]
        inputs = torch.tensor([*ids, *positions, *lengths], pin_memory=self.model.device.type == "cuda")
        inputs = inputs.to(self.model.device, non_blocking=True)  # one transfer of all three
        num_tokens = len(ids)
        embeds = self.model.embed(inputs[:num_tokens])
        _place_features(embeds, batch)
        last = inputs[2 * num_tokens :].cumsum(0).sub(1)
        return self.model.forward(embeds, inputs[num_tokens : 2 * num_tokens], self._pack(batch), last)

    def _pack(self, batch: Sequence[StepShare]) -> PackedBatch:
        """Return where in storage the batch's tokens are written, and which positions they attend to."""
        ends = [share.sequence.cache.length + len(share.tokens) for share in batch]
        slots = [w.sequence.cache.slots[end - len(w.tokens) : end] for w, end in zip(batch, ends, strict=True)]
        num_rows, rows = 0, None
        if self._row_steps is not None:
            num_rows = next((i for i, share in enumerate(batch) if len(share.tokens) > 1), len(batch))
            if num_rows:
                table = self._row_steps.table.set([share.sequence.cache for share in batch[:num_rows]], num_rows)
                lengths = torch.tensor(ends[:num_rows], dtype=torch.int32, device=self.model.device)
                rows = DecodingRows(table, lengths, BLOCK)
        shares = [_packed(share.sequence.cache, len(share.tokens)) for share in batch[num_rows:]]
        return PackedBatch(self.pool.storage, torch.cat(slots), shares, rows)


def _place_features(embeds: Tensor, batch: Sequence[StepShare]) -> None:
    """Write image features into the images' positions of `embeds`, (T, hidden size), the batch's embeddings."""
    offset = 0
    for share in batch:
        start = share.sequence.cache.length
        end = start + len(share.tokens)
        for placed in share.sequence.images:
            features = placed.features
            assert isinstance(features, Tensor)  # the engine's `encode` has returned them
            first, last = max(start, placed.start), min(end, placed.start + len(features))
            if first < last:
                at = offset - start
                embeds[at + first : at + last] = features[first - placed.start : last - placed.start]
        offset += len(share.tokens)


def _find_adapted(batch: Sequence[StepShare]) -> list[tuple[slice, LoraAdapter]]:
    """Return the runs of the batch's tokens that have an adapter, each with its adapter."""
    found: list[tuple[slice, LoraAdapter]] = []
    end = 0
    for share in batch:
        start, end = end, end + len(share.tokens)
        adapter = share.sequence.adapter
        if adapter is None:
            continue
        if found and found[-1][1] is adapter and found[-1][0].stop == start:
            start = found.pop()[0].start
        found.append((slice(start, end), adapter))
    return found


def _packed(cache: SequenceCache, num_tokens: int) -> PackedShare:
    length = cache.length + num_tokens
    if cache.run is None:
        return PackedShare(num_tokens, length, cache.slots[:length])
    return PackedShare(num_tokens, length, in_place(cache.pool.storage, cache.run, length))
