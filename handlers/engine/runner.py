"""One step on the device: a batch of work in, one row of logits for each part out."""

import torch
from torch import Tensor

from handlers.engine.kv_cache import CacheShape
from handlers.engine.scheduler import Work
from handlers.models.text import TextModel


class ModelRunner:
    """Turns scheduled work into tensors. Engine thread only."""

    def __init__(self, model: TextModel) -> None:
        self.model = model
        self.cache_shape = CacheShape(model.num_layers, model.num_kv_heads, model.head_size, model.dtype, model.device)

    @torch.inference_mode()
    def run(self, batch: list[Work]) -> Tensor:
        """Logits after each part's last token, (parts, vocabulary) float32. Advances the caches when all went well."""
        device = self.model.device
        embeds = torch.cat([self._embed(work) for work in batch])
        positions = torch.cat(
            [torch.arange(w.sequence.cache.length, w.sequence.cache.length + len(w.tokens)) for w in batch]
        ).to(device)
        lengths = [len(work.tokens) for work in batch]
        last = torch.tensor(lengths).cumsum(0).sub(1).to(device)
        parts = [(work.sequence.cache, len(work.tokens)) for work in batch]
        logits = self.model.forward(embeds, positions, parts, last)
        for work in batch:
            work.sequence.cache.advance(work.tokens)
        return logits

    @torch.inference_mode()
    def encode_image(self, pixels: Tensor) -> Tensor:
        """pixels: (1, channels, height, width) on the device. Returns (image tokens, hidden size)."""
        return self.model.encode_image(pixels)

    def _embed(self, work: Work) -> Tensor:
        """(tokens, hidden size): embedded token ids, with image features where an image stands."""
        ids = torch.tensor([max(token, 0) for token in work.tokens], device=self.model.device)
        embeds = self.model.embed(ids)
        start, end = work.sequence.cache.length, work.sequence.cache.length + len(work.tokens)
        for span in work.sequence.images:
            first, last = max(start, span.start), min(end, span.start + len(span.features))
            if first < last:
                embeds[first - start : last - start] = span.features[first - span.start : last - span.start]
        return embeds
