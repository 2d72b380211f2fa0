"""The worker's device: the choice of it, copies to it, and the end of the worker when it fails."""

import os
import re
import threading
from pathlib import Path

import torch
from torch import Tensor

from handlers.errors import SettingsError

DRIVER = Path("/proc/driver/nvidia/version")

# Held by a thread that captures CUDA graphs, waits for the whole GPU, or returns its free memory. CUDA and torch refuse
# each of these while another thread captures, and the capture may fail, too.
capture_lock = threading.Lock()


def choose_device(gpu_id: int | None) -> torch.device:
    """Return the GPU that TorchServe assigned, or the CPU if it assigned none.

    Raises SettingsError if torch cannot use that GPU, so that a GPU's model is not silently served by the CPU.
    """
    if gpu_id is None:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SettingsError(
            f"TorchServe assigned GPU {gpu_id}, but torch {torch.__version__} ({_cuda_build()}) cannot use it: the "
            f"NVIDIA driver is {driver_version() or 'unknown'}. Install a driver and a build of torch that match "
            "(docs/gpu.md), or set number_of_gpu=0 in config.properties to serve on the CPU"
        )
    if gpu_id >= torch.cuda.device_count():
        raise SettingsError(f"TorchServe assigned GPU {gpu_id}, but torch sees {torch.cuda.device_count()} GPUs")
    device = torch.device(f"cuda:{gpu_id}")
    use_device(device)
    # cuDNN's attention builds a plan for each new shape, and a conversation's shape changes with each token.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def use_device(device: torch.device) -> None:
    """Make a GPU this thread's current one, on which Triton launches kernels and graphs are captured."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def return_gpu_memory() -> None:
    """Return the memory of all GPUs that torch keeps for later allocations. Waits while another thread captures."""
    with capture_lock:
        torch.cuda.empty_cache()


def driver_version() -> str | None:
    """Return the NVIDIA driver's version, None if the kernel has none."""
    try:
        found = re.search(r"(\d+\.\d+(\.\d+)?)", DRIVER.read_text())
    except OSError:
        return None
    return found[1] if found else None


def _cuda_build() -> str:
    return f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"


def exit_worker() -> None:
    """End the process at once, so that TorchServe starts another one. A lost device cannot be used again."""
    os._exit(1)


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Return a small CPU tensor on the device, without waiting for the kernels that it still runs.

    A copy from pageable memory would wait for them.
    """
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
