"""The process's memory: how much models may take, and returning freed memory to the system."""

import ctypes
import os
from pathlib import Path

import torch

GPU_FRACTION = 0.8  # of a GPU's memory: the rest is for the computation of requests
CPU_FRACTION = 0.5
LARGE_BYTES = 8 << 20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def choose_device_bytes(device: torch.device) -> int:
    """Return the default budget for models on this device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1] * GPU_FRACTION)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in CGROUP_LIMITS:
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():
            limits.append(int(text))
    return int(min(limits) * CPU_FRACTION)


def release_memory(device: torch.device) -> None:
    """Return freed memory to the system, which glibc's and torch's allocators would keep."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim_heap()


def keep_no_large_blocks() -> None:
    """Return freed blocks of LARGE_BYTES or more to the system at once. Call once, when the worker starts.

    By default glibc adapts to what is freed and keeps up to 64 MiB for each of its arenas, which `trim_heap` cannot
    release.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, LARGE_BYTES)


def trim_heap() -> None:
    """Return the heap's freed memory to the system. Does nothing where the C library has no such call."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
