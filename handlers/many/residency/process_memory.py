"""How much memory there is for models, and giving freed memory back to the system."""

import ctypes
import os
from pathlib import Path

import torch

GPU_FRACTION = 0.8  # of a GPU's memory: the rest is for what requests need while they are computed
CPU_FRACTION = 0.5
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def choose_device_bytes(device: torch.device) -> int:
    """What models may take on this device if nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1] * GPU_FRACTION)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in CGROUP_LIMITS:
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():
            limits.append(int(text))
    return int(min(limits) * CPU_FRACTION)


def release_memory(device: torch.device) -> None:
    """What was freed is the system's again when it returns. glibc and torch's allocator would keep it for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
