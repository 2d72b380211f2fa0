"""Compares the attention kernel with attention row by row.

Run with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from handlers.models import paged_attention

BLOCK = 16
LENGTHS = (1, 15, 16, 17, 200, 64, 65, 130)
# query heads, kv heads, head size, window, scaling
CASES: tuple[tuple[int, int, int, int | None, float | None], ...] = (
    (4, 4, 64, None, None),
    (6, 2, 64, None, 0.3),
    (4, 1, 80, None, None),  # a head size beside the powers of two
    (2, 2, 16, 20, None),
    (17, 1, 16, 100, None),  # more heads than the smallest matrix has rows
)


def attend_row_by_row(
    query: Tensor, storage: Tensor, table: Tensor, window: int | None, scaling: float | None
) -> Tensor:
    rows = []
    for row, length in enumerate(LENGTHS):
        positions = torch.arange(length)[-(window or length) :]
        slots = table[row].long()[positions // BLOCK] * BLOCK + positions % BLOCK
        keys, values = storage[:, :, slots]
        attended = F.scaled_dot_product_attention(query[row][:, None], keys, values, scale=scaling, enable_gqa=True)
        rows.append(attended[:, 0])
    return torch.stack(rows)


def difference(num_heads: int, num_kv_heads: int, size: int, window: int | None, scaling: float | None) -> float:
    """Return the largest difference, with scattered blocks and NaN in storage that no sequence has written."""
    generator = torch.Generator().manual_seed(3)
    num_blocks = -(-max(LENGTHS) // BLOCK)
    table = torch.randperm(len(LENGTHS) * num_blocks, generator=generator).view(len(LENGTHS), num_blocks).int()
    storage = torch.full((2, num_kv_heads, (len(LENGTHS) * num_blocks + 1) * BLOCK, size), float("nan"))
    for row, length in enumerate(LENGTHS):
        slots = table[row].long()[torch.arange(length) // BLOCK] * BLOCK + torch.arange(length) % BLOCK
        storage[:, :, slots] = torch.randn(2, num_kv_heads, length, size, generator=generator)
    query = torch.randn(num_heads, len(LENGTHS), size, generator=generator).transpose(0, 1)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    keys, values = storage
    found = paged_attention.attend(query, keys, values, table, lengths, BLOCK, scaling, window)
    return float((found - attend_row_by_row(query, storage, table, window, scaling)).abs().max())


def main() -> None:
    for num_parts in (1, 4):  # contexts in one part, and in many, some of them empty
        paged_attention.PARTS = num_parts
        for case in CASES:
            found = difference(*case)
            if not found < 1e-5:
                raise SystemExit(f"{case} in {num_parts} parts differs by {found}")
    print("equal")


if __name__ == "__main__":
    main()
