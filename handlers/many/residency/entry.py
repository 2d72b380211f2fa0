"""The state of one version of one model, from its download to the release of its memory."""

from collections.abc import Callable
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

    def __repr__(self) -> str:
        return f"<ModelEntry {self.name} {self.state.name} {self.num_leases} leases>"
