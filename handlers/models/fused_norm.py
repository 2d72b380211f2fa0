"""The decoder's RMSNorms as torch's own, which is one kernel on a GPU. transformers' formula takes eight.

At one token per row, a decoder's norms are a third of the kernels of a step, and a step that is not a CUDA graph takes
as long as its launches.
"""

from inspect import signature

import torch
from torch import nn

NUM_ROWS = 4  # of random numbers for the comparison
ROUNDINGS = 4  # of the type, by which both may differ: transformers rounds before it multiplies by the weight


@torch.inference_mode()
def fuse_norms(module: nn.Module, dtype: torch.dtype) -> int:
    """Replace each RMSNorm below `module` that torch's own equals on random numbers. Return how many.

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
