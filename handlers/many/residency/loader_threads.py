"""The threads that fetch, load, move and close models, as the shelf says, and tell it what came of it.

Looking up, downloading and unpacking have their threads, loading has its own, so that a missing model is not stuck
behind large ones; what leaves memory leaves in a third one, because the others may be waiting for that.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from handlers.errors import HandlerError, ModelBroken, ModelUnknown, OutOfMemory
from handlers.many.archives.disk import DiskCache
from handlers.many.model import Loader
from handlers.many.residency.entry import Entry, Work
from handlers.many.residency.process_memory import release_memory
from handlers.many.residency.shelf import Shelf
from handlers.settings import ManySettings

logger = logging.getLogger(__name__)
TIMES = ("download", "load", "unload")
MAX_TIMES = 10_000  # kept of each kind until they are drained
WEIGHTS = (".safetensors", ".pt", ".pth", ".bin")


class Workshop:
    """tell: calls a method of the shelf under its lock, and sees to what it leaves to do; returns its answer."""

    def __init__(
        self,
        settings: ManySettings,
        shelf: Shelf,
        disk: DiskCache,
        load: Loader,
        device: torch.device,
        tell: Callable[..., Any],
    ) -> None:
        self.times: dict[str, deque[float]] = {kind: deque(maxlen=MAX_TIMES) for kind in TIMES}
        self._settings = settings
        self._shelf = shelf
        self._disk = disk
        self._load = load
        self._device = device
        self._tell = tell
        downloads = ThreadPoolExecutor(settings.num_downloads, "many-download")
        loaders = ThreadPoolExecutor(settings.num_loaders, "many-load")
        leaving = ThreadPoolExecutor(1, "many-evict")
        self._pools = (downloads, loaders, leaving)
        self._actions = {
            Work.FETCH: (downloads, self._fetch),
            Work.LOAD: (loaders, self._load_model),
            Work.PROMOTE: (loaders, self._promote),
            Work.DEMOTE: (leaving, self._demote),
            Work.CLOSE: (leaving, self._close),
        }

    def do(self, work: Work, entry: Entry) -> None:
        """Soon, in a thread."""
        pool, action = self._actions[work]
        try:
            pool.submit(self._attempt, action, entry)
        except RuntimeError:  # it was shut down: the last lease has ended after the registry
            self._attempt(action, entry)

    def close(self) -> None:
        """Returns when all work is done."""
        for pool in self._pools:
            pool.shutdown()

    def _attempt(self, action: Callable[[Entry], None], entry: Entry) -> None:
        """The top of a thread's work: whatever goes wrong is this model's alone."""
        try:
            action(entry)
        except ModelUnknown as exc:
            self._tell(self._shelf.failed, entry, exc)
        except HandlerError as exc:
            self._tell(self._shelf.failed, entry, _named(entry, exc))
        except (MemoryError, torch.OutOfMemoryError):
            self._tell(self._shelf.failed, entry, _named(entry, OutOfMemory("there is no memory for it")))
        except (ValueError, OSError) as exc:
            self._tell(self._shelf.failed, entry, _named(entry, ModelBroken(str(exc))))
        except Exception as exc:
            logger.exception("model failed name=%s", entry.name)
            reason = ModelBroken(f"{type(exc).__name__}; the worker's log has more")
            self._tell(self._shelf.failed, entry, _named(entry, reason))

    def _fetch(self, entry: Entry) -> None:
        if not self._tell(self._shelf.begin_fetch, entry):
            return
        entry.progress.allow(self._settings.load_timeout_s)
        began = time.monotonic()
        lease = self._disk.fetch(entry.name, entry.progress)
        if lease.is_new:
            self.times["download"].append(time.monotonic() - began)
            logger.info("model unpacked name=%s version=%s s=%.3f", entry.name, lease.version, time.monotonic() - began)
        try:
            num_bytes = _weights_bytes(lease.folder)
            entry.progress.begin("room", 0)
        except BaseException:
            lease.release()  # the shelf has not heard of it
            raise
        self._tell(self._shelf.fetched, entry, lease, num_bytes)

    def _load_model(self, entry: Entry) -> None:
        assert entry.disk is not None
        began = time.monotonic()
        entry.progress.allow(self._settings.load_timeout_s)
        entry.progress.begin("load", 0)
        model = self._load(entry.disk.folder, entry.progress)
        self.times["load"].append(time.monotonic() - began)
        logger.info("model loaded name=%s version=%s s=%.3f", entry.name, entry.version, time.monotonic() - began)
        self._tell(self._shelf.loaded, entry, model)

    def _promote(self, entry: Entry) -> None:
        assert entry.model is not None
        entry.progress.begin("promote", 0)
        entry.model.to_device()
        self._tell(self._shelf.promoted, entry)

    def _demote(self, entry: Entry) -> None:
        assert entry.model is not None
        entry.model.to_host()
        release_memory(self._device)
        logger.info("model to host name=%s", entry.name)
        self._tell(self._shelf.demoted, entry)

    def _close(self, entry: Entry) -> None:
        began = time.monotonic()
        model, entry.model = entry.model, None
        assert model is not None
        try:
            model.close()
        except Exception:
            logger.exception("closing a model failed name=%s", entry.name)
        del model
        release_memory(self._device)
        self.times["unload"].append(time.monotonic() - began)
        logger.info("model evicted name=%s version=%s", entry.name, entry.version)
        self._tell(self._shelf.closed, entry)


def _weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.suffix in WEIGHTS)


def _named(entry: Entry, error: HandlerError) -> HandlerError:
    """The same error, with the model's name before the reason."""
    named = type(error)(f"model {entry.name!r} cannot be used: {error.message}", param=error.param)
    if isinstance(named, ModelBroken):
        named.version = entry.version or getattr(error, "version", "")
    return named
