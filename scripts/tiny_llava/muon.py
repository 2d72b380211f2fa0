"""Implements the optimizer Muon: momentum with orthogonalized matrices. Training needs about half of the steps.

torch.optim.Muon iterates in bfloat16, which is slow on a CPU without bfloat16 instructions. This implementation uses
float32 and processes all matrices of the same shape in one batch.
Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers". The scale with which Muon and AdamW can share a
learning rate is from Liu et al. 2025, "Muon is scalable for LLM training".
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return an approximation of U V^T of each matrix's singular value decomposition. matrices: (N, rows, columns)."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.size(1) > matrices.size(2)
    x: Tensor = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _iteration in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """Optimizes the matrices of hidden layers only. Use AdamW for embeddings, norms, biases and heads."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | list[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        decay: float = 0.02,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append((parameter, parameter.grad))
            for shape, pairs in by_shape.items():
                updates = []
                for parameter, gradient in pairs:
                    state = self.state[parameter]
                    if not state:
                        state["momentum"] = torch.zeros_like(parameter)
                    state["momentum"].lerp_(gradient, 1 - group["momentum"])
                    updates.append(gradient.lerp(state["momentum"], group["momentum"]))
                matrices = torch.stack(updates).flatten(2)  # a convolution's kernel is one matrix
                scale = 0.2 * max(matrices.shape[1:]) ** 0.5 * group["lr"]
                for (parameter, _), update in zip(pairs, orthogonalize(matrices), strict=True):
                    parameter.mul_(1 - group["lr"] * group["decay"]).sub_(update.view(shape), alpha=scale)
