"""The state of each model from its download to the release of its memory, and the requests that wait for it."""

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from handlers.errors import HandlerError, ModelBroken
from handlers.many.model import DiskLease, LoadProgress, ModelLease, ModelTier, ResidentModel
from torchmoor.wire.last_kept import LastKept

OnDone = Callable[[HandlerError | None], None]
MAX_REMEMBERED = 10_000  # failed loads, and sizes


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

    @property
    def has_request(self) -> bool:
        """Whether a request waits for the model: False for a load by an operator or a setting."""
        return self.until < math.inf

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
    num_hits: int = 0  # requests that have got a lease
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
        return sum(ticket.has_request for entry in self for ticket in entry.tickets)

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


@dataclass(frozen=True, slots=True)
class BrokenModel:
    """A failed load, kept so that the model is not read again for each request."""

    error: ModelBroken
    version: str  # empty if it failed before one was found
    until: float


class LoadHistory:
    """Which models are broken, and how much memory each version takes.

    Outlives the models in memory. Bounded: the oldest record is dropped first.
    """

    def __init__(self) -> None:
        self._broken: LastKept[str, BrokenModel] = LastKept(MAX_REMEMBERED)
        self._sizes: LastKept[tuple[str, str], int] = LastKept(MAX_REMEMBERED)

    def note_broken(self, name: str, broken: BrokenModel) -> None:
        self._broken.keep(name, broken)

    def forget_broken(self, name: str) -> None:
        self._broken.pop(name, None)

    def find_broken(self, name: str, now: float) -> BrokenModel | None:
        broken = self._broken.get(name)
        return broken if broken is not None and now < broken.until else None

    def broken(self, now: float) -> dict[str, BrokenModel]:
        return {name: each for name, each in self._broken.items() if now < each.until}

    def note_size(self, name: str, version: str, num_bytes: int) -> None:
        self._sizes.keep((name, version), num_bytes)

    def find_size(self, name: str, version: str) -> int | None:
        """Return the measured bytes on the device, None before the first load."""
        return self._sizes.get((name, version))
