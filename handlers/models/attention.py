"""Attention over a packed batch: sequences of any length side by side, no padding.

A step's tokens lie one after the other in one row, (1, heads, sum of lengths, head size). Each sequence
attends to its own cache only, so what else is in the batch cannot change its result. Registered with
transformers under the name RAGGED and used by every model the loader prepares.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface

RAGGED = "torchmoor_ragged"


class LayerCache(Protocol):
    """Where one sequence's keys and values are kept."""

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store (1, kv heads, new tokens, head size) and return all of the layer's, old and new."""
        ...


class PackedStep(Cache):
    """What a transformers model sees as its cache during one packed step: it stores nothing itself."""

    def __init__(self, parts: Sequence[tuple[LayerCache, int]]) -> None:
        super().__init__(layers=[])
        self.parts = parts  # (a sequence's cache, its number of tokens in this step), in packed order

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


def ragged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    parts: Sequence[tuple[LayerCache, int]] = (),
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each part to its own cache.

    query: (1, heads, T, head size), key and value: (1, kv heads, T, head size), T the sum of the parts' tokens.
    Returns (1, T, heads, head size). Raises NotImplementedError for what it would have to leave out.
    """
    for name in ("softcap", "s_aux"):  # a cap on the scores, attention sinks
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")
    outputs, start = [], 0
    for cache, num_tokens in parts:
        window = slice(start, start + num_tokens)
        start += num_tokens
        keys, values = cache.append(module.layer_idx, key[:, :, window], value[:, :, window])
        outputs.append(_attend(query[:, :, window], keys, values, scaling, sliding_window))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _attend(query: Tensor, keys: Tensor, values: Tensor, scaling: float | None, sliding_window: int | None) -> Tensor:
    """query: (1, heads, t, d) are the last t of the n positions in keys and values, (1, kv heads, n, d)."""
    num_heads, num_tokens = query.shape[1:3]
    kv_heads = keys.shape[1]
    if sliding_window and keys.shape[2] > sliding_window + num_tokens - 1:
        keys = keys[:, :, -(sliding_window + num_tokens - 1) :]
        values = values[:, :, -(sliding_window + num_tokens - 1) :]
    length = keys.shape[2]
    if num_tokens == 1:  # one query sees every key: fold its head groups into the query length, no mask, no copy
        folded = query.view(1, kv_heads, num_heads // kv_heads, -1)
        return F.scaled_dot_product_attention(folded, keys, values, scale=scaling).view(1, num_heads, 1, -1)
    mask = None
    if length > num_tokens or sliding_window:
        rows = torch.arange(length - num_tokens, length, device=query.device)[:, None]
        columns = torch.arange(length, device=query.device)[None]
        mask = columns <= rows
        if sliding_window:
            mask &= columns > rows - sliding_window
    is_grouped = num_heads > kv_heads
    if is_grouped and mask is not None and query.is_cuda:  # no fused CUDA kernel takes both groups and a mask
        keys = keys.repeat_interleave(num_heads // kv_heads, dim=1)
        values = values.repeat_interleave(num_heads // kv_heads, dim=1)
        is_grouped = False
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=is_grouped
    )


AttentionInterface.register(RAGGED, ragged_attention)
AttentionMaskInterface.register(RAGGED, lambda *args, **kwargs: None)
