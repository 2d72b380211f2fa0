"""Requests that wait for models: their tickets, entries and deadlines."""

import math
import threading
from collections.abc import Callable

from handlers.errors import HandlerError
from handlers.many.model import ModelLease
from handlers.many.residency.entry import RESIDENT, ModelEntry, ModelState


class ModelTicket:
    """A request for a model, which gets a lease or an error, once.

    until: when the request stops waiting; infinite for loads that no request waits for.
    """

    def __init__(
        self, on_ready: Callable[[ModelLease], None], on_failed: Callable[[HandlerError], None], until: float
    ) -> None:
        self.until = until
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._is_over = False
        self._lock = threading.Lock()

    def end(self) -> bool:
        """Suppress both callbacks from now on. Returns False if the ticket had ended before."""
        with self._lock:
            is_first, self._is_over = not self._is_over, True
            return is_first

    def hand_over(self, lease: ModelLease) -> None:
        """Pass the lease on, or release it if the ticket has ended."""
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


class WaitingTickets:
    """Maps each waiting ticket to its entry and to the time when it came. At most max_waiting requests, so it scans."""

    def __init__(self) -> None:
        self._places: dict[ModelTicket, tuple[ModelEntry, float]] = {}

    def num_requests(self) -> int:
        return sum(ticket.until < math.inf for ticket in self._places)

    def at(self, entry: ModelEntry) -> list[ModelTicket]:
        return [ticket for ticket, place in self._places.items() if place[0] is entry]

    def add(self, ticket: ModelTicket, entry: ModelEntry, now: float) -> None:
        self._places[ticket] = entry, now

    def remove(self, ticket: ModelTicket) -> tuple[ModelEntry, float] | None:
        """Forget a ticket. Returns its entry and its time, None if it does not wait."""
        return self._places.pop(ticket, None)

    def next_deadline(self) -> float:
        return min((ticket.until for ticket in self._places), default=math.inf)

    def overdue(self, now: float) -> list[tuple[ModelTicket, ModelEntry]]:
        return [(ticket, place[0]) for ticket, place in self._places.items() if ticket.until <= now]

    def check_integrity(self) -> None:
        """Raise RuntimeError if a ticket waits for an entry that is resident or gone."""
        for entry, _ in self._places.values():
            if entry.state in (*RESIDENT, ModelState.CLOSING, ModelState.CLOSED):
                raise RuntimeError(f"a ticket waits for {entry!r}")
