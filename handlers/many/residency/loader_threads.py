"""Loader threads: fetch, load, move and close models as the cache decides, and report the outcomes to it.

Fetching has its own threads, so that a missing model is refused while large ones load. Closing and demoting have
another, because the loaders may be waiting for the memory that they free.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from handlers.errors import HandlerError, ModelBroken, ModelUnknown, OutOfMemory
from handlers.many.folder import list_files
from handlers.many.model import Loader
from handlers.many.residency.cache import ModelCache
from handlers.many.residency.download import Downloader
from handlers.many.residency.model_entries import LoaderStep, ModelEntry
from handlers.models.memory import is_out_of_memory
from handlers.settings.many import ManySettings
from handlers.worker.device import use_device
from handlers.worker.process_memory import release_memory

logger = logging.getLogger(__name__)
WEIGHTS = (".safetensors", ".pt", ".pth", ".bin")


class LoaderThreads:
    """report: calls a method of the cache under its lock, then does the resulting work; returns the method's result."""

    def __init__(
        self,
        settings: ManySettings,
        cache: ModelCache,
        downloader: Downloader,
        load: Loader,
        device: torch.device,
        report: Callable[..., Any],
    ) -> None:
        self._load_timeout_s = settings.load_timeout_s
        self._cache = cache
        self._downloader = downloader
        self._load = load
        self._device = device
        self._report = report
        downloads = ThreadPoolExecutor(settings.num_downloads, "many-download")
        loaders = ThreadPoolExecutor(settings.num_loaders, "many-load", use_device, (device,))
        leaving = ThreadPoolExecutor(1, "many-evict", use_device, (device,))
        self._pools = (downloads, loaders, leaving)
        self._actions = {
            LoaderStep.FETCH: (downloads, self._fetch),
            LoaderStep.LOAD: (loaders, self._load_model),
            LoaderStep.PROMOTE: (loaders, self._promote),
            LoaderStep.DEMOTE: (leaving, self._demote),
            LoaderStep.CLOSE: (leaving, self._close),
        }

    def do(self, work: LoaderStep, entry: ModelEntry) -> None:
        pool, action = self._actions[work]
        try:
            pool.submit(self._attempt, action, entry)
        except RuntimeError:  # the pool was shut down before the last lease ended
            self._attempt(action, entry)

    def close(self) -> None:
        """Wait for all work."""
        for pool in self._pools:
            pool.shutdown()

    def _attempt(self, action: Callable[[ModelEntry], None], entry: ModelEntry) -> None:
        """Run one action and report any exception as the failure of this model alone."""
        error: HandlerError
        try:
            action(entry)
            return
        except HandlerError as exc:
            error = _named(entry, exc)
        except OSError as exc:
            logger.warning("model failed name=%s error=%s", entry.name, exc)  # the paths are for operators only
            error = _named(entry, ModelBroken(exc.strerror or type(exc).__name__))
        except ValueError as exc:
            error = _named(entry, ModelBroken(str(exc)))
        except Exception as exc:
            if is_out_of_memory(exc):
                error = _named(entry, OutOfMemory("there is no memory for it"))
            else:
                logger.exception("model failed name=%s", entry.name)
                error = _named(entry, ModelBroken(f"{type(exc).__name__}; the worker's log has more"))
        self._report(self._cache.failed, entry, error)

    def _fetch(self, entry: ModelEntry) -> None:
        if not self._report(self._cache.begin_fetch, entry):
            return
        entry.progress.allow(self._load_timeout_s)
        began = time.monotonic()
        lease = self._downloader.fetch(entry.name, entry.progress)
        if lease.is_new:
            self._note("download", "unpacked", entry.name, lease.version, began)
        try:
            num_bytes = weights_bytes(lease.folder)
            entry.progress.begin("room", 0)
        except BaseException:
            lease.release()  # the cache does not know of it
            raise
        self._report(self._cache.fetched, entry, lease, num_bytes)

    def _load_model(self, entry: ModelEntry) -> None:
        assert entry.disk is not None
        began = time.monotonic()
        entry.progress.allow(self._load_timeout_s)
        entry.progress.begin("load", 0)
        model = self._load(entry.disk.folder, entry.progress)
        self._note("load", "loaded", entry.name, entry.version, began)
        self._report(self._cache.loaded, entry, model)

    def _promote(self, entry: ModelEntry) -> None:
        assert entry.model is not None
        entry.progress.begin("promote", 0)
        entry.model.to_device()
        self._report(self._cache.promoted, entry)

    def _demote(self, entry: ModelEntry) -> None:
        assert entry.model is not None
        entry.model.to_host()
        release_memory(self._device)
        logger.info("model to host name=%s", entry.name)
        self._report(self._cache.demoted, entry)

    def _close(self, entry: ModelEntry) -> None:
        began = time.monotonic()
        model, entry.model = entry.model, None
        assert model is not None
        try:
            model.close()
        except Exception:
            logger.exception("closing a model failed name=%s", entry.name)
        del model
        release_memory(self._device)
        self._note("unload", "evicted", entry.name, entry.version, began)
        self._report(self._cache.closed, entry)

    def _note(self, kind: str, event: str, name: str, version: str, began: float) -> None:
        seconds = time.monotonic() - began
        self._cache.counters.observe(kind, seconds)
        logger.info("model %s name=%s version=%s s=%.3f", event, name, version, seconds)


def weights_bytes(folder: Path) -> int:
    """Return the bytes of a model's weight files, the estimate of its memory."""
    return sum(path.stat().st_size for path in list_files(folder) if path.suffix in WEIGHTS and path.is_file())


def _named(entry: ModelEntry, error: HandlerError) -> HandlerError:
    """Put the model's name before the error's reason, which names files without the folder that they are cached in.

    The result is a new error: the old one's traceback keeps what a failed load has read in memory.
    """
    if isinstance(error, ModelUnknown):  # names it already
        return ModelUnknown(error.message, param=error.param)
    reason = error.message
    if entry.disk is not None:
        folder = str(entry.disk.folder)
        reason = reason.replace(f"{folder}/", "").replace(folder, "its folder")
    named = type(error)(f"model {entry.name!r} cannot be used: {reason}", param=error.param)
    if isinstance(named, ModelBroken):
        named.version = entry.version or getattr(error, "version", "")
    return named
