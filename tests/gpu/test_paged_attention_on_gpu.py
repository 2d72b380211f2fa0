"""The attention kernel of decoding rows on a CUDA device, against attention in float32 on the CPU."""

import pytest
import torch

from tests.unit.handlers.paged_attention_cases import Case, difference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]
LENGTHS = (1, 15, 16, 17, 700, 64, 65, 1500, 128)
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
CASES = (
    Case(32, 32, 128),
    Case(32, 8, 128),
    Case(14, 2, 64),
    Case(8, 8, 80),
    Case(4, 1, 96, window=300),
    Case(8, 8, 256),
    Case(71, 1, 64, window=20),
)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 9])
def test_kernel_computes_attention(dtype: torch.dtype, case: Case, num_rows: int) -> None:
    """The kernel is right for head groups, windows, scattered blocks, any head size, and NaN in unused storage."""
    assert difference(case, LENGTHS[-num_rows:], "cuda", dtype) < TOLERANCES[dtype]
