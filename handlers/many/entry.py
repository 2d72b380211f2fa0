"""What the shelf knows of one version of one model, of those who wait for it, and of one tier's bytes."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from handlers.errors import HandlerError, ModelBroken
from handlers.many.disk import DiskLease
from handlers.many.model import Lease, Loaded, Progress, Tier

OnDone = Callable[[HandlerError | None], None]


class State(Enum):
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


class Work(Enum):
    """What the registry does with an entry, and tells afterwards."""

    FETCH = "fetch"
    LOAD = "load"
    DEMOTE = "demote"
    PROMOTE = "promote"
    CLOSE = "close"


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


@dataclass(slots=True, eq=False)
class Entry:
    """One version of one model."""

    name: str
    progress: Progress
    state: State = State.FETCHING
    version: str = ""
    model: Loaded | None = None
    disk: DiskLease | None = None
    device_bytes: int = 0  # counted, as host_bytes is
    host_bytes: int = 0
    need_bytes: int = 0  # more on the device before it can go on
    room_until: float = 0.0
    found: str = "cold"  # where those found it who wait, see Lease
    num_leases: int = 0
    tickets: "OrderedDict[Ticket, None]" = field(default_factory=OrderedDict)
    is_retired: bool = False
    on_closed: list[OnDone] = field(default_factory=list)
    num_hits: int = 0
    last_used: float = 0.0

    def __repr__(self) -> str:
        return f"<Entry {self.name} {self.state.name} {self.num_leases} leases {len(self.tickets)} waiting>"


@dataclass(frozen=True, slots=True)
class Broken:
    """What is remembered of a model that cannot be used, so that it is not read again for each request."""

    error: ModelBroken
    version: str  # empty if it came to none
    until: float


@dataclass(slots=True)
class Budget:
    """Bytes of one tier."""

    max_bytes: int
    used_bytes: int = 0

    def has_room(self, num_bytes: int) -> bool:
        return self.used_bytes + num_bytes <= self.max_bytes


@dataclass(slots=True)
class Counters:
    """What a worker's models have done since it started."""

    hits: int = 0  # requests whose model was on the device
    misses: int = 0
    loads: int = 0
    promotions: int = 0
    demotions: int = 0
    evictions: int = 0  # from memory, the host's if there is one
    failures: int = 0


def tier_of(entry: Entry) -> Tier:
    if entry.state is State.READY:
        return Tier.DEVICE
    return Tier.HOST if entry.state in (State.ON_HOST, State.DEMOTING) else Tier.LOADING
