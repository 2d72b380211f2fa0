"""Attention of one new token per sequence to the blocks of its KV cache, as Triton kernels for GPUs.

`attend` starts a program for each sequence, key-value head and sixteenth of the context. Each part keeps its own
largest score and sum; a second kernel joins them. The grid depends on the number of sequences only, not on their
lengths. So a CUDA graph with these kernels stays valid while contexts grow, and a short sequence beside a long one
costs only its own positions.

Source: Dao, Haziza, Massa and Sizov 2023, "Flash-Decoding for long-context inference".
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TILE = 64  # positions that a program reads at a time
TILE_BYTES = 16 << 10  # of keys, and as much of values; twice that is on its way, and small GPUs have 99 KiB
PARTS = 16  # of a context, each read by a program of its own; constant, so that no step compiles another kernel
MIN_DOT = 16  # tl.dot takes no smaller matrix
LOG2_E = 1.4426950408889634


@triton.jit
def _attend_part(  # noqa: PLR0913  # a kernel has no objects to group its arguments in
    query,
    keys,
    values,
    table,
    lengths,
    outputs,
    peaks,
    sums,
    scale,
    query_row_stride,
    query_head_stride,
    storage_head_stride,
    table_stride,
    window,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(lengths + row)
    first = tl.maximum(length - window, 0)
    first_tile = first // TILE
    num_tiles = tl.cdiv(length, TILE) - first_tile
    tiles_per_part = tl.cdiv(num_tiles, PARTS)
    begin = first_tile + part * tiles_per_part
    end = tl.minimum(begin + tiles_per_part, first_tile + num_tiles)

    heads = tl.arange(0, PADDED_GROUP)
    dims = tl.arange(0, PADDED_SIZE)
    is_head = heads < GROUP
    is_dim = dims < SIZE
    all_heads = kv_head * GROUP + heads
    q = tl.load(
        query + row.to(tl.int64) * query_row_stride + all_heads[:, None] * query_head_stride + dims[None, :],
        mask=is_head[:, None] & is_dim[None, :],
        other=0.0,
    )
    storage_head = kv_head.to(tl.int64) * storage_head_stride
    peak = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    output = tl.zeros([PADDED_GROUP, PADDED_SIZE], tl.float32)
    for tile in range(begin, end):
        positions = tile * TILE + tl.arange(0, TILE)
        is_stored = (positions >= first) & (positions < length)
        blocks = tl.load(table + row.to(tl.int64) * table_stride + positions // BLOCK, mask=is_stored, other=0)
        slots = blocks.to(tl.int64) * BLOCK + positions % BLOCK
        where = storage_head + slots[:, None] * SIZE + dims[None, :]
        is_read = is_stored[:, None] & is_dim[None, :]
        k = tl.load(keys + where, mask=is_read, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(is_stored[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        v = tl.load(values + where, mask=is_read, other=0.0)
        output = output * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        peak = new_peak
    num_heads = tl.num_programs(1) * GROUP
    place = (row * num_heads + all_heads) * PARTS + part
    tl.store(peaks + place, peak, mask=is_head)
    tl.store(sums + place, total, mask=is_head)
    is_written = is_head[:, None] & is_dim[None, :] & (begin < end)
    tl.store(outputs + place.to(tl.int64)[:, None] * SIZE + dims[None, :], output, mask=is_written)


@triton.jit
def _join_parts(outputs, peaks, sums, joined, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, PARTS: tl.constexpr):
    row = tl.program_id(0)
    places = row * PARTS + tl.arange(0, PARTS)
    dims = tl.arange(0, PADDED_SIZE)
    is_dim = dims < SIZE
    peak = tl.load(peaks + places)
    is_read = (peak > float("-inf"))[:, None] & is_dim[None, :]
    weights = tl.exp2(peak - tl.max(peak, 0))  # 0 for a part without positions
    total = tl.sum(tl.load(sums + places) * weights, 0)
    part = tl.load(outputs + places.to(tl.int64)[:, None] * SIZE + dims[None, :], mask=is_read, other=0.0)
    output = tl.sum(part * weights[:, None], 0) / total
    tl.store(joined + row.to(tl.int64) * SIZE + dims, output.to(joined.dtype.element_ty), mask=is_dim)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    block: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Return (rows, heads, head size): each row's attention to its stored positions.

    query: (rows, heads, head size), with any strides between rows and heads.
    keys, values: (kv heads, slots, head size), contiguous within a head.
    table: (rows, blocks) int32, each row's blocks of `block` positions, in order; further entries are not read.
    lengths: (rows,) int32, each row's positions, at least 1.
    window: attend to this many newest positions only.
    """
    num_rows, num_heads, size = query.shape
    num_kv_heads = keys.shape[0]
    group = num_heads // num_kv_heads
    padded_size = max(MIN_DOT, triton.next_power_of_2(size))
    tile = min(MAX_TILE, max(MIN_DOT, TILE_BYTES // (padded_size * keys.element_size())))
    outputs = torch.empty((num_rows * num_heads, PARTS, size), dtype=torch.float32, device=query.device)
    peaks = torch.empty((num_rows * num_heads, PARTS), dtype=torch.float32, device=query.device)
    sums = torch.empty_like(peaks)
    _attend_part[(num_rows, num_kv_heads, PARTS)](
        query,
        keys,
        values,
        table,
        lengths,
        outputs,
        peaks,
        sums,
        (size**-0.5 if scaling is None else scaling) * LOG2_E,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        table.stride(0),
        window or 2**30,
        GROUP=group,
        PADDED_GROUP=max(MIN_DOT, triton.next_power_of_2(group)),
        SIZE=size,
        PADDED_SIZE=padded_size,
        BLOCK=block,
        TILE=tile,
        PARTS=PARTS,
        num_stages=2,
    )
    joined = torch.empty((num_rows, num_heads, size), dtype=query.dtype, device=query.device)
    _join_parts[(num_rows * num_heads,)](outputs, peaks, sums, joined, SIZE=size, PADDED_SIZE=padded_size, PARTS=PARTS)
    return joined
