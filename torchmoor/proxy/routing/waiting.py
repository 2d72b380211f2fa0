"""The queue of a variant: requests wait in one place, for an instance that is free (late binding) or being started.

When an instance becomes free, the next request is, in this order:

    1. turns that only this instance can serve, which have a line of their own per instance
    2. any other request, from one line for all instances

Within a line callers take turns, and a caller's requests go in the order of their deadlines. Each queue limits the
number of waiting requests, and all queues together the bytes of their bodies. The caller passes in the clock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class Ticket(Generic[T]):
    """A place in a queue.

    deadline: in the caller's seconds. num_bytes: bytes of its body that are kept meanwhile. home: the only instance
    that can serve it; None if any can.
    """

    owner: T
    _: KW_ONLY
    deadline: float
    num_bytes: int
    principal: bytes = b""
    home: str | None = None
    number: int = field(default_factory=count().__next__)

    @property
    def order(self) -> tuple[float, int]:
        return (self.deadline, self.number)


@dataclass
class WaitingBytes:
    """Counts the bytes of waiting bodies over all queues of a process."""

    max_bytes: int
    used_bytes: int = 0


class WaitingLine(Generic[T]):
    """Tickets of equal rank: callers take turns, and each caller's tickets are in the order of their deadlines."""

    def __init__(self) -> None:
        self._principals: OrderedDict[bytes, list[Ticket[T]]] = OrderedDict()
        self.num_waiting = 0

    def add(self, ticket: Ticket[T]) -> None:
        insort(self._principals.setdefault(ticket.principal, []), ticket, key=_order)
        self.num_waiting += 1

    def remove(self, ticket: Ticket[T]) -> bool:
        """Remove a ticket; return False if it is not in this line."""
        tickets = self._principals.get(ticket.principal, [])
        at = bisect_left(tickets, ticket.order, key=_order)
        if at == len(tickets) or tickets[at] is not ticket:
            return False
        del tickets[at]
        if not tickets:
            del self._principals[ticket.principal]
        self.num_waiting -= 1
        return True

    def take(self, ticket: Ticket[T]) -> None:
        """Remove a ticket that is served; its caller moves to the end."""
        self.remove(ticket)
        if ticket.principal in self._principals:
            self._principals.move_to_end(ticket.principal)

    def __iter__(self) -> Iterator[Ticket[T]]:
        """Iterate over the tickets in the order in which they are served."""
        return (ticket for tickets in self._principals.values() for ticket in tickets)


class WaitingQueue(Generic[T]):
    """Requests that wait for the instances of one variant."""

    def __init__(self, *, max_waiting: int, total: WaitingBytes) -> None:
        self.num_waiting = 0
        self.max_waiting = max_waiting
        self._total = total
        self._turns: dict[str, WaitingLine[T]] = {}
        self._others: WaitingLine[T] = WaitingLine()

    def try_add(self, ticket: Ticket[T]) -> bool:
        """Add a ticket, unless too many requests or too many bytes wait."""
        total = self._total
        if self.num_waiting >= self.max_waiting or total.used_bytes + ticket.num_bytes > total.max_bytes:
            return False
        line = self._others if ticket.home is None else self._turns.setdefault(ticket.home, WaitingLine())
        line.add(ticket)
        self.num_waiting += 1
        total.used_bytes += ticket.num_bytes
        return True

    def remove(self, ticket: Ticket[T]) -> bool:
        """Remove a ticket whose client has left or whose deadline has passed; return False if it is gone already."""
        line = self._others if ticket.home is None else self._turns.get(ticket.home)
        if line is None or not line.remove(ticket):
            return False
        self._count_out(ticket)
        return True

    def turns(self) -> dict[str, int]:
        """Return the number of waiting turns, by the one instance that can serve them."""
        return {home: line.num_waiting for home, line in self._turns.items()}

    def turns_at(self, instance: str) -> Iterable[Ticket[T]]:
        """Return the turns that only this instance can serve, in their order."""
        return self._turns.get(instance, ())

    @property
    def others(self) -> Iterable[Ticket[T]]:
        """Return the tickets that any instance can serve, in their order."""
        return self._others

    def take(self, ticket: Ticket[T]) -> None:
        """Remove a ticket that is served."""
        (self._others if ticket.home is None else self._turns[ticket.home]).take(ticket)
        self._count_out(ticket)

    def take_those(self, is_taken: Callable[[Ticket[T]], bool]) -> list[Ticket[T]]:
        """Remove and return some tickets, which are not served."""
        tickets = [ticket for line in self._lines for ticket in line if is_taken(ticket)]
        for ticket in tickets:
            self.remove(ticket)
        return tickets

    @property
    def _lines(self) -> list[WaitingLine[T]]:
        return [*self._turns.values(), self._others]

    def _count_out(self, ticket: Ticket[T]) -> None:
        self.num_waiting -= 1
        self._total.used_bytes -= ticket.num_bytes
        if ticket.home is not None and not self._turns[ticket.home].num_waiting:
            del self._turns[ticket.home]

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the counts match the tickets."""
        tickets = [ticket for line in self._lines for ticket in line]
        if len(tickets) != self.num_waiting or len(tickets) != sum(line.num_waiting for line in self._lines):
            raise RuntimeError(f"the queue counts {self.num_waiting} tickets but holds {len(tickets)}")
        if sum(ticket.num_bytes for ticket in tickets) > self._total.used_bytes:
            raise RuntimeError(f"the queues count {self._total.used_bytes} bytes but hold more")


def _order(ticket: Ticket[T]) -> tuple[float, int]:
    return ticket.order
