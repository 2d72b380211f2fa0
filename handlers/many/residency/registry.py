"""From a model's name to a lease of it, loaded.

Requests never wait here: `acquire` answers through callbacks. What the shelf decides is done by the workshop's threads.
One thread watches the clock, one compares the models in memory with their source. The lock is held for bookkeeping
only, never while a model, the disk or a caller's code is at work.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from handlers.errors import HandlerError, LoadStopped, ModelLoaded, ModelUnknown, SourceUnavailable
from handlers.many.archives.disk import DiskCache, take_home
from handlers.many.model import Lease, Loader, Tier, Waiter
from handlers.many.residency.entry import Entry, OnDone, State, Work, tier_of
from handlers.many.residency.loader_threads import MAX_TIMES, Workshop
from handlers.many.residency.process_memory import choose_device_bytes
from handlers.many.residency.shelf import Shelf
from handlers.many.residency.waiters import Ticket
from handlers.many.sources.source import GivenSource, check_name, open_source
from handlers.settings import ManySettings

logger = logging.getLogger(__name__)
MIN_TICK_S = 0.01


class ModelRegistry:
    """lock_file: kept open as long as the registry lives, see take_home.

    All methods may be called from any thread, and none but `refresh` and `close` takes longer than a look-up.
    """

    def __init__(
        self,
        settings: ManySettings,
        source: GivenSource,
        disk: DiskCache,
        load: Loader,
        device: torch.device,
        lock_file: IO[str] | None = None,
    ) -> None:
        self._settings = settings
        self._source = source
        self._disk = disk
        self._lock_file = lock_file
        self._lock = threading.Lock()
        device_bytes = settings.device_bytes or choose_device_bytes(device)
        self._shelf = Shelf(settings, device_bytes, self._give_back, is_unified=device.type == "cpu")
        self._workshop = Workshop(settings, self._shelf, disk, load, device, self._tell)
        self._times = {"wait": deque[float](maxlen=MAX_TIMES), **self._workshop.times}
        self._stopping = threading.Event()
        self._watchers = [
            threading.Thread(target=self._watch_clock, name="many-clock", daemon=True),
            threading.Thread(target=self._watch_source, name="many-refresh", daemon=True),
        ]
        for thread in self._watchers:
            thread.start()
        for name in settings.pinned:
            self.pin(name, partial(_log_done, "pinned", name))
        for name in settings.prewarmed:
            self.prewarm(name, partial(_log_done, "prewarmed", name))

    def acquire(
        self, name: str, on_ready: Callable[[Lease], None], on_failed: Callable[[HandlerError], None]
    ) -> Waiter:
        """Exactly one of the two is called: at once, in this thread, if the model is on the device or cannot be had.

        Else from a thread of the registry's, and it must return soon. Errors: ModelUnknown, ModelBroken, ModelLoading
        after hold_s, while the load goes on, OutOfMemory, OutOfDisk, Overloaded, SourceUnavailable, LoadStopped.
        """

        def ready(lease: Lease) -> None:
            if lease.found != "hit":
                self._times["wait"].append(lease.load_s)
            on_ready(lease)

        return self._want(name, ready, on_failed, time.monotonic() + self._settings.hold_s)

    def load(self, name: str, url: str | None, on_done: OnDone) -> None:
        """For an operator or a platform: into memory, until it is evicted. ModelLoaded if it is there already.

        url: a path or file:// below one of url_roots, which the name means from now on.
        """
        try:
            name = check_name(name)
            with self._lock:
                entry = self._shelf.entries.get(name)
                if entry is not None and tier_of(entry) is not Tier.LOADING:
                    raise ModelLoaded(f"model {name!r} is loaded already")
            if url is not None:
                self._source.give(name, url)
        except HandlerError as error:
            on_done(error)
            return

        def done(error: HandlerError | None) -> None:
            if error is not None and url is not None:
                self._source.forget(name)
            on_done(error)

        self.prewarm(name, done)

    def unload(self, name: str, on_done: OnDone) -> None:
        """Done when its leases have ended and its memory is free. ModelUnknown if it is not in memory."""
        try:
            name = check_name(name)
            self._source.forget(name)
            self._tell(self._shelf.unpin, name)
            self._tell(self._shelf.retire, name, on_done)
        except HandlerError as error:
            on_done(error)

    def prewarm(self, name: str, on_done: OnDone) -> None:
        """Load it if it is not on the device."""

        def ready(lease: Lease) -> None:
            lease.release()
            on_done(None)

        self._want(name, ready, on_done, math.inf)

    def pin(self, name: str, on_done: OnDone) -> None:
        """Load it, and keep it on the device whatever comes, in its newest version. An error leaves it unpinned."""

        def done(error: HandlerError | None) -> None:
            if error is not None:
                self._tell(self._shelf.unpin, name)
            on_done(error)

        try:
            name = check_name(name)
        except HandlerError as error:
            on_done(error)
            return
        with self._lock:
            self._shelf.pinned.add(name)
        self.prewarm(name, done)

    def unpin(self, name: str) -> None:
        """Raises ModelUnknown if it is not pinned."""
        name = check_name(name)
        if name not in self._shelf.pinned:
            raise ModelUnknown(f"model {name!r} is not pinned")
        self._tell(self._shelf.unpin, name)

    def status(self) -> dict[str, Any]:
        """What is where, in bytes and seconds; `next_to_go` from the next one on."""
        now = time.monotonic()
        with self._lock:
            shelf = self._shelf
            models = [self._describe(entry, now) for entry in (*shelf.entries.values(), *shelf.others)]
            broken = shelf.known.broken(now)
            next_to_go = shelf.next_to_go()
            counters = {name: getattr(shelf.counters, name) for name in type(shelf.counters).__slots__}
            budgets = {
                "device": {"used": shelf.ledger.device.used_bytes, "max": shelf.ledger.device.max_bytes},
                "host": {"used": shelf.ledger.host.used_bytes, "max": shelf.ledger.host.max_bytes},
                "disk": {"used": self._disk.used_bytes, "max": self._settings.disk_bytes},
            }
            in_memory = set(shelf.entries)
            num_waiting = len(shelf.waiters)
        for name, each in broken.items():
            models.append({"name": name, "version": each.version, "tier": "broken", "reason": each.error.message})
        for name, version, num_bytes in self._disk.models():
            if name not in in_memory:
                models.append({"name": name, "version": version, "tier": Tier.DISK.value, "bytes": num_bytes})
        return {
            "models": models,
            "loading": [each["name"] for each in models if each["tier"] == Tier.LOADING.value],
            "budgets": budgets,
            "next_to_go": next_to_go,
            "waiting": num_waiting,
            "counters": counters,
        }

    def drain_times(self, kind: str) -> list[float]:
        """Seconds of each event since the last time: a download with its unpacking, a load, an unload until its memory
        is free, a wait of a request whose model was not on the device.
        """
        times = self._times[kind]
        return [times.popleft() for _ in range(len(times))]

    def refresh(self) -> None:
        """Compare what is in memory, or is remembered as broken, with the source, and give up what was replaced."""
        with self._lock:
            known = {name: entry.version for name, entry in self._shelf.entries.items() if entry.version}
            broken = {name: each.version for name, each in self._shelf.known.broken(time.monotonic()).items()}
        for name, version in {**known, **broken}.items():
            if self._stopping.is_set():
                return
            try:
                newest = self._source.find(name).version
            except SourceUnavailable as exc:
                logger.warning("models cannot be compared with their source reason=%s", exc)
                return
            except HandlerError:  # gone, or not to be read
                newest = ""
            if newest != version:
                self._replace(name, version)

    def close(self) -> None:
        """Every waiter is told, every model is closed, those with leases when these end. Stops the threads."""
        self._stopping.set()
        error = LoadStopped("the worker is stopping")
        self._tell(self._shelf.stop, error)
        self._workshop.close()
        for thread in self._watchers:
            thread.join()
        if self._lock_file is not None:
            self._lock_file.close()

    def check_integrity(self) -> None:
        """Raise RuntimeError if the books are wrong."""
        with self._lock:
            self._shelf.check_integrity()

    def _want(
        self,
        name: str,
        on_ready: Callable[[Lease], None],
        on_failed: Callable[[HandlerError], None],
        until: float,
    ) -> Waiter:
        ticket = Ticket(on_ready, on_failed, until)
        try:
            name = check_name(name)
        except HandlerError as error:
            ticket.fail(error)
            return _Waiter(self, ticket)
        self._tell(self._shelf.want, ticket, name)
        return _Waiter(self, ticket)

    def _replace(self, name: str, version: str) -> None:
        with self._lock:
            entry = self._shelf.entries.get(name)
            if entry is None:
                self._shelf.known.forget_broken(name)
                return
            if entry.version != version:
                return
            self._shelf.retire(name, None, time.monotonic())
            todo = self._take_todo()
            is_pinned = name in self._shelf.pinned
        logger.info("model replaced or removed name=%s", name)
        self._do(todo)
        if is_pinned:
            self.prewarm(name, partial(_log_done, "pinned model loaded again", name))

    def _give_back(self, entry: Entry) -> None:
        self._tell(self._shelf.give_back, entry)

    def _tell(self, event: Callable[..., Any], *arguments: Any) -> Any:
        """The shelf what has happened, and do what it says."""
        with self._lock:
            answer = event(*arguments, time.monotonic())
            todo = self._take_todo()
        self._do(todo)
        return answer

    def _take_todo(self) -> list[Callable[[], None] | tuple[Work, Entry]]:
        todo, self._shelf.todo = self._shelf.todo, []
        return todo

    def _do(self, todo: list[Callable[[], None] | tuple[Work, Entry]]) -> None:
        """Callbacks here and now, the rest in its threads."""
        for each in todo:
            if isinstance(each, tuple):
                self._workshop.do(*each)
                continue
            try:
                each()
            except Exception:
                logger.exception("a model's waiter failed")

    def _watch_clock(self) -> None:
        """Whoever comes while this sleeps waits longer than it does."""
        longest = min(self._settings.hold_s, self._settings.room_timeout_s)
        delay = longest
        while not self._stopping.wait(delay):
            try:
                self._tell(self._shelf.tick)
                with self._lock:
                    deadline = self._shelf.next_deadline()
                delay = min(max(deadline - time.monotonic(), MIN_TICK_S), longest)
            except Exception:
                logger.exception("telling those who have waited long enough failed")
                delay = longest

    def _watch_source(self) -> None:
        while not self._stopping.wait(self._settings.refresh_s):
            try:
                self.refresh()
            except Exception:
                logger.exception("comparing models with their source failed")

    def _describe(self, entry: Entry, now: float) -> dict[str, Any]:
        model = entry.model
        return {
            "name": entry.name,
            "version": entry.version,
            "tier": tier_of(entry).value,
            "bytes": 0 if model is None else model.device_bytes + model.host_bytes,
            "mapped_bytes": 0 if model is None else model.mapped_bytes,
            "counted_bytes": entry.device_bytes + entry.host_bytes,
            "pinned": entry.name in self._shelf.pinned and not entry.is_retired,
            "retired": entry.is_retired,
            "hits": entry.num_hits,
            "leases": entry.num_leases,
            "last_used_s": round(now - entry.last_used, 3) if entry.num_hits else None,
            "progress": None if entry.state is State.READY else str(entry.progress),
        }


class _Waiter:
    def __init__(self, registry: ModelRegistry, ticket: Ticket) -> None:
        self._registry = registry
        self._ticket = ticket

    def cancel(self) -> None:
        with self._registry._lock:
            self._registry._shelf.cancel(self._ticket)


def open_registry(settings: ManySettings, archive: Path, load: Loader, device: torch.device) -> ModelRegistry:
    """With its source and its part of the disk. archive: what a relative source begins at. Raises ConfigError."""
    source = GivenSource(open_source(settings, archive), settings.url_roots, settings.max_files)
    home, lock_file = take_home(settings)
    return ModelRegistry(settings, source, DiskCache(home, source, settings), load, device, lock_file)


def _log_done(what: str, name: str, error: HandlerError | None) -> None:
    if error is None:
        logger.info("%s name=%s", what, name)
    else:
        logger.warning("not %s name=%s reason=%s", what, name, error)
