"""The model registry: turns a model's name into a lease of it, loaded.

Requests never wait here: `acquire` answers through callbacks. The cache decides; the loader threads do the work. One
thread watches the clock, one compares the models in memory with their source. The lock covers bookkeeping only, never
the work of a model, the disk or a caller's code.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from handlers.errors import HandlerError, LoadStopped, ModelLoaded, ModelUnknown, SourceUnavailable
from handlers.many.model import Cancel, Loader, ModelLease, ModelTier, ResidentModel
from handlers.many.residency.cache import ModelCache
from handlers.many.residency.disk_cache import DiskCache, take_home
from handlers.many.residency.download import Downloader
from handlers.many.residency.loader_threads import LoaderThreads
from handlers.many.residency.model_entries import ModelEntry, ModelState, ModelTicket, OnDone
from handlers.many.residency.status import add_disk, describe_memory
from handlers.many.sources.given import GivenSource
from handlers.many.sources.open import open_source
from handlers.many.sources.source import SOURCE, check_name
from handlers.settings.many import ManySettings
from handlers.worker.process_memory import choose_device_bytes

logger = logging.getLogger(__name__)
MIN_TICK_S = 0.01
MAX_LOOK_UPS = 8  # of models in the source, at once


class ModelRegistry:
    """Any thread may call any method; only `refresh` and `close` take longer than a look-up.

    lock_file: kept open until `close`, see take_home. counters: have the seconds of each download (with unpacking),
    load, unload (until the memory is free) and wait (of a request until its model is ready).
    """

    def __init__(
        self,
        settings: ManySettings,
        source: GivenSource,
        downloader: Downloader,
        load: Loader,
        device: torch.device,
        lock_file: IO[str] | None,
    ) -> None:
        self._settings = settings
        self._source = source
        self._disk = downloader.disk
        self._lock_file = lock_file
        self._lock = threading.Lock()
        self._look_ups = threading.BoundedSemaphore(MAX_LOOK_UPS)
        device_bytes = settings.device_bytes or choose_device_bytes(device)

        def release(entry: ModelEntry) -> None:
            self._report(self._cache.release, entry)

        self._cache = ModelCache(settings, device_bytes, release, is_unified=device.type == "cpu")
        self.counters = self._cache.counters
        self._threads = LoaderThreads(settings, self._cache, downloader, load, device, self._report)
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
        self, name: str, on_ready: Callable[[ModelLease], None], on_failed: Callable[[HandlerError], None]
    ) -> Cancel:
        """Call exactly one callback, unless cancelled: at once on this thread if the model is on the device or refused.

        Otherwise a thread of the registry calls it later; it must return soon. Errors: ModelUnknown, ModelBroken,
        ModelLoading after hold_s while the load continues, OutOfMemory, OutOfDisk, Overloaded, SourceUnavailable,
        LoadStopped.
        """
        return self._want(name, on_ready, on_failed, time.monotonic() + self._settings.hold_s)

    def load(self, name: str, url: str | None, on_done: OnDone) -> None:
        """Load a model into memory, where it stays until its eviction. ModelLoaded if it is there already.

        url: a path or file:// below one of url_roots, the name's source from now on.
        """

        def done(error: HandlerError | None) -> None:
            if error is not None and url is not None:
                self._source.forget(name)
            on_done(error)

        with _errors_to(on_done):
            name = check_name(name)
            with self._lock:
                entry = self._cache.entries.current.get(name)
                if entry is not None and entry.tier is not ModelTier.LOADING:
                    raise ModelLoaded(f"model {name!r} is loaded already")
            if url is not None:
                self._source.give(name, url)
            self.prewarm(name, done)

    def unload(self, name: str, on_done: OnDone) -> None:
        """Unload a model. Report the end when its memory is free, or ModelUnknown if it is not in memory."""
        with _errors_to(on_done):
            name = check_name(name)
            self._source.forget(name)
            self._report(self._cache.unpin, name)
            self._report(self._cache.retire, name, on_done)

    def look_up(self, name: str, on_found: OnDone) -> None:
        """Report ModelUnknown if neither the memory nor the source has a model: at once, or from another thread.

        While MAX_LOOK_UPS wait for the source, others are not looked up.
        """

        def find() -> None:
            error: HandlerError | None = None
            try:
                self._source.find(check_name(name))
            except ModelUnknown as exc:
                error = exc
            except Exception as exc:  # the load reports it, unless it can use what is on disk
                logger.warning("model not looked up name=%s reason=%s", name, exc)
            self._look_ups.release()
            on_found(error)

        with self._lock:
            is_in_memory = name.removeprefix("/") in self._cache.entries.current
        if is_in_memory or not self._look_ups.acquire(blocking=False):
            on_found(None)
        else:
            threading.Thread(target=find, name="many-look-up", daemon=True).start()

    def prewarm(self, name: str, on_done: OnDone) -> None:
        """Load a model unless it is on the device."""

        def ready(lease: ModelLease) -> None:
            lease.release()
            on_done(None)

        self._want(name, ready, on_done, math.inf)

    def pin(self, name: str, on_done: OnDone) -> None:
        """Load a model and keep its newest version on the device. An error leaves it unpinned."""

        def done(error: HandlerError | None) -> None:
            if error is not None:
                self._report(self._cache.unpin, name)
            on_done(error)

        with _errors_to(on_done):
            name = check_name(name)
            with self._lock:
                self._cache.entries.pinned.add(name)
            self.prewarm(name, done)

    def unpin(self, name: str) -> None:
        """Let a model be evicted again. Raises ModelUnknown if it is not pinned."""
        name = check_name(name)
        if name not in self._cache.entries.pinned:
            raise ModelUnknown(f"model {name!r} is not pinned")
        self._report(self._cache.unpin, name)

    def in_memory(self) -> dict[str, ResidentModel]:
        """Return the models on the device by name, without leases."""
        with self._lock:
            return {
                entry.name: entry.model
                for entry in self._cache.entries.current.values()
                if entry.state is ModelState.READY and entry.model is not None
            }

    def status(self) -> dict[str, Any]:
        """Report each model's place and the budgets, in bytes and seconds."""
        with self._lock:
            status = describe_memory(self._cache, time.monotonic())
            in_memory = set(self._cache.entries.current)
        add_disk(status, in_memory, self._disk)
        return status

    def refresh(self) -> None:
        """Compare the models in memory, and those remembered as broken, with the source; retire replaced ones."""
        with self._lock:
            known = {name: entry.version for name, entry in self._cache.entries.current.items() if entry.version}
            broken = {name: each.version for name, each in self._cache.history.broken(time.monotonic()).items()}
        for name, version in {**known, **broken}.items():
            if self._stopping.is_set():
                return
            try:
                newest = self._source.find(name).version
            except SourceUnavailable as exc:
                logger.warning("models cannot be compared with their source reason=%s", exc)
                return
            except HandlerError:  # removed or unreadable
                newest = ""
            if newest != version:
                logger.info("model replaced or removed name=%s", name)
                if self._report(self._cache.replaced, name, version):
                    self.prewarm(name, partial(_log_done, "pinned model loaded again", name))

    def close(self) -> None:
        """Refuse every waiting request, close every model (leased ones when released), and stop the threads."""
        self._stopping.set()
        self._report(self._cache.stop, LoadStopped())
        self._threads.close()
        for thread in self._watchers:
            thread.join()
        if self._lock_file is not None:
            self._lock_file.close()

    def check_integrity(self) -> None:
        with self._lock:
            self._cache.check_integrity()

    def _want(
        self, name: str, on_ready: Callable[[ModelLease], None], on_failed: Callable[[HandlerError], None], until: float
    ) -> Cancel:
        ticket = ModelTicket(on_ready, on_failed, until)
        with _errors_to(ticket.fail):
            self._report(self._cache.want, ticket, check_name(name))
        return partial(self._cancel, ticket)

    def _cancel(self, ticket: ModelTicket) -> None:
        with self._lock:
            self._cache.cancel(ticket)

    def _report(self, event: Callable[..., Any], *arguments: Any) -> Any:
        """Report an event to the cache, then run the callbacks and start the work that follow from it."""
        with self._lock:
            answer = event(*arguments, time.monotonic())
            todo, self._cache.todo = self._cache.todo, []
        for each in todo:
            if isinstance(each, tuple):
                self._threads.do(*each)
                continue
            try:
                each()
            except Exception:
                logger.exception("a model's callback failed")
        return answer

    def _watch_clock(self) -> None:
        """Let the cache act at each of its deadlines."""
        longest = delay = self._cache.shortest_wait_s
        while not self._stopping.wait(delay):
            try:
                self._report(self._cache.tick)
                with self._lock:
                    deadline = self._cache.next_deadline()
                delay = min(max(deadline - time.monotonic(), MIN_TICK_S), longest)
            except Exception:
                logger.exception("the models' clock failed")
                delay = longest

    def _watch_source(self) -> None:
        while not self._stopping.wait(self._settings.refresh_s):
            try:
                self.refresh()
            except Exception:
                logger.exception("comparing models with their source failed")


def open_registry(
    settings: ManySettings, worker_dir: Path, load: Loader, device: torch.device, setting: str = SOURCE
) -> ModelRegistry:
    """Build a registry with its source and its disk.

    worker_dir: base of a relative source. setting: the key that names the source, for errors. Raises SettingsError.
    """
    opened = open_source(settings, worker_dir, setting)
    source = GivenSource(opened.find, settings.url_roots, settings.max_files)
    home, lock_file = take_home(settings)
    downloader = Downloader(DiskCache(home, settings.disk_bytes, opened.identity), source.find, settings)
    return ModelRegistry(settings, source, downloader, load, device, lock_file)


@contextmanager
def _errors_to(on_failed: Callable[[HandlerError], None]) -> Iterator[None]:
    try:
        yield
    except HandlerError as error:
        on_failed(error)


def _log_done(what: str, name: str, error: HandlerError | None) -> None:
    if error is None:
        logger.info("%s name=%s", what, name)
    else:
        logger.warning("not %s name=%s reason=%s", what, name, error)
