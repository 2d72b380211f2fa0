"""The model cache: tracks which models are in memory and which requests wait, and decides each model's next step.

The cache decides and does no I/O. Every method changes the state and appends to `todo`, which the registry empties:
callbacks run at once, work runs on loader threads, which report the outcome through another method. So a test tries
any order of events without a thread. The caller holds the lock.

    FETCHING -> FETCHED -> LOADING -> LOADED -> READY <-> DEMOTING -> ON_HOST -> AWAITING -> PROMOTING -> READY
    FETCHED, AWAITING and LOADED wait in a queue until the device's budget has room.
    LOADED, READY, DEMOTING, ON_HOST -> CLOSING -> CLOSED; FETCHING, FETCHED, LOADING -> CLOSED on a failure.

Invariants
* The bytes counted on a tier never exceed its budget. A model is counted before it takes memory (as an estimate while
  it loads, later as measured) and until its memory is free.
* A leased model is READY. Only a model without leases that is not pinned is demoted or closed, and closed once.
* Each ticket gets one lease or one error, unless it is cancelled.
* A replaced or unloaded version is retired: it gets no new leases, and closes when the last one ends.
"""

import math
import time
from collections.abc import Callable
from functools import partial

from handlers.errors import STOPPING, HandlerError, ModelBroken, ModelLoading, ModelUnknown, Overloaded
from handlers.many.model import DiskLease, LoadProgress, ModelLease, ResidentModel
from handlers.many.residency import eviction
from handlers.many.residency.memory_budget import MemoryBudget
from handlers.many.residency.model_entries import (
    RESIDENT,
    BrokenModel,
    LoaderStep,
    LoadHistory,
    ModelEntries,
    ModelEntry,
    ModelState,
    ModelTicket,
    OnDone,
)
from handlers.settings.many import ManySettings
from handlers.worker.counters import Counters


