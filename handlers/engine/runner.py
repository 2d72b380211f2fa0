"""Runs one step on the device and returns a row of logits for each part of the batch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from handlers.engine.kv_cache import BlockPool, CacheShape, SequenceCache
from handlers.engine.scheduler import Work
from handlers.models.attention import PackedBatch, Part, Rows, in_place
from handlers.models.text import TextModel


class ModelRunner:
    """Makes tensors of scheduled work and runs the model. Engine thread only.

    is_row_batched: compute the attention of all decoding rows in one call. It costs copies and saves calls, which is
    what a GPU wants and a CPU does not.
    """

    def __init__(self, model: TextModel, kv_bytes: int, is_row_batched: bool | None = None) -> None:
        self.model = model
        self.pool = BlockPool(cache_shape(model), kv_bytes)
        self._is_row_batched = model.device.type != "cpu" if is_row_batched is None else is_row_batched

    @torch.inference_mode()
    def run(self, batch: Sequence[Work]) -> Tensor:
        """Logits after each part's last token, (parts, vocabulary) float32. Advances the caches when all went well."""
        device = self.model.device
        lengths = [len(work.tokens) for work in batch]
        first = [work.sequence.cache.length for work in batch]
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(first, lengths, strict=True)]).to(device)
        last = torch.tensor(lengths).cumsum(0).sub(1).to(device)
        logits = self.model.forward(self._embed(batch), positions, self._pack(batch), last)
        for work in batch:
            work.sequence.cache.advance(work.tokens)
        return logits

    @torch.inference_mode()
    def encode_image(self, pixels: Tensor) -> Tensor:
        """(image tokens, hidden size) on the device, from (1, channels, height, width) float32 on the CPU."""
        return self.model.encode_image(pixels.to(self.model.device, self.model.dtype))

    def _pack(self, batch: Sequence[Work]) -> PackedBatch:
        """Where in storage the batch's tokens go, and where what they attend to is."""
        ends = [work.sequence.cache.length + len(work.tokens) for work in batch]
        slots = [w.sequence.cache.slots[end - len(w.tokens) : end] for w, end in zip(batch, ends, strict=True)]
        num_rows = 0
        if self._is_row_batched:
            num_rows = next((i for i, work in enumerate(batch) if len(work.tokens) > 1), len(batch))
        rows = [w.sequence.cache.slots[:end] for w, end in zip(batch[:num_rows], ends, strict=False)]
        parts = [_part(work.sequence.cache, len(work.tokens)) for work in batch[num_rows:]]
        return PackedBatch(self.pool.storage, torch.cat(slots), parts, _rows(rows) if rows else None)

    def _embed(self, batch: Sequence[Work]) -> Tensor:
        """(T, hidden size): embedded token ids, with image features where an image stands."""
        ids = torch.tensor([max(token, 0) for work in batch for token in work.tokens], device=self.model.device)
        embeds = self.model.embed(ids)
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
        return embeds


def cache_shape(model: TextModel) -> CacheShape:
    """What a position of this model's KV cache is made of."""
    return CacheShape(model.num_layers, model.num_kv_heads, model.head_size, model.dtype, model.device)


def _part(cache: SequenceCache, num_tokens: int) -> Part:
    length = cache.length + num_tokens
    if cache.run is None:
        return Part(num_tokens, length, cache.slots[:length])
    return Part(num_tokens, length, in_place(cache.pool.storage, cache.run, length))


def _rows(slots: list[Tensor]) -> Rows:
    """slots: each row's own, (its length,)."""
    padded = pad_sequence(slots, batch_first=True, padding_value=-1)
    is_own = padded >= 0
    return Rows(torch.where(is_own, padded, padded[:, :1]), is_own[:, None, None])
