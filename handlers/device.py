"""The worker's device: the choice of it, and the end of the worker when it fails."""

import os

import torch


def choose_device(gpu_id: int | None) -> torch.device:
    """Return the GPU that TorchServe assigned, or the CPU."""
    if gpu_id is not None and torch.cuda.is_available():
        return torch.device(f"cuda:{gpu_id}")
    return torch.device("cpu")


def exit_worker() -> None:
    """End the process at once, so that TorchServe starts another one. A lost device cannot be used again."""
    os._exit(1)