class ModelCache:
    """on_release: called at the end of each lease, from any thread and without the lock; calls `release`.

    is_unified: device and host are one memory, so that models leave it for the disk.
    """

    def __init__(
        self,
        settings: ManySettings,
        device_bytes: int,
        on_release: Callable[[ModelEntry], None],
        *,
        is_unified: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget = MemoryBudget(device_bytes, settings.host_bytes, is_unified=is_unified)
        self.entries = ModelEntries()
        self.history = LoadHistory()
        self.counters = Counters()
        self.todo: list[Callable[[], None] | tuple[LoaderStep, ModelEntry]] = []
        self._settings = settings
        self._on_release = on_release
        self._clock = clock
        self._is_stopped = False
        self._is_advancing = False

    # Requests

    def want(self, ticket: ModelTicket, name: str, now: float) -> None:
        """Give the ticket a lease or an error, now or later."""
        entry = self.entries.current.get(name)
        if entry is not None and entry.state is ModelState.READY:
            self.counters.add("events_hits", int(ticket.has_request))
            self._lend(entry, ticket, now)
            return
        self.counters.add("events_misses", int(ticket.has_request))
        error = self._refusal(name, entry, now)
        if error is not None:
            self.todo.append(partial(ticket.fail, error))
            return
        if entry is None:
            entry = self.entries.current[name] = ModelEntry(name, LoadProgress(self._clock))
            self.todo.append((LoaderStep.FETCH, entry))
        entry.tickets[ticket] = now
        if entry.state is ModelState.ON_HOST:
            self._promote(entry, now)

    def cancel(self, ticket: ModelTicket) -> None:
        """Forget a ticket. A load that has begun continues."""
        ticket.end()
        for entry in self.entries:
            entry.tickets.pop(ticket, None)

    def release(self, entry: ModelEntry, now: float) -> None:
        entry.num_leases -= 1
        entry.last_used = now
        self._settle(entry, now)

    # Reports of the loader threads

    def begin_fetch(self, entry: ModelEntry, now: float) -> bool:
        """Return whether a ticket still waits for the entry; if not, drop it."""
        if entry.tickets:
            return True
        self._drop(entry)
        return False

    def fetched(self, entry: ModelEntry, lease: DiskLease, num_bytes: int, now: float) -> None:
        """Queue for device memory. num_bytes: the estimate, used unless this version was measured before."""
        entry.disk, entry.version = lease, lease.version
        entry.found = "cold" if lease.is_new else "disk"
        known = self.history.find_size(entry.name, entry.version)
        entry.need_bytes = min(num_bytes, self.budget.device.max_bytes) if known is None else known
        self._enqueue(entry, ModelState.FETCHED, now)

    def loaded(self, entry: ModelEntry, model: ResidentModel, now: float) -> None:
        entry.model = model
        self.counters.add("events_loads")
        self._measure(entry, now)

    def promoted(self, entry: ModelEntry, now: float) -> None:
        self.counters.add("events_promotions")
        self.budget.count_host(entry, 0)
        self._measure(entry, now)

    def demoted(self, entry: ModelEntry, now: float) -> None:
        assert entry.model is not None
        self.counters.add("events_demotions")
        self.budget.count_device(entry, 0)
        real = self.budget.on_host(entry.model)
        has_room = self.budget.host.has_room(real - entry.host_bytes)
        if has_room:
            self.budget.count_host(entry, real)
        if has_room or entry.tickets:  # a wanted model goes straight back to the device
            self._put_on_host(entry, now)
        else:
            self._close(entry)
        self._advance(now)

    def failed(self, entry: ModelEntry, error: HandlerError, now: float) -> None:
        """Drop the entry. A failed promotion leaves it on the host, a failed demotion or measurement closes it."""
        self.counters.add("events_failures")
        if (
            isinstance(error, ModelBroken)
            and entry.state in (ModelState.FETCHING, ModelState.LOADING)
            and not entry.is_retired
        ):
            version, until = error.version or entry.version, now + self._settings.broken_s
            self.history.note_broken(entry.name, BrokenModel(error, version, until))
        self._fail_tickets(entry, error)
        if entry.state is ModelState.DEMOTING or (entry.state is ModelState.LOADING and entry.model is not None):
            self._close(entry)
            return
        if entry.state is ModelState.PROMOTING:
            self.budget.count_device(entry, 0)
            self._put_on_host(entry, now)
        else:
            self._drop(entry)
        self._advance(now)

    def closed(self, entry: ModelEntry, now: float) -> None:
        """Count the entry's memory as free."""
        self._drop(entry)
        self._advance(now)

    # Operators, the source and the clock

    def retire(self, name: str, on_closed: OnDone | None, now: float) -> None:
        """Let new requests load another version. Raises ModelUnknown if none is in memory."""
        self.history.forget_broken(name)
        entry = self.entries.current.get(name)
        if entry is None:
            raise ModelUnknown(f"model {name!r} is not loaded")
        self.entries.withdraw(entry)
        entry.is_retired = True
        if on_closed is not None:
            entry.on_closed.append(on_closed)
        self._settle(entry, now)

    def replaced(self, name: str, version: str, now: float) -> bool:
        """Retire a version that the source no longer has. Returns True if its name is pinned, to be loaded again."""
        entry = self.entries.current.get(name)
        if entry is None:
            self.history.forget_broken(name)
        if entry is None or entry.version != version:
            return False
        self.retire(name, None, now)
        return name in self.entries.pinned

    def unpin(self, name: str, now: float) -> None:
        self.entries.pinned.discard(name)
        entry = self.entries.current.get(name)
        if entry is not None:
            self._settle(entry, now)
        self._advance(now)

    def tick(self, now: float) -> None:
        """Refuse the requests and the loads that have waited too long."""
        for entry in self.entries:
            for ticket in [each for each in entry.tickets if each.until <= now]:
                del entry.tickets[ticket]
                error = ModelLoading(f"the model is still being loaded (now at: {entry.progress}); ask again later")
                self.todo.append(partial(ticket.fail, error))
        for entry in [each for each in self.entries.queue if each.room_until <= now]:
            self._refuse_room(entry, now, "which requests are using")
        self._advance(now)

    def stop(self, error: HandlerError, now: float) -> None:
        """Refuse all waiting requests and close every model without a lease."""
        self._is_stopped = True
        self.entries.pinned.clear()
        for entry in [*self.entries]:
            entry.progress.stop()
            self._fail_tickets(entry, error)
        for entry in list(self.entries.queue):
            self._refuse_room(entry, now, "and the worker is stopping")
        for name in list(self.entries.current):
            self.retire(name, None, now)

    # Observation

    @property
    def shortest_wait_s(self) -> float:
        """Safe to sleep for this time between two ticks: a wait that begins meanwhile ends after the sleep."""
        return min(self._settings.hold_s, self._settings.room_timeout_s)

    def next_deadline(self) -> float:
        """Return when `tick` must be called next; infinite if nothing waits."""
        deadlines = [ticket.until for entry in self.entries for ticket in entry.tickets]
        return min([*deadlines, *(each.room_until for each in self.entries.queue)], default=math.inf)

    def next_to_go(self) -> list[str]:
        """List the models on the device in the order of their eviction."""
        return [entry.name for entry in eviction.device_victims(self.entries)]

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the budgets, the collections and the tickets are consistent."""
        self.budget.check_integrity(self.entries)
        self.entries.check_integrity()

    # Steps

    def _refusal(self, name: str, entry: ModelEntry | None, now: float) -> HandlerError | None:
        """Return why a request cannot wait for this model, if it cannot."""
        if self._is_stopped:
            return Overloaded(STOPPING)
        broken = self.history.find_broken(name, now)
        if broken is not None:
            return broken.error
        waiting = self.entries.num_waiting()
        if waiting >= self._settings.max_waiting:
            return Overloaded(f"{waiting} requests are waiting for models, the most that may")
        if entry is None:
            loading = sum(each.state not in RESIDENT for each in self.entries.current.values())
            if loading >= self._settings.max_loading:
                return Overloaded(f"{loading} models are being loaded or wait for it, the most that may")
        return None

    def _promote(self, entry: ModelEntry, now: float) -> None:
        entry.found = "host"
        entry.need_bytes = self.history.find_size(entry.name, entry.version) or 0
        self._enqueue(entry, ModelState.AWAITING, now)

    def _enqueue(self, entry: ModelEntry, state: ModelState, now: float) -> None:
        entry.room_until = now + self._settings.room_timeout_s
        self.entries.move(entry, state)
        self._advance(now)

    def _put_on_host(self, entry: ModelEntry, now: float) -> None:
        """Keep the model on the host, unless it is wanted on the device or retired."""
        self.entries.move(entry, ModelState.ON_HOST)
        if entry.tickets:
            self._promote(entry, now)
        elif entry.is_retired:
            self._close(entry)

    def _advance(self, now: float) -> None:
        """Admit entries from the queue while the device has room, and evict others to make room.

        Called after each end of a lease, a load or an eviction, the only events that the queue waits for.
        """
        if self._is_advancing:
            return
        self._is_advancing = True
        device = self.budget.device
        try:
            while self.entries.queue:
                entry = self.entries.queue[0]
                if device.has_room(entry.need_bytes):
                    self._admit(entry, now)
                elif entry.need_bytes > eviction.reachable_bytes(self.entries, self.budget, entry):
                    self._refuse_room(entry, now, "even without every model that may be evicted")
                elif device.has_room(entry.need_bytes - eviction.leaving_bytes(self.entries)) or not self._evict():
                    break
        finally:
            self._is_advancing = False

    def _evict(self) -> bool:
        """Begin to make room on the device. Returns False if no model can leave it now."""
        steps = eviction.plan_eviction(self.entries, self.budget)
        for work, entry in steps:
            if work is LoaderStep.CLOSE:
                self.counters.add("events_evictions")
                self._close(entry)
            else:
                self.budget.count_host(entry, self.budget.after_demotion(entry))
                self.entries.move(entry, ModelState.DEMOTING)
                self.todo.append((LoaderStep.DEMOTE, entry))
        return bool(steps)

    def _admit(self, entry: ModelEntry, now: float) -> None:
        """Count the memory that the entry needs and begin its next step."""
        self.budget.count_device(entry, entry.device_bytes + entry.need_bytes)
        entry.need_bytes = 0
        if entry.state is ModelState.FETCHED:
            self.entries.move(entry, ModelState.LOADING)
            self.todo.append((LoaderStep.LOAD, entry))
        elif entry.state is ModelState.AWAITING:
            self.entries.move(entry, ModelState.PROMOTING)
            self.todo.append((LoaderStep.PROMOTE, entry))
        else:
            self._make_ready(entry, now)

    def _measure(self, entry: ModelEntry, now: float) -> None:
        """Replace the estimate of the device memory by what the model takes, which may need more room."""
        assert entry.model is not None
        real = self.budget.on_device(entry.model)
        self.history.note_size(entry.name, entry.version, real)
        if real > entry.device_bytes:
            entry.need_bytes = real - entry.device_bytes
            self._enqueue(entry, ModelState.LOADED, now)
        else:
            self.budget.count_device(entry, real)
            self._make_ready(entry, now)
            self._advance(now)

    def _make_ready(self, entry: ModelEntry, now: float) -> None:
        entry.last_used = now
        self.entries.move(entry, ModelState.READY)
        for ticket in list(entry.tickets):
            self._lend(entry, ticket, now)
        self._settle(entry, now)

    def _lend(self, entry: ModelEntry, ticket: ModelTicket, now: float) -> None:
        assert entry.model is not None
        entry.num_leases += 1
        entry.num_hits += ticket.has_request
        entry.last_used = now
        self.entries.on_device.move_to_end(entry)
        lease = ModelLease(entry.model, partial(self._on_release, entry))
        if ticket in entry.tickets:
            lease.found, lease.load_s = entry.found, now - entry.tickets.pop(ticket)
            if ticket.has_request:
                self.counters.observe("wait", lease.load_s)
        self.todo.append(partial(ticket.hand_over, lease))

    def _settle(self, entry: ModelEntry, now: float) -> None:
        """Close the entry if it is idle and not to be kept; otherwise let the queue use what has become free."""
        is_idle = entry.state in RESIDENT and not entry.num_leases
        is_dropped = self._settings.cache == "disabled" and not self.entries.is_pinned(entry)
        if is_idle and (entry.is_retired or is_dropped):
            self._close(entry)
        elif entry.num_leases == 0:
            self._advance(now)

    def _close(self, entry: ModelEntry) -> None:
        self.entries.withdraw(entry)
        self.entries.move(entry, ModelState.CLOSING)
        self.todo.append((LoaderStep.CLOSE, entry))

    def _refuse_room(self, entry: ModelEntry, now: float, why: str) -> None:
        """Take an entry out of the queue and fail its tickets."""
        self.counters.add("events_failures")
        self._fail_tickets(entry, self.budget.refusal(entry, why))
        if entry.state is ModelState.LOADED:
            self._close(entry)
        elif entry.state is ModelState.AWAITING:
            self._put_on_host(entry, now)
        else:
            self._drop(entry)

    def _drop(self, entry: ModelEntry) -> None:
        """Forget the entry and count its memory as free."""
        self.entries.remove(entry)
        self.budget.count_device(entry, 0)
        self.budget.count_host(entry, 0)
        entry.model = None
        if entry.disk is not None:
            self.todo.append(entry.disk.release)
        self.todo.extend(partial(on_closed, None) for on_closed in entry.on_closed)

    def _fail_tickets(self, entry: ModelEntry, error: HandlerError) -> None:
        for ticket in entry.tickets:
            self.todo.append(partial(ticket.fail, error))
        entry.tickets.clear()
