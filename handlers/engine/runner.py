"""Runs one step on the device and returns a row of logits for each part of the batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from handlers.engine.decode_steps import BlockTable, DecodeSteps
from handlers.engine.kv_cache import BLOCK, BlockPool, CacheShape, SequenceCache, num_blocks
from handlers.engine.scheduler import Work
from handlers.models.attention import PackedBatch, Part, Rows, in_place
from handlers.models.text import TextModel


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step has computed for each part of its batch.

    logits: (parts, vocabulary) float32 on the device, valid until the next step.
    greedy: the token of the largest logit; logprobs: its log probability, not finite if the model has failed.
    """

    logits: Tensor
    greedy: list[int]
    logprobs: list[float]


class ModelRunner:
    """Makes tensors of scheduled work and runs the model. Engine thread only.

    max_rows: the most sequences in a step.
    is_row_batched: compute the attention of all decoding rows in one call, which is what a GPU wants; a CPU is faster
    with one call per row.
    has_graphs: on a GPU, run decoding steps as CUDA graphs.
    """

    def __init__(
        self,
        model: TextModel,
        kv_bytes: int,
        max_rows: int = 64,
        is_row_batched: bool | None = None,
        *,
        has_graphs: bool = True,
    ) -> None:
        self.model = model
        is_row_batched = model.device.type != "cpu" if is_row_batched is None else is_row_batched
        self.pool = BlockPool(cache_shape(model), kv_bytes, num_spare=int(is_row_batched))
        self._table: BlockTable | None = None
        self._decode_steps: DecodeSteps | None = None
        if is_row_batched:
            self._table = BlockTable(self.pool, max_rows, num_blocks(model.max_context))
            self._decode_steps = DecodeSteps(model, self.pool, self._table, max_rows, has_graphs=has_graphs)

    def close(self) -> None:
        """Free the memory of the KV cache and the graphs. No step may follow."""
        self._decode_steps = self._table = None
        self.pool.close()

    @torch.inference_mode()
    def run(self, batch: Sequence[Work]) -> StepResult:
        """Compute the batch. Advances the caches when the device has computed everything without an error."""
        if self._decode_steps is not None and all(not work.sequence.is_prefilling for work in batch):
            tokens = [work.tokens[0] for work in batch]
            logits = self._decode_steps.run(tokens, [work.sequence.cache for work in batch])
        else:
            logits = self._forward(batch)
        greedy = logits.argmax(dim=-1, keepdim=True)
        logprobs = logits.gather(1, greedy).double() - logits.logsumexp(dim=-1, keepdim=True).double()
        chosen, logprob = torch.stack((greedy[:, 0].double(), logprobs[:, 0])).tolist()  # waits for the device
        for work in batch:
            work.sequence.cache.advance(work.tokens)
        return StepResult(logits, [int(token) for token in chosen], logprob)

    @torch.inference_mode()
    def encode_image(self, pixels: Tensor) -> Tensor:
        """(image tokens, hidden size) on the device, from (1, channels, height, width) float32 on the CPU."""
        return self.model.encode_image(pixels.to(self.model.device, self.model.dtype))

    def _forward(self, batch: Sequence[Work]) -> Tensor:
        """Return logits after each part's last token, (parts, vocabulary) float32."""
        lengths = [len(work.tokens) for work in batch]
        starts = [work.sequence.cache.length for work in batch]
        ids = [max(token, 0) for work in batch for token in work.tokens]
        positions = [p for start, n in zip(starts, lengths, strict=True) for p in range(start, start + n)]
        inputs = torch.tensor([*ids, *positions, *lengths], pin_memory=self.model.device.type == "cuda")
        inputs = inputs.to(self.model.device, non_blocking=True)  # one transfer of all three
        num_tokens = len(ids)
        embeds = self.model.embed(inputs[:num_tokens])
        _place_features(embeds, batch)
        last = inputs[2 * num_tokens :].cumsum(0).sub(1)
        return self.model.forward(embeds, inputs[num_tokens : 2 * num_tokens], self._pack(batch), last)

    def _pack(self, batch: Sequence[Work]) -> PackedBatch:
        """Where in storage the batch's tokens go, and where what they attend to is."""
        ends = [work.sequence.cache.length + len(work.tokens) for work in batch]
        slots = [w.sequence.cache.slots[end - len(w.tokens) : end] for w, end in zip(batch, ends, strict=True)]
        num_rows, rows = 0, None
        if self._table is not None:
            num_rows = next((i for i, work in enumerate(batch) if len(work.tokens) > 1), len(batch))
        if num_rows and self._table is not None:
            table = self._table.set([work.sequence.cache for work in batch[:num_rows]], num_rows)
            rows = Rows(table, torch.tensor(ends[:num_rows], dtype=torch.int32, device=self.model.device), BLOCK)
        parts = [_part(work.sequence.cache, len(work.tokens)) for work in batch[num_rows:]]
        return PackedBatch(self.pool.storage, torch.cat(slots), parts, rows)


def _place_features(embeds: Tensor, batch: Sequence[Work]) -> None:
    """Put image features where an image stands. embeds: (T, hidden size), of the batch's tokens."""
    offset = 0
    for work in batch:
        start = work.sequence.cache.length
        end = start + len(work.tokens)
        for span in work.sequence.images:
            first, last = max(start, span.start), min(end, span.start + span.length)
            if first < last:
                at = offset - start
                embeds[at + first : at + last] = span.features[first - span.start : last - span.start]
        offset += len(work.tokens)


def cache_shape(model: TextModel) -> CacheShape:
    """What a position of this model's KV cache is made of."""
    return CacheShape(model.num_layers, model.num_kv_heads, model.head_size, model.dtype, model.device)


def _part(cache: SequenceCache, num_tokens: int) -> Part:
    length = cache.length + num_tokens
    if cache.run is None:
        return Part(num_tokens, length, cache.slots[:length])
    return Part(num_tokens, length, in_place(cache.pool.storage, cache.run, length))
