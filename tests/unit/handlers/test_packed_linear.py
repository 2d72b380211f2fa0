"""Packed weights against nn.Linear."""

import pytest
import torch
from torch import nn

from handlers.models.fast_layers import PackedLinear, can_pack, pack_linears, rows_are_independent

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not can_pack(torch.float32, CPU), reason="this torch was built without MKL")


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 16, 100])
def test_packed_product_is_the_product(rows: int, has_bias: bool) -> None:
    """The product is as exact as nn.Linear's, for any number of rows."""
    torch.manual_seed(0)
    linear = nn.Linear(70, 50, bias=has_bias)
    x = torch.randn(1, rows, 70)

    with torch.inference_mode():
        packed = PackedLinear(linear)(x)
        expected = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double() if has_bias else None)

    assert packed.shape == (1, rows, 50)
    assert torch.allclose(packed.double(), expected, atol=1e-5)


def test_row_does_not_depend_on_its_neighbours() -> None:
    """A row is bit-identical in any batch if the probe promises it, else equal within float32's precision."""
    torch.manual_seed(1)
    packed = PackedLinear(nn.Linear(576, 192))
    x = torch.randn(32, 576)

    with torch.inference_mode():
        whole = packed(x)
        for n in (1, 2, 7, 16):
            if rows_are_independent():
                assert torch.equal(packed(x[:n]), whole[:n])
            else:
                assert torch.allclose(packed(x[:n]), whole[:n], atol=1e-5)


def test_every_linear_layer_is_packed_and_nothing_else() -> None:
    """Nested layers are packed, too, and the model's output is unchanged."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 4)))
    x = torch.randn(5, 8)
    expected = model(x)

    pack_linears(model)

    assert [type(m) for m in model.modules() if not list(m.children())] == [PackedLinear, nn.LayerNorm, PackedLinear]
    assert torch.allclose(model(x), expected, atol=1e-6)


def test_only_float32_on_a_cpu_is_packed() -> None:
    """On other devices and types, layers stay unchanged."""
    assert not can_pack(torch.bfloat16, CPU)
    assert not can_pack(torch.float32, torch.device("cuda"))
