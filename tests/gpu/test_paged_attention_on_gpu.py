"""The attention kernel of decoding rows on a CUDA device, against attention in float32 on the CPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]
BLOCK = 16
LENGTHS = (1, 15, 16, 17, 700, 64, 65, 1500, 128)
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}  # of the norm


def reference(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, window: int | None
) -> Tensor:
    """Attend row by row."""
    rows = []
    for row, length in enumerate(lengths.tolist()):
        positions = torch.arange(length)[-(window or length) :]
        slots = table[row].long()[positions // BLOCK] * BLOCK + positions % BLOCK
        attended = F.scaled_dot_product_attention(
            query[row][:, None], keys[:, slots], values[:, slots], enable_gqa=True
        )
        rows.append(attended[:, 0])
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "window"),
    [
        (32, 32, 128, None),
        (32, 8, 128, None),
        (14, 2, 64, None),
        (8, 8, 80, None),
        (4, 1, 96, 300),
        (8, 8, 256, None),
        (71, 1, 64, 20),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 9])
def test_kernel_computes_attention(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, size: int, window: int | None, num_rows: int
) -> None:
    """With groups of heads, windows, scattered blocks, any head size, and NaN in unused storage."""
    from handlers.models.paged_attention import attend

    generator = torch.Generator().manual_seed(3)
    num_blocks = -(-max(LENGTHS) // BLOCK)
    lengths = torch.tensor(LENGTHS[-num_rows:], dtype=torch.int32)
    table = torch.randperm(num_rows * num_blocks, generator=generator).view(num_rows, num_blocks).int()
    storage = torch.full((2, num_kv_heads, (num_rows * num_blocks + 1) * BLOCK, size), float("nan"))
    for row, length in enumerate(lengths.tolist()):
        slots = table[row].long()[torch.arange(length) // BLOCK] * BLOCK + torch.arange(length) % BLOCK
        storage[:, :, slots] = torch.randn(2, num_kv_heads, length, size, generator=generator)
    query = torch.randn(num_heads, num_rows, size, generator=generator).transpose(0, 1)
    storage, query = storage.to(dtype), query.to(dtype)
    expected = reference(query.float(), *storage.float(), table, lengths, window)

    keys, values = storage.cuda()
    found = attend(query.cuda(), keys, values, table.cuda(), lengths.cuda(), BLOCK, window=window).float().cpu()

    assert float((found - expected).norm() / expected.norm()) < TOLERANCES[dtype]
