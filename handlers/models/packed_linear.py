"""Linear layers whose weights MKL packs once, instead of at every call.

A step of a few rows spends most of its time in matrix products, and torch's CPU product packs the whole weight again
each time: with eight rows of SmolLM2 a step takes 183 ms of CPU with nn.Linear and 121 packed.
On Intel's processors the packed product also gives each row the same bits in every batch, which nn.Linear does not. On
AMD's, MKL uses other kernels for fewer than four rows, and the results differ by about 1e-6.
"""

from functools import cache

import torch
from torch import Tensor, nn

_ROWS = 16  # the packing is tuned for this number and works for any


class PackedLinear(nn.Module):
    """Replaces an nn.Linear in float32 on a CPU, by the operator that torch's inductor uses for frozen weights."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), _ROWS)
        self._shape = torch.empty(1).expand(weight.shape)  # the operator reads only the shape of it

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        result: Tensor = torch.ops.mkl._mkl_linear(x, self._packed, self._shape, self.bias, rows)
        return result

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True for float32 on a CPU, if torch was built with MKL."""
    return dtype is torch.float32 and device.type == "cpu" and torch.backends.mkl.is_available()


@cache
def rows_are_independent() -> bool:
    """Return True if, on this processor, a packed product gives a row the same bits in a batch of any size.

    Tries one product of a decoder's usual depth, in under a millisecond.
    """
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(576, 192, bias=False, device="meta")  # leaves torch's global generator as it is
    linear.weight = nn.Parameter(torch.randn(192, 576, generator=generator), requires_grad=False)
    with torch.inference_mode():
        packed, x = PackedLinear(linear), torch.randn(_ROWS, 576, generator=generator)
        whole = packed(x)
        return all(torch.equal(packed(x[:n]), whole[:n]) for n in (1, 2, 3, 4, 8))


def pack_linears(module: nn.Module) -> None:
    """Replace every nn.Linear below `module`, and free its weights unless another module shares them."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)
