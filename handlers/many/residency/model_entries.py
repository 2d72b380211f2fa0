"""The state of each model from its download to the release of its memory, and all of them by name and by state."""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from handlers.errors import HandlerError
from handlers.many.model import DiskLease, LoadProgress, ModelTier, ResidentModel
from handlers.many.residency.ticket import ModelTicket

OnDone = Callable[[HandlerError | None], None]


class ModelState(Enum):
    FETCHING = "fetching"
    FETCHED = "fetched"
    LOADING = "loading"
    LOADED = "loaded"
    READY = "ready"
    DEMOTING = "demoting"
    ON_HOST = "on host"
    AWAITING = "awaiting"
    PROMOTING = "promoting"
    CLOSING = "closing"
    CLOSED = "closed"


QUEUED = (ModelState.FETCHED, ModelState.AWAITING, ModelState.LOADED)  # wait for device memory
RESIDENT = (ModelState.READY, ModelState.ON_HOST)
LEAVING = (ModelState.CLOSING, ModelState.DEMOTING)  # give back device memory


class LoaderStep(Enum):
    """A step that a loader thread does with an entry, and reports."""

    FETCH = "fetch"
    LOAD = "load"
    DEMOTE = "demote"
    PROMOTE = "promote"
    CLOSE = "close"


@dataclass(slots=True, eq=False)
class ModelEntry:
    """One version of one model."""

    name: str
    progress: LoadProgress
    state: ModelState = ModelState.FETCHING
    version: str = ""
    model: ResidentModel | None = None
    disk: DiskLease | None = None
    device_bytes: int = 0  # counted in the budget, as host_bytes is
    host_bytes: int = 0
    need_bytes: int = 0  # more device memory before the next step
    room_until: float = 0.0  # when the wait for this memory ends
    found: str = "cold"  # where the load began, see ModelLease
    num_leases: int = 0
    is_retired: bool = False
    tickets: dict[ModelTicket, float] = field(default_factory=dict)  # requests that wait for the model, since when
    on_closed: list[OnDone] = field(default_factory=list)
    num_hits: int = 0
    last_used: float = 0.0

    @property
    def tier(self) -> ModelTier:
        if self.state is ModelState.READY:
            return ModelTier.DEVICE
        if self.state is ModelState.CLOSING:
            return ModelTier.LEAVING
        return ModelTier.HOST if self.state in (ModelState.ON_HOST, ModelState.DEMOTING) else ModelTier.LOADING


class ModelEntries:
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
