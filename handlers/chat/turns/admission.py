"""Limits the answers that use a worker's memory at once; the others wait in a queue.

An answer that finds no memory frees all that it holds and waits here. Each answer that ends lets two waiting answers
try again, so that the number of running answers grows while there is memory and shrinks when there is none. An answer
is refused only if it has been the only one since it began and still finds no memory.
"""

import threading
from collections import deque
from collections.abc import Callable


class Admission:
    """Counts the answers that use memory and queues those that wait. Any thread.

    A waiting answer is called back after it has been counted again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_using = 0
        self._is_alone = False  # whether the answer that uses memory has been alone since it began
        self._waiting: deque[Callable[[], None]] = deque()

    def __repr__(self) -> str:
        return f"<Admission {self.num_using} using, {self.num_waiting} waiting>"

    @property
    def num_using(self) -> int:
        return self._num_using

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def enter(self) -> None:
        """Count an answer that begins to use memory."""
        with self._lock:
            self._num_using += 1
            self._is_alone = self._num_using == 1

    def leave(self) -> None:
        """Count the end of an answer, and let two waiting answers try again."""
        with self._lock:
            self._num_using -= 1
            called = self._pop(2)
        for again in called:
            again()

    def try_wait(self, again: Callable[[], None]) -> bool:
        """Queue an answer that has freed its memory. Return False if no other answer used memory."""
        with self._lock:
            if self._is_alone:
                return False
            self._waiting.append(again)
            self._num_using -= 1
            called = self._pop(0 if self._num_using else 1)  # if no answer uses memory, a waiting one must begin
        for other in called:
            other()
        return True

    def try_remove(self, again: Callable[[], None]) -> bool:
        """Remove an answer from the queue; return False if it does not wait."""
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
