"""Attention over a packed batch: sequences of any length side by side, no padding.

A step's tokens lie one after the other in one row, (1, heads, sum of lengths, head size). Their keys and values are
stored first; then each sequence attends to its own stored positions only, so other sequences cannot change its result.
Registered with transformers under the name RAGGED; every model of the loader uses it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface

RAGGED = "torchmoor_ragged"


@dataclass(frozen=True, slots=True)
class PackedShare:
    """One sequence's share of a packed step.

    num_tokens: its tokens in the step; length: its stored positions, these included.
    context: where they are stored, oldest first: `in_place` if contiguous, else (length,) int64 slots, which each layer
    gathers.
    """

    num_tokens: int
    length: int
    context: Sequence[Tensor] | Tensor


def in_place(storage: Tensor, first: int, length: int) -> Sequence[Tensor]:
    """Return views of the slots from `first` on, for all layers of a step: the keys of layer 0, its values, ...

    Each view is (1, kv heads, length, head size).
    """
    return storage[:, :, None, :, first : first + length].flatten(0, 1).unbind(0)


@dataclass(frozen=True, slots=True)
class DecodingRows:
    """Sequences of one token each, computed in one call.

    table: (rows, blocks) int32, where each row's blocks of `block` positions are, in order; entries behind them are not
    read.
    lengths: (rows,) int32, each row's stored positions, at least 1.
    """

    table: Tensor
    lengths: Tensor
    block: int


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A step as attention sees it.

    storage: (layers, 2, kv heads, slots, head size); slots: (T,) int64, where the step's own tokens go.
    rows: the sequences at the beginning of the step that are computed together; shares: of the others, in order.
    """

    storage: Tensor
    slots: Tensor
    shares: Sequence[PackedShare]
    rows: DecodingRows | None = None


class PackedStep(Cache):
    """A cache without storage, which a transformers model needs during a packed step."""

    def __init__(self) -> None:
        super().__init__(layers=[])

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
    batch: PackedBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Apply causal attention of each share to its own cache.

    query: (1, heads, T, head size), key and value: (1, kv heads, T, head size), T the sum of the shares' tokens.
    Returns (1, T, heads, head size). Raises NotImplementedError for unsupported kinds of attention.
    """
    for name in ("softcap", "s_aux"):  # a cap on the scores, attention sinks
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")
    keys, values = batch.storage[module.layer_idx]
    keys.index_copy_(1, batch.slots, key[0])
    values.index_copy_(1, batch.slots, value[0])
    outputs = []
    if batch.rows is not None:
        num_rows = len(batch.rows.lengths)
        outputs.append(_attend_rows(query[:, :, :num_rows], keys, values, batch.rows, scaling, sliding_window))
        query = query[:, :, num_rows:]
    for share, own in zip(batch.shares, query.split([share.num_tokens for share in batch.shares], dim=2), strict=True):
        visible = min(share.length, sliding_window + share.num_tokens - 1) if sliding_window else share.length
        if isinstance(share.context, Tensor):
            slots = share.context[-visible:]
            stored = keys.index_select(1, slots)[None], values.index_select(1, slots)[None]
        else:
            stored = share.context[2 * module.layer_idx], share.context[2 * module.layer_idx + 1]
            if visible < share.length:
                stored = stored[0][:, :, -visible:], stored[1][:, :, -visible:]
        outputs.append(_attend(own, *stored, scaling, sliding_window))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _attend_rows(
    query: Tensor, keys: Tensor, values: Tensor, rows: DecodingRows, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """Compute one token per row, all rows at once. query: (1, heads, rows, d); keys, values: (kv heads, slots, d)."""
    folded = query[0].transpose(0, 1)
    if query.is_cuda:
        from handlers.models import paged_attention  # needs Triton, which comes with torch's CUDA builds

        attended = paged_attention.attend(
            folded, keys, values, rows.table, rows.lengths, rows.block, scaling, sliding_window
        )
    else:
        attended = _gather_rows(folded, keys, values, rows, scaling, sliding_window)
    return attended.transpose(0, 1)[None]


def _gather_rows(
    query: Tensor, keys: Tensor, values: Tensor, rows: DecodingRows, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """Return what paged_attention.attend returns, on any device. Pads all rows to the longest."""
    num_rows, num_heads, size = query.shape
    kv_heads = keys.shape[0]
    positions = torch.arange(int(rows.lengths.max()), device=query.device)
    is_own = positions < rows.lengths[:, None]
    slots = rows.table.long()[:, positions // rows.block] * rows.block + positions % rows.block
    slots = torch.where(is_own, slots, slots[:, :1])  # unused storage may hold NaN
    if sliding_window:
        is_own &= positions >= rows.lengths[:, None] - sliding_window
    keys, values = (
        stored.index_select(1, slots.flatten()).view(kv_heads, num_rows, -1, size).transpose(0, 1)
        for stored in (keys, values)
    )
    folded = query.reshape(num_rows, kv_heads, num_heads // kv_heads, size)
    mask = is_own[:, None, None]
    return F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling).reshape(query.shape)


def _attend(query: Tensor, keys: Tensor, values: Tensor, scaling: float | None, sliding_window: int | None) -> Tensor:
    """Attend with query (1, heads, t, d), the last t of n visible positions; keys and values: (1, kv heads, n, d)."""
    num_heads, num_tokens = query.shape[1:3]
    kv_heads, length = keys.shape[1:3]
    if num_tokens == 1:  # one query sees every key: fold its head groups into the query length, without a mask
        folded = query.view(1, kv_heads, num_heads // kv_heads, -1)
        return F.scaled_dot_product_attention(folded, keys, values, scale=scaling).view(1, num_heads, 1, -1)
    mask: Tensor | None = None
    if length > num_tokens and query.is_cuda and not sliding_window:
        mask = causal_lower_right(num_tokens, length)  # FlashAttention's own, which takes no memory
    elif length > num_tokens or sliding_window:
        rows = torch.arange(length - num_tokens, length, device=query.device)[:, None]
        columns = torch.arange(length, device=query.device)[None]
        mask = columns <= rows
        if sliding_window:
            mask &= columns > rows - sliding_window
    is_grouped = num_heads > kv_heads
    if is_grouped and query.is_cuda and (sliding_window or query.dtype is torch.float32):  # no fused kernel for these
        keys = keys.repeat_interleave(num_heads // kv_heads, dim=1)
        values = values.repeat_interleave(num_heads // kv_heads, dim=1)
        is_grouped = False
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=is_grouped
    )


AttentionInterface.register(RAGGED, ragged_attention)
AttentionMaskInterface.register(RAGGED, lambda *args, **kwargs: None)
