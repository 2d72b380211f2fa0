"""What a worker has done since it started, for the status operation."""

import threading
from collections import Counter


class Counters:
    """Named counts that several threads raise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    def get(self, name: str) -> int:
        return self._counts[name]
