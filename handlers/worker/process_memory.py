"""The process's memory: how much models may take, and returning freed memory to the system."""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from handlers.worker.device import return_gpu_memory
from torchmoor.wire.cgroups import MEMBERSHIP, ROOT, groups

GPU_FRACTION = 0.8  # of a GPU's memory: the rest is for the computation of requests
CPU_FRACTION = 0.5
LARGE_BYTES = 8 << 20
FREED_BYTES = 16 << 20  # that the heap may keep; a trim walks the whole heap, so it is not worth it for less
CHECK_S = 2.0
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_MALLINFO = (  # the fields of its struct mallinfo2
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)
# A control group's files of limits, by version, and what of its memory the kernel cannot drop, unlike the page cache.
_GROUP_LIMITS = (("memory.max", "anon"), ("memory.limit_in_bytes", "total_rss"))


def choose_device_bytes(device: torch.device) -> int:
    """Return the default budget for models on this device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1] * GPU_FRACTION)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    limits += [limit for limit, _ in group_limits()]
    return int(min(limits) * CPU_FRACTION)


def group_limits(root: Path = ROOT, membership: Path = MEMBERSHIP) -> list[tuple[int, int]]:
    """Return the limit of each control group of this process, and what cannot be dropped of the group's memory."""
    found = []
    for folder in groups("memory", root, membership):
        for limit, kept in _GROUP_LIMITS:
            with suppress(OSError, ValueError, KeyError):  # not this version, or no limit
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                found.append((int((folder / limit).read_text()), int(counts[kept])))
    return found


def release_memory(device: torch.device) -> None:
    """Return freed memory to the system, which glibc's and torch's allocators would keep."""
    if device.type == "cuda":
        return_gpu_memory()
    trim_heap()


def bound_freed_memory() -> None:
    """Return freed memory to the system, blocks of LARGE_BYTES or more at once. Call once, when the worker starts.

    By default glibc adapts to what is freed and keeps up to 64 MiB for each of its arenas, which `trim_heap` cannot
    release. It also keeps smaller blocks below one that is in use, such as the bodies of requests. A thread trims the
    heap when this is more than FREED_BYTES. It needs glibc 2.33.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, LARGE_BYTES)
    if hasattr(libc, "mallinfo2"):
        threading.Thread(target=_trim_always, name="heap", daemon=True).start()


def _trim_always() -> None:
    trimmer = HeapTrimmer()
    while True:
        time.sleep(CHECK_S)
        trimmer.check()


class HeapTrimmer:
    """Trims the heap when its freed memory has grown by FREED_BYTES since the last trim. One thread only.

    count_freed: returns the heap's free bytes. glibc still counts those that a trim has returned to the system.
    """

    def __init__(self, count_freed: Callable[[], int] | None = None, trim: Callable[[], None] | None = None) -> None:
        self._count_freed = count_freed or count_freed_bytes
        self._trim = trim or trim_heap
        self._least = self._count_freed()

    def check(self) -> None:
        """Trim the heap if it is due."""
        freed = self._count_freed()
        self._least = min(self._least, freed)
        if freed - self._least >= FREED_BYTES:
            self._trim()
            self._least = self._count_freed()


class _Mallinfo(ctypes.Structure):
    """The struct mallinfo2 of malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO]


def count_freed_bytes() -> int:
    """Return the free bytes of all heaps. Needs glibc 2.33."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    return int(mallinfo().fordblks)


def trim_heap() -> None:
    """Return the heap's freed memory to the system. Does nothing where the C library has no such call."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
