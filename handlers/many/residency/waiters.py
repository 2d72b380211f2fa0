"""Who waits for a model, and until when."""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from handlers.errors import HandlerError
from handlers.many.model import Lease

if TYPE_CHECKING:
    from handlers.many.residency.entry import Entry


class Ticket:
    """One who waits for a model: gets a lease or an error, once.

    until: when it gives up waiting; never if infinite, which is for what the worker loads by itself.
    """

    def __init__(
        self, on_ready: Callable[[Lease], None], on_failed: Callable[[HandlerError], None], until: float
    ) -> None:
        self.until = until
        self.came_at: float | None = None  # when it began to wait
        self.entry: Entry | None = None  # where it waits
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._is_over = False
        self._lock = threading.Lock()

    def end(self) -> bool:
        """Nothing is to be heard any more. False if that was so already."""
        with self._lock:
            is_first, self._is_over = not self._is_over, True
            return is_first

    def hand_over(self, lease: Lease) -> None:
        if not self.end():
            lease.release()
            return
        try:
            self._on_ready(lease)
        except Exception:
            lease.release()
            raise

    def fail(self, error: HandlerError) -> None:
        if self.end():
            self._on_failed(error)


class Waiters:
    """All tickets that wait: each at its entry, and those of requests here in the order in which they give up.

    Its length is the number of requests; what the worker loads by itself is not counted.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[Ticket, None] = OrderedDict()  # all wait equally long

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, ticket: Ticket, entry: "Entry", now: float) -> None:
        ticket.entry = entry
        ticket.came_at = now
        entry.tickets[ticket] = None
        if ticket.until < math.inf:
            self._requests[ticket] = None

    def remove(self, ticket: Ticket) -> None:
        """Nothing happens if it does not wait."""
        self._requests.pop(ticket, None)
        if ticket.entry is not None:
            ticket.entry.tickets.pop(ticket, None)

    def next_deadline(self) -> float:
        """When the first gives up; infinite if nobody does."""
        return next((ticket.until for ticket in self._requests), math.inf)

    def take_overdue(self, now: float) -> list[Ticket]:
        """Those who have waited long enough, who wait no more."""
        overdue = []
        while self.next_deadline() <= now:
            ticket = next(iter(self._requests))
            self.remove(ticket)
            overdue.append(ticket)
        return overdue

    def check_integrity(self, entries: Iterable["Entry"]) -> None:
        """Raise RuntimeError unless everybody waits at one of these."""
        if set(self._requests) != {each for entry in entries for each in entry.tickets if each.until < math.inf}:
            raise RuntimeError("a waiter was forgotten")
