"""Who uses a worker's memory, and who waits until somebody else gives some back.

An answer that finds no room lets go of all that it holds and waits here; each answer that is over lets two of those
who wait try again, so that their number grows while there is room and shrinks when there is none. Only an answer that
has been alone since it began, and finds no room all the same, is refused.
"""

import threading
from collections import deque
from collections.abc import Callable


class Admission:
    """All methods may be called from any thread. Whoever waits is called back, by then counted as using memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_using = 0
        self._is_alone = False  # the one that uses memory, since it began
        self._waiting: deque[Callable[[], None]] = deque()

    def __repr__(self) -> str:
        return f"<Admission {self._num_using} using, {len(self._waiting)} waiting>"

    def enter(self) -> None:
        """One more uses memory."""
        with self._lock:
            self._num_using += 1
            self._is_alone = self._num_using == 1

    def leave(self) -> None:
        """One that used memory is over."""
        with self._lock:
            self._num_using -= 1
            called = self._pop(2)
        for again in called:
            again()

    def try_wait(self, again: Callable[[], None]) -> bool:
        """One that used memory has let go of it and wants to try again later; False if there was nobody in its way."""
        with self._lock:
            if self._is_alone:
                return False
            self._waiting.append(again)
            self._num_using -= 1
            called = self._pop(0 if self._num_using else 1)  # if all wait for one another, one must begin
        for other in called:
            other()
        return True

    def try_remove(self, again: Callable[[], None]) -> bool:
        """One that waits does so no more; False if it does not wait."""
        with self._lock:
            if again not in self._waiting:
                return False
            self._waiting.remove(again)
            return True

    def _pop(self, count: int) -> list[Callable[[], None]]:
        called = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        if called:
            self._num_using += len(called)
            self._is_alone = self._num_using == 1
        return called
