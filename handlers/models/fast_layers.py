"""Faster layers in place of a decoder's own: packed matrices on a CPU, torch's RMSNorm on a GPU."""

from functools import cache
from inspect import signature

import torch
from torch import Tensor, nn

_ROWS = 16  # the packing is tuned for this number and works for any
NUM_ROWS = 4  # of random numbers, on which two norms are compared
ROUNDINGS = 4  # of the type, by which both may differ: transformers rounds before it multiplies by the weight


class PackedLinear(nn.Module):
    """Replaces an nn.Linear in float32 on a CPU, by the operator that torch's inductor uses for frozen weights.

    MKL packs the weights once, instead of at every call. A step of a few rows spends most of its time in matrix
    products, and torch's CPU product packs the whole weight again each time: with eight rows of SmolLM2 a step takes
    183 ms of CPU with nn.Linear and 121 packed.
    On Intel's processors the packed product also gives each row the same bits in every batch, which nn.Linear does not.
    On AMD's, MKL uses other kernels for fewer than four rows, and the results differ by about 1e-6.
    """

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


@torch.inference_mode()
def fuse_norms(module: nn.Module, dtype: torch.dtype) -> int:
    """Replace each RMSNorm below `module` that torch's own equals on random numbers. Return how many.

    Torch's own is one kernel on a GPU; transformers' formula takes eight. At one token per row, a decoder's norms are a
    third of the kernels of a step, and a step that is not a CUDA graph takes as long as its launches.

    dtype: of the hidden states. Norms with weights of another type stay, and other formulas, such as Gemma's, which
    adds 1 to the weight, or one with a gate.
    """
    num_replaced = 0
    for name, child in module.named_children():
        fused = _fused(child, dtype) if type(child).__name__.endswith("RMSNorm") else None
        if fused is None:
            num_replaced += fuse_norms(child, dtype)
        else:
            setattr(module, name, fused)
            num_replaced += 1
    return num_replaced


def _fused(norm: nn.Module, dtype: torch.dtype) -> nn.RMSNorm | None:
    weight = getattr(norm, "weight", None)
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or weight.dtype is not dtype:
        return None
    if not isinstance(epsilon, float) or len(signature(norm.forward).parameters) != 1:
        return None
    fused = nn.RMSNorm(weight.shape, eps=epsilon, device="meta")
    fused.weight = weight
    generator = torch.Generator(weight.device).manual_seed(0)
    numbers = torch.randn(NUM_ROWS, len(weight), generator=generator, device=weight.device).to(weight.dtype)
    expected, found = norm(numbers), fused(numbers)
    tolerance = ROUNDINGS * torch.finfo(weight.dtype).eps
    if expected.dtype is not found.dtype or not torch.allclose(found, expected, rtol=tolerance, atol=tolerance):
        return None
    return fused
