"""Measure the memory of a process, as the kernel counts it."""

import threading
from dataclasses import dataclass

import psutil

SAMPLE_S = 0.005


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. private: memory that only this process can free; mapped: file pages, which the kernel may drop, too."""

    private: int
    mapped: int


def memory_of(pid: int) -> Memory:
    """Return a process's current memory. Raises psutil.NoSuchProcess if it has ended."""
    found = psutil.Process(pid).memory_info()
    return Memory(found.rss - found.shared, found.shared)


class PeakMemory:
    """A context that samples a process's memory every 5 ms and keeps the maximum."""

    def __init__(self, pid: int) -> None:
        self.most_private = self.most = 0
        self._pid = pid
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(SAMPLE_S)
            now = memory_of(self._pid)
            self.most_private = max(self.most_private, now.private)
            self.most = max(self.most, now.private + now.mapped)
