"""Which models are in memory, who uses them, who waits for them, and what must be done next. Nothing is done here.

Every method changes the state and leaves work in `todo`, which the registry takes out and does in its threads; what
comes of it is told by another method. So any order of events can be tried without a thread. The caller has the lock.

    FETCHING -> FETCHED -> LOADING -> LOADED -> READY <-> DEMOTING -> ON_HOST -> AWAITING -> PROMOTING -> READY
    from FETCHED, AWAITING and LOADED there is only a way on when the device's budget has room: they stand in a queue.
    From LOADED, READY, DEMOTING, ON_HOST -> CLOSING -> CLOSED; from FETCHING, FETCHED, LOADING -> CLOSED, failed.

What holds at any time
* What is counted on a tier never exceeds its budget. A model is counted from the moment that it may take memory (an
  estimate while it loads, afterwards what it says itself) until it says that the memory is free.
* A model with a lease is READY. Only one without leases, that is not pinned, is demoted or closed, and once.
* Each waiter hears once: a lease, an error, or nothing because it was cancelled.
* A version that was replaced or unloaded is retired: it gets no new leases, and is closed when the last one ends.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial

from handlers.errors import HandlerError, ModelBroken, ModelLoading, ModelUnknown, OutOfMemory, Overloaded
from handlers.many.archives.disk import DiskLease
from handlers.many.model import Lease, Loaded, Progress
from handlers.many.residency.entry import Counters, Entry, OnDone, State, Work
from handlers.many.residency.load_history import Broken, Known
from handlers.many.residency.memory_budget import Ledger
from handlers.many.residency.waiters import Ticket, Waiters
from handlers.settings import ManySettings

QUEUED = (State.FETCHED, State.AWAITING, State.LOADED)


class Shelf:
    """give_back: what a lease calls, from any thread and without the lock; it comes to `give_back` here.

    is_unified: the device's memory is the host's, so that there is no tier between it and the disk.
    """

    def __init__(
        self,
        settings: ManySettings,
        device_bytes: int,
        give_back: Callable[[Entry], None],
        *,
        is_unified: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger = Ledger(
            device_bytes, settings.host_bytes, is_unified=is_unified, count_mapped=settings.count_mapped
        )
        self.waiters = Waiters()
        self.known = Known()
        self.counters = Counters()
        self.pinned: set[str] = set()
        self.entries: dict[str, Entry] = {}  # the version of each name that new requests get
        self.others: set[Entry] = set()  # retired, or on their way out, and still counted
        self.todo: list[Callable[[], None] | tuple[Work, Entry]] = []
        self.is_stopped = False
        self._settings = settings
        self._give_back = give_back
        self._clock = clock
        self._is_unified = is_unified
        self._ready: OrderedDict[Entry, None] = OrderedDict()  # the least recently used first
        self._on_host: OrderedDict[Entry, None] = OrderedDict()
        self._queue: deque[Entry] = deque()  # for room on the device
        self._is_advancing = False

    # Requests

    def want(self, ticket: Ticket, name: str, now: float) -> None:
        """A lease for the ticket, now or later."""
        entry = self.entries.get(name)
        if entry is not None and entry.state is State.READY:
            self.counters.hits += 1
            self._lend(entry, ticket, now)
            return
        self.counters.misses += 1
        error = self._refusal(name, entry, now)
        if error is not None:
            self.todo.append(partial(ticket.fail, error))
            return
        if entry is None:
            entry = self.entries[name] = Entry(name, Progress(self._clock))
            self._do(Work.FETCH, entry)
        self.waiters.add(ticket, entry, now)
        if entry.state is State.ON_HOST:
            self._promote(entry, now)

    def cancel(self, ticket: Ticket) -> None:
        """The ticket's owner has left. A load that has begun goes on."""
        ticket.end()
        self.waiters.remove(ticket)

    def give_back(self, entry: Entry, now: float) -> None:
        """A lease has ended."""
        entry.num_leases -= 1
        entry.last_used = now
        self._settle(entry, now)

    # What came of the work

    def begin_fetch(self, entry: Entry, now: float) -> bool:
        """Its turn has come. If False, nobody waits for it now, and the entry is gone; nothing more is told of it."""
        if entry.tickets:
            return True
        self._drop(entry)
        return False

    def fetched(self, entry: Entry, lease: DiskLease, num_bytes: int, now: float) -> None:
        """num_bytes: an estimate of what it takes on the device, unless it was there before."""
        entry.disk, entry.version, entry.state = lease, lease.version, State.FETCHED
        entry.found = "cold" if lease.is_new else "disk"
        known = self.known.find_size(entry.name, entry.version)
        entry.need_bytes = min(num_bytes, self.ledger.device.max_bytes) if known is None else known
        self._enqueue(entry, now)

    def loaded(self, entry: Entry, model: Loaded, now: float) -> None:
        entry.model, entry.state = model, State.LOADED
        self.counters.loads += 1
        self._measure(entry, now)

    def promoted(self, entry: Entry, now: float) -> None:
        self.counters.promotions += 1
        self.ledger.count_host(entry, 0)
        entry.state = State.LOADED
        self._measure(entry, now)

    def demoted(self, entry: Entry, now: float) -> None:
        assert entry.model is not None
        self.counters.demotions += 1
        self.ledger.count_device(entry, 0)
        real = self.ledger.on_host(entry.model)
        if self.ledger.host.has_room(real - entry.host_bytes):
            self.ledger.count_host(entry, real)
            self._put_on_host(entry, now)
        elif entry.tickets:  # it has grown on its way, but goes back at once
            self._put_on_host(entry, now)
        else:
            self._close(entry)
        self._advance(now)

    def failed(self, entry: Entry, error: HandlerError, now: float) -> None:
        """To be fetched, loaded, or promoted: then it stays on the host, where it was. Or demoted: then it goes."""
        self.counters.failures += 1
        if isinstance(error, ModelBroken) and entry.state in (State.FETCHING, State.LOADING) and not entry.is_retired:
            version, until = error.version or entry.version, now + self._settings.broken_s
            self.known.note_broken(entry.name, Broken(error, version, until))
        self._fail_tickets(entry, error)
        if entry.state is State.PROMOTING:
            self.ledger.count_device(entry, 0)
            self._put_on_host(entry, now)
            self._advance(now)
        elif entry.state is State.DEMOTING:
            self._close(entry)
        else:
            self._drop(entry)
            self._advance(now)

    def closed(self, entry: Entry, now: float) -> None:
        """Its memory is free."""
        assert entry.state is State.CLOSING
        self._drop(entry)
        self._advance(now)

    # What an operator, the source and the clock say

    def retire(self, name: str, on_closed: OnDone | None, now: float) -> None:
        """New requests get another version, or another look at the source; raises ModelUnknown if none is in memory."""
        self.known.forget_broken(name)
        entry = self.entries.get(name)
        if entry is None:
            raise ModelUnknown(f"model {name!r} is not loaded")
        del self.entries[name]
        self.others.add(entry)
        entry.is_retired = True
        if on_closed is not None:
            entry.on_closed.append(on_closed)
        self._settle(entry, now)

    def unpin(self, name: str, now: float) -> None:
        self.pinned.discard(name)
        entry = self.entries.get(name)
        if entry is not None:
            self._settle(entry, now)
        self._advance(now)

    def tick(self, now: float) -> None:
        """Whoever has waited long enough is told."""
        for ticket in self.waiters.take_overdue(now):
            stage = "" if ticket.entry is None else f" (now at: {ticket.entry.progress})"
            error = ModelLoading(f"the model is still being loaded{stage}; ask again later")
            self.todo.append(partial(ticket.fail, error))
        for entry in [each for each in self._queue if each.room_until <= now]:
            self._refuse_room(entry, now, "which requests are using")
        self._advance(now)

    def stop(self, error: HandlerError, now: float) -> None:
        """Nobody waits any more, and what nobody uses is closed."""
        self.is_stopped = True
        self.pinned.clear()
        for entry in [*self.entries.values(), *self.others]:
            entry.progress.stop()
            self._fail_tickets(entry, error)
        for entry in list(self._queue):
            self._refuse_room(entry, now, "and the worker is stopping")
        for name in list(self.entries):
            self.retire(name, None, now)

    # What is there to see

    def next_deadline(self) -> float:
        """When `tick` has something to do next; infinite if nobody waits."""
        return min([self.waiters.next_deadline(), *(each.room_until for each in self._queue)])

    def next_to_go(self) -> list[str]:
        """Models on the device in the order in which they would leave it."""
        return [entry.name for entry in self._ready if self._may_go(entry)]

    def check_integrity(self) -> None:
        """Raise RuntimeError unless what is counted adds up, fits, and nobody was forgotten."""
        everyone = [*self.entries.values(), *self.others]
        self.ledger.check_integrity(everyone)
        self.waiters.check_integrity(everyone)
        for entry in everyone:
            is_wrong = (
                (entry.num_leases and entry.state is not State.READY)
                or (entry in self._ready) != (entry.state is State.READY)
                or (entry in self._on_host) != (entry.state is State.ON_HOST)
                or (entry in self._queue) != (entry.state in QUEUED)
                or (entry.tickets and entry.state in (State.READY, State.ON_HOST, State.CLOSING, State.CLOSED))
            )
            if is_wrong:
                raise RuntimeError(f"{entry!r} is where it does not belong")

    # Steps

    def _refusal(self, name: str, entry: Entry | None, now: float) -> HandlerError | None:
        """Why nobody can wait for this model now."""
        if self.is_stopped:
            return Overloaded("the worker is stopping")
        broken = self.known.find_broken(name, now)
        if broken is not None:
            return broken.error
        if len(self.waiters) >= self._settings.max_waiting:
            return Overloaded(f"{len(self.waiters)} requests are waiting for models, the most that may")
        if entry is None:
            loading = sum(each.state not in (State.READY, State.ON_HOST) for each in self.entries.values())
            if loading >= self._settings.max_loading:
                return Overloaded(f"{loading} models are being loaded or wait for it, the most that may")
        return None

    def _promote(self, entry: Entry, now: float) -> None:
        del self._on_host[entry]
        entry.state = State.AWAITING
        entry.found = "host"
        entry.need_bytes = self.known.find_size(entry.name, entry.version) or 0
        self._enqueue(entry, now)

    def _enqueue(self, entry: Entry, now: float) -> None:
        entry.room_until = now + self._settings.room_timeout_s
        if entry.state is State.LOADED:
            self._queue.appendleft(entry)  # it holds memory already
        else:
            self._queue.append(entry)
        self._advance(now)

    def _put_on_host(self, entry: Entry, now: float) -> None:
        """Unless it is superfluous, or somebody has come to wait for it."""
        entry.state = State.ON_HOST
        self._on_host[entry] = None
        if entry.tickets:
            self._promote(entry, now)
        elif entry.is_retired:
            self._close(entry)

    def _advance(self, now: float) -> None:
        """Let the first in the queue go on while there is room, and make room for it.

        It waits for nothing but what will happen: ends of leases, of loads and of evictions, which all come here.
        """
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while self._queue:
                entry = self._queue[0]
                if self.ledger.device.has_room(entry.need_bytes):
                    self._queue.popleft()
                    self._admit(entry, now)
                elif entry.need_bytes > self._free_some_day(entry):
                    self._refuse_room(entry, now, "even without every model that may be evicted")
                elif self._is_leaving(entry.need_bytes) or not self._evict_from_device():
                    break
        finally:
            self._is_advancing = False

    def _is_leaving(self, num_bytes: int) -> bool:
        """Whether the device has room enough once everything has left it that is on its way out."""
        leaving = sum(
            each.device_bytes
            for each in (*self.entries.values(), *self.others)
            if each.state in (State.CLOSING, State.DEMOTING)
        )
        return self.ledger.device.has_room(num_bytes - leaving)

    def _free_some_day(self, entry: Entry) -> int:
        """Bytes that the device has for an entry when all the others that can leave have left.

        Not those that wait for room themselves with memory in their hands: two would wait for each other.
        """
        stay = sum(
            each.device_bytes
            for each in (*self.entries.values(), *self.others)
            if each is entry or each.state is State.LOADED or self._is_pinned(each)
        )
        return self.ledger.device.max_bytes - stay

    def _admit(self, entry: Entry, now: float) -> None:
        self.ledger.count_device(entry, entry.device_bytes + entry.need_bytes)
        entry.need_bytes = 0
        if entry.state is State.FETCHED:
            entry.state = State.LOADING
            self._do(Work.LOAD, entry)
        elif entry.state is State.AWAITING:
            entry.state = State.PROMOTING
            self._do(Work.PROMOTE, entry)
        else:
            self._make_ready(entry, now)

    def _measure(self, entry: Entry, now: float) -> None:
        """What it takes on the device is counted as it is, not as it was guessed."""
        assert entry.model is not None
        real = self.ledger.on_device(entry.model)
        self.known.note_size(entry.name, entry.version, real)
        if real > entry.device_bytes:
            entry.need_bytes = real - entry.device_bytes
            self._enqueue(entry, now)
        else:
            self.ledger.count_device(entry, real)
            self._make_ready(entry, now)
            self._advance(now)

    def _make_ready(self, entry: Entry, now: float) -> None:
        entry.state = State.READY
        entry.last_used = now
        self._ready[entry] = None
        for ticket in list(entry.tickets):
            self.waiters.remove(ticket)
            self._lend(entry, ticket, now)
        self._settle(entry, now)

    def _lend(self, entry: Entry, ticket: Ticket, now: float) -> None:
        entry.num_leases += 1
        entry.num_hits += 1
        entry.last_used = now
        self._ready.move_to_end(entry)
        ticket.entry = entry
        assert entry.model is not None
        back = partial(self._give_back, entry)
        if ticket.came_at is None:
            lease = Lease(entry.name, entry.version, entry.model, back)
        else:
            waited_s = now - ticket.came_at
            lease = Lease(entry.name, entry.version, entry.model, back, found=entry.found, load_s=waited_s)
        self.todo.append(partial(ticket.hand_over, lease))

    def _settle(self, entry: Entry, now: float) -> None:
        """After anything that may have made it superfluous."""
        is_idle = entry.state in (State.READY, State.ON_HOST) and not entry.num_leases
        is_dropped = self._settings.cache == "disabled" and not self._is_pinned(entry)
        if is_idle and (entry.is_retired or is_dropped):
            self._close(entry)
        elif entry.num_leases == 0:
            self._advance(now)

    def _is_pinned(self, entry: Entry) -> bool:
        return entry.name in self.pinned and not entry.is_retired

    def _may_go(self, entry: Entry) -> bool:
        return not entry.num_leases and not self._is_pinned(entry)

    def _evict_from_device(self) -> bool:
        """Send the least recently used on its way, to the host if there is room. False if nothing can go yet."""
        entry = next((each for each in self._ready if self._may_go(each)), None)
        if entry is None:
            return False
        assert entry.model is not None
        num_bytes = entry.device_bytes + self.ledger.on_host(entry.model)
        while num_bytes <= self.ledger.host.max_bytes and not self._is_leaving_host(num_bytes) and self._on_host:
            self.counters.evictions += 1
            self._close(next(iter(self._on_host)))
        if self._is_unified or not self._is_leaving_host(num_bytes):
            self.counters.evictions += 1
            self._close(entry)
        elif self.ledger.host.has_room(num_bytes):
            del self._ready[entry]
            entry.state = State.DEMOTING
            self.ledger.count_host(entry, num_bytes)
            self._do(Work.DEMOTE, entry)
        else:
            return False  # once what leaves the host has left it
        return True

    def _is_leaving_host(self, num_bytes: int) -> bool:
        leaving = sum(each.host_bytes for each in self.others if each.state is State.CLOSING)
        return self.ledger.host.has_room(num_bytes - leaving)

    def _close(self, entry: Entry) -> None:
        self._ready.pop(entry, None)
        self._on_host.pop(entry, None)
        if self.entries.get(entry.name) is entry:
            del self.entries[entry.name]
        self.others.add(entry)
        entry.state = State.CLOSING
        self._do(Work.CLOSE, entry)

    def _refuse_room(self, entry: Entry, now: float, why: str) -> None:
        """Of an entry in the queue."""
        self._queue.remove(entry)
        device = self.ledger.device
        error = OutOfMemory(
            f"the model needs {entry.need_bytes} bytes more on the device, whose budget is {device.max_bytes}, "
            f"{device.used_bytes} of them taken, {why}"
        )
        self.counters.failures += 1
        self._fail_tickets(entry, error)
        if entry.state is State.LOADED:
            self._close(entry)
        elif entry.state is State.AWAITING:
            self._put_on_host(entry, now)
        else:
            self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        """It is nowhere any more."""
        if self.entries.get(entry.name) is entry:
            del self.entries[entry.name]
        self.others.discard(entry)
        self.ledger.count_device(entry, 0)
        self.ledger.count_host(entry, 0)
        entry.state = State.CLOSED
        entry.model = None
        if entry.disk is not None:
            self.todo.append(entry.disk.release)
        self.todo.extend(partial(on_closed, None) for on_closed in entry.on_closed)

    def _fail_tickets(self, entry: Entry, error: HandlerError) -> None:
        for ticket in list(entry.tickets):
            self.waiters.remove(ticket)
            self.todo.append(partial(ticket.fail, error))

    def _do(self, work: Work, entry: Entry) -> None:
        self.todo.append((work, entry))
