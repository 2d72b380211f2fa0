"""What the shelf knows of one version of one model: where it is on its way, and what may be done with it."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from handlers.errors import HandlerError
from handlers.many.archives.disk import DiskLease
from handlers.many.model import Loaded, Progress, Tier
from handlers.many.residency.waiters import Ticket

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
    tickets: OrderedDict[Ticket, None] = field(default_factory=OrderedDict)
    is_retired: bool = False
    on_closed: list[OnDone] = field(default_factory=list)
    num_hits: int = 0
    last_used: float = 0.0

    def __repr__(self) -> str:
        return f"<Entry {self.name} {self.state.name} {self.num_leases} leases {len(self.tickets)} waiting>"


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
    if entry.state is State.CLOSING:
        return Tier.LEAVING
    return Tier.HOST if entry.state in (State.ON_HOST, State.DEMOTING) else Tier.LOADING
