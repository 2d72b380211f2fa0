"""All entries of a worker, by name and by state."""

import math
from collections import OrderedDict, deque
from collections.abc import Iterator

from handlers.many.residency.entry import QUEUED, RESIDENT, ModelEntry, ModelState


class Entries:
    """Keeps each entry's state and the collections that follow from it in step."""

    def __init__(self) -> None:
        self.current: dict[str, ModelEntry] = {}  # by name, the version that new requests get
        self.others: set[ModelEntry] = set()  # retired or closing, and still counted
        self.on_device: OrderedDict[ModelEntry, None] = OrderedDict()  # READY, least recently used first
        self.on_host: OrderedDict[ModelEntry, None] = OrderedDict()
        self.queue: deque[ModelEntry] = deque()  # waits for device memory
        self.pinned: set[str] = set()  # names whose current version stays on the device

    def __iter__(self) -> Iterator[ModelEntry]:
        yield from self.current.values()
        yield from self.others

    def num_waiting(self) -> int:
        """Count the requests that wait for models, without the loads that no request waits for."""
        return sum(ticket.until < math.inf for entry in self for ticket in entry.tickets)

    def is_pinned(self, entry: ModelEntry) -> bool:
        return entry.name in self.pinned and not entry.is_retired

    def move(self, entry: ModelEntry, state: ModelState) -> None:
        """Change the state. Entries that hold memory already go to the front of the queue."""
        if entry.state in QUEUED:
            self.queue.remove(entry)
        self.on_device.pop(entry, None)
        self.on_host.pop(entry, None)
        entry.state = state
        if state is ModelState.READY:
            self.on_device[entry] = None
        elif state is ModelState.ON_HOST:
            self.on_host[entry] = None
        elif state is ModelState.LOADED:
            self.queue.appendleft(entry)
        elif state in QUEUED:
            self.queue.append(entry)

    def withdraw(self, entry: ModelEntry) -> None:
        """Hide the entry from new requests."""
        if self.current.get(entry.name) is entry:
            del self.current[entry.name]
        self.others.add(entry)

    def remove(self, entry: ModelEntry) -> None:
        self.withdraw(entry)
        self.others.discard(entry)
        self.move(entry, ModelState.CLOSED)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every entry is in the collection of its state, and only leased while READY."""
        for entry in self:
            is_wrong = (
                (entry.num_leases and entry.state is not ModelState.READY)
                or (entry in self.on_device) != (entry.state is ModelState.READY)
                or (entry in self.on_host) != (entry.state is ModelState.ON_HOST)
                or (entry in self.queue) != (entry.state in QUEUED)
            )
            if entry.tickets and entry.state in (*RESIDENT, ModelState.CLOSING, ModelState.CLOSED):
                raise RuntimeError(f"a ticket waits for {entry!r}")
            if is_wrong:
                raise RuntimeError(f"{entry!r} is in the wrong collection")
