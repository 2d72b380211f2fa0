"""Compare the attention kernel with attention row by row.

Run with TRITON_INTERPRET=1, which Triton reads when it is imported. tests/gpu uses `difference` on a GPU.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 16
LENGTHS = (1, 15, 16, 17, 200, 64, 65, 130)


class Case(NamedTuple):
    """size: of a head. window and scaling: None for no window and for the usual scaling."""

    num_heads: int
    num_kv_heads: int
    size: int
    window: int | None = None
    scaling: float | None = None


CASES = (
    Case(4, 4, 64),
    Case(6, 2, 64, scaling=0.3),
    Case(4, 1, 80),  # a head size beside the powers of two
    Case(2, 2, 16, window=20),
    Case(17, 1, 16, window=100),  # more heads than the smallest matrix has rows
)


def attend_row_by_row(query: Tensor, storage: Tensor, table: Tensor, lengths: Sequence[int], case: Case) -> Tensor:
    rows = []
    for row, length in enumerate(lengths):
        positions = torch.arange(length)[-(case.window or length) :]
        keys, values = storage[:, :, slots_of(table[row], positions)]
        attended = F.scaled_dot_product_attention(
            query[row][:, None], keys, values, scale=case.scaling, enable_gqa=True
        )
        rows.append(attended[:, 0])
    return torch.stack(rows)


def slots_of(blocks: Tensor, positions: Tensor) -> Tensor:
    return blocks.long()[positions // BLOCK] * BLOCK + positions % BLOCK


def difference(
    case: Case, lengths: Sequence[int] = LENGTHS, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> float:
    """Return the norm of the difference relative to the norm of the result.

    Blocks are scattered, and storage that no sequence has written holds NaN.
    """
    from handlers.models import paged_attention  # needs Triton

    generator = torch.Generator().manual_seed(3)
    num_blocks = -(-max(lengths) // BLOCK)
    table = torch.randperm(len(lengths) * num_blocks, generator=generator).view(len(lengths), num_blocks).int()
    shape = (2, case.num_kv_heads, (len(lengths) * num_blocks + 1) * BLOCK, case.size)
    storage = torch.full(shape, float("nan"), dtype=dtype)
    for row, length in enumerate(lengths):
        written = torch.randn(2, case.num_kv_heads, length, case.size, generator=generator)
        storage[:, :, slots_of(table[row], torch.arange(length))] = written.to(dtype)
    query = torch.randn(case.num_heads, len(lengths), case.size, generator=generator).to(dtype).transpose(0, 1)
    keys, values = storage.to(device)
    found = paged_attention.attend(
        query.to(device),
        keys,
        values,
        table.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        BLOCK,
        case.scaling,
        case.window,
    )
    expected = attend_row_by_row(query.float(), storage.float(), table, lengths, case)
    return float((found.float().cpu() - expected).norm() / expected.norm())


def main() -> None:
    from handlers.models import paged_attention

    for num_parts in (1, 4):  # contexts in one part, and in many, some of them empty
        paged_attention.PARTS = num_parts
        for case in CASES:
            found = difference(case)
            if not found < 1e-5:
                raise SystemExit(f"{case} in {num_parts} parts differs by {found}")
    print("equal")


if __name__ == "__main__":
    main()
