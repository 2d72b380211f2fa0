"""The account of the memory that pictures take while they are decoded, one for each worker.

A picture waits for its share in the order of arrival, so that small pictures cannot starve a large one. When the last
share is returned after a large use, the freed memory returns to the system.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from handlers.errors import ImageTooLarge, OutOfMemory
from handlers.process_memory import trim_heap

CHECK_S = 0.2  # between two checks whether a waiting request is cancelled
TRIM_BYTES = 64 << 20  # less is not worth a walk through the heap


class DecodingBudget:
    """Bounds the bytes of pictures in decoding. Any thread.

    max_bytes: of all pictures together. max_wait_s: how long a picture waits for its share.
    """

    def __init__(
        self,
        max_bytes: int,
        max_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
        trim: Callable[[], None] = trim_heap,
    ) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._trim = trim
        self._peak_bytes = 0  # since nothing was decoded
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"<DecodingBudget {self.used_bytes} of {self.max_bytes} bytes, {len(self._waiting)} waiting>"

    def describe(self) -> dict[str, int]:
        """Return the numbers of the metrics (handlers/metrics.py)."""
        return {"bytes": self.used_bytes, "capacity_bytes": self.max_bytes}

    @contextmanager
    def lease(self, num_bytes: int, check: Callable[[], None]) -> Iterator[None]:
        """Hold a share of the account; wait for it if others hold too much.

        check: raises if the request is cancelled; called while the picture waits.
        Raises ImageTooLarge for more than the whole account, OutOfMemory after `max_wait_s`.
        """
        if num_bytes > self.max_bytes:
            raise ImageTooLarge(
                f"the image takes {num_bytes} bytes of memory to decode, more than {self.max_bytes}; send a smaller one"
            )
        self._take(num_bytes, check)
        try:
            yield
        finally:
            self._give_back(num_bytes)

    def _take(self, num_bytes: int, check: Callable[[], None]) -> None:
        deadline = self._clock() + self._max_wait_s
        place = object()
        with self._changed:
            self._waiting.append(place)
            try:
                while self._waiting[0] is not place or self.used_bytes + num_bytes > self.max_bytes:
                    check()
                    left = deadline - self._clock()
                    if left <= 0:
                        raise OutOfMemory(f"the {self.max_bytes} bytes for decoding images are in use; try again later")
                    self._changed.wait(min(left, CHECK_S))
                self.used_bytes += num_bytes
                self._peak_bytes = max(self._peak_bytes, self.used_bytes)
            finally:
                self._waiting.remove(place)
                self._changed.notify_all()  # the next one may fit, too

    def _give_back(self, num_bytes: int) -> None:
        with self._changed:
            self.used_bytes -= num_bytes
            must_trim = self.used_bytes == 0 and self._peak_bytes >= TRIM_BYTES
            if self.used_bytes == 0:
                self._peak_bytes = 0
            self._changed.notify_all()
        if must_trim:
            self._trim()
