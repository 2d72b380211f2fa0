"""One step on the device: a batch of work in, one row of logits for each part out."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from handlers.engine.kv_cache import BlockPool, CacheShape, SequenceCache
from handlers.engine.scheduler import Work
from handlers.models.attention import PackedBatch, Part, Rows
from handlers.models.text import TextModel


class ModelRunner:
    """Turns scheduled work into tensors. Engine thread only.

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
        parts = [_part(work.sequence.cache, len(work.tokens)) for work in batch]
        slots = torch.cat(
            [w.sequence.cache.slots[p.length - p.num_tokens : p.length] for w, p in zip(batch, parts, strict=True)]
        )
        rows = None
        num_rows = next((i for i, part in enumerate(parts) if part.num_tokens > 1), len(parts))
        if self._is_row_batched and num_rows > 1:
            rows = _rows([w.sequence.cache.slots[: p.length] for w, p in zip(batch[:num_rows], parts, strict=False)])
        return PackedBatch(self.pool.storage, slots, parts, rows)

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
    context = cache.slots[:length] if cache.run is None else slice(cache.run, cache.run + length)
    return Part(num_tokens, length, context)


def _rows(slots: list[Tensor]) -> Rows:
    """slots: each row's own, (its length,)."""
    padded = pad_sequence(slots, batch_first=True, padding_value=-1)
    is_own = padded >= 0
    return Rows(torch.where(is_own, padded, padded[:, :1]), is_own[:, None, None])
