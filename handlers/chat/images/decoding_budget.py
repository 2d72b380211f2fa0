"""The memory budget for images that are being decoded, or whose pixels wait for a model, one per worker.

Images wait for their share in order of arrival, so that small ones cannot starve a large one. `bound_freed_memory`
returns freed memory to the system.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from handlers.errors import ImageTooLarge, OutOfMemory

CHECK_S = 0.2  # between two checks whether a waiting request is cancelled


class DecodingBudget:
    """Bounds the bytes of images that are being decoded. Any thread.

    max_bytes: limit for all images together. max_wait_s: how long an image waits for its share.
    """

    def __init__(
        self,
        max_bytes: int,
        max_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._held_bytes = 0  # of them, in held shares
        self._largest_bytes = 0  # of an image so far
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"<DecodingBudget {self.used_bytes} of {self.max_bytes} bytes, {len(self._waiting)} waiting>"

    def describe(self) -> dict[str, int]:
        """Return the numbers of its metrics (COMMON_METRICS)."""
        return {"bytes": self.used_bytes, "capacity_bytes": self.max_bytes}

    @contextmanager
    def lease(self, num_bytes: int, check: Callable[[], None], held_bytes: int = 0) -> Iterator[None]:
        """Hold a share of the budget; wait for it if other images hold too much.

        check: raises if the request is cancelled; called while the image waits. held_bytes: of the budget, which the
        request holds until its end, so that waiting for them would be in vain; others may wait for them, so the image
        is the next one. Raises ImageTooLarge for more than the rest of the budget, OutOfMemory after `max_wait_s`.
        """
        most = self.max_bytes - held_bytes
        if num_bytes > most:
            advice = "send a smaller one, or fewer at once" if held_bytes else "send a smaller one"
            raise ImageTooLarge(f"the image takes {num_bytes} bytes of memory to decode, more than {most}; {advice}")
        with self._changed:
            self._largest_bytes = max(self._largest_bytes, num_bytes)
        self.take(num_bytes, check, is_next=held_bytes > 0)
        try:
            yield
        finally:
            self.release(num_bytes)

    def take(self, num_bytes: int, check: Callable[[], None], *, is_next: bool = False, is_held: bool = False) -> None:
        """Take a share until `release`, as `lease` does. num_bytes: at most the whole budget.

        is_next: before all that wait, since they may wait for what this request has. is_held: the request decodes
        further images meanwhile; several such shares leave half of the budget, and room for the largest image so far,
        so that these requests do not wait for each other.
        """
        deadline = self._clock() + self._max_wait_s
        place = object()
        with self._changed:
            if is_next:
                self._waiting.appendleft(place)
            else:
                self._waiting.append(place)
            try:
                while self._waiting[0] is not place or not self._has_room(num_bytes, is_held=is_held):
                    check()
                    left = deadline - self._clock()
                    if left <= 0:
                        raise OutOfMemory(f"the {self.max_bytes} bytes for decoding images are in use; try again later")
                    self._changed.wait(min(left, CHECK_S))
                self._count(num_bytes, is_held=is_held)
            finally:
                self._waiting.remove(place)
                self._changed.notify_all()  # the next one may fit, too

    def release(self, num_bytes: int, *, is_held: bool = False) -> None:
        """Return a share. is_held: as when it was taken."""
        with self._changed:
            self._count(-num_bytes, is_held=is_held)
            self._changed.notify_all()

    def _has_room(self, num_bytes: int, *, is_held: bool) -> bool:
        most = self.max_bytes - max(self.max_bytes // 2, self._largest_bytes)
        if is_held and self._held_bytes and self._held_bytes + num_bytes > most:
            return False
        return self.used_bytes + num_bytes <= self.max_bytes

    def _count(self, num_bytes: int, *, is_held: bool) -> None:
        self.used_bytes += num_bytes
        self._held_bytes += num_bytes if is_held else 0
