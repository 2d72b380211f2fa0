"""Adapters as chat sees them: variants of the model that requests name, loaded while an answer needs them.

A request names its adapter, or the base model by its endpoint's name. If it names neither, the session's adapter
answers: the one that the session was opened with.
"""

import threading
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Protocol

from handlers.engine.contract import Adapter
from handlers.errors import HandlerError, ModelUnknown
from torchmoor.wire import headers as wire


class AdapterLease(Protocol):
    """The right to use an adapter, which stays in memory until the release.

    found: where the adapter was; load_s: how long the request waited for it.
    """

    @property
    def adapter(self) -> Adapter: ...

    @property
    def found(self) -> str: ...

    @property
    def load_s(self) -> float: ...

    def release(self) -> None: ...


class Adapters(Protocol):
    """Where the worker's adapters come from."""

    def acquire(
        self, name: str, on_ready: Callable[[AdapterLease], None], on_failed: Callable[[HandlerError], None]
    ) -> Callable[[], None]:
        """Load an adapter, then call `on_ready` or `on_failed` from any thread. The result ends the wait.

        The callbacks must return soon. Errors: ModelUnknown, ModelBroken, ModelLoading, OutOfMemory and others.
        """
        ...

    def status(self) -> Mapping[str, Any]:
        """Report the adapters by name, and their memory, in the form of a worker of many models."""
        ...


class _Stage(Enum):
    UNUSED = "unused"
    WAITING = "waiting"
    HELD = "held"
    OVER = "over"


class AdapterUse:
    """One answer's adapter: the wait for it, and its lease until `release`. Any thread."""

    def __init__(self, adapters: Adapters | None) -> None:
        self._adapters = adapters
        self._lease: AdapterLease | None = None
        self._stage = _Stage.UNUSED
        self._end_wait: Callable[[], None] | None = None
        self._lock = threading.Lock()

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that is held; None if the base model answers."""
        return None if self._lease is None else self._lease.adapter

    @property
    def version(self) -> str:
        return "" if self._lease is None else self._lease.adapter.version

    @property
    def receipt(self) -> dict[str, str]:
        lease = self._lease
        if lease is None:
            return {}
        return {wire.MODEL_CACHE: lease.found, wire.MODEL_LOAD_MS: str(round(lease.load_s * 1000))}

    def must_wait(self, name: str) -> bool:
        """Return whether `wait` must come before the answer. name: the adapter's; "" for the base model.

        Raises ModelUnknown if this worker has no adapters.
        """
        if name and self._adapters is None:
            raise ModelUnknown(f"there is no adapter {name!r}: handler.adapters.source of this worker is empty")
        return bool(name) and self._lease is None

    def wait(self, name: str, on_ready: Callable[[], None], on_failed: Callable[[HandlerError], None]) -> None:
        """Acquire the adapter, then call `on_ready` or `on_failed`, unless `try_end` or `release` comes first."""
        assert self._adapters is not None

        def ready(lease: AdapterLease) -> None:
            with self._lock:
                is_wanted = self._stage is _Stage.WAITING
                if is_wanted:
                    self._lease, self._stage = lease, _Stage.HELD
            if is_wanted:
                on_ready()
            else:
                lease.release()

        def failed(error: HandlerError) -> None:
            if self._try_leave():
                on_failed(error)

        self._stage = _Stage.WAITING
        end_wait = self._adapters.acquire(name, ready, failed)
        with self._lock:
            is_over = self._stage is _Stage.OVER
            self._end_wait = None if is_over else end_wait
        if is_over:
            end_wait()

    def try_end(self) -> bool:
        """End the wait. Return False if there is none."""
        is_waiting = self._try_leave()
        if is_waiting and self._end_wait is not None:
            self._end_wait()
        return is_waiting

    def _try_leave(self) -> bool:
        """End the wait, without withdrawing it. Return False if there is none."""
        with self._lock:
            is_waiting = self._stage is _Stage.WAITING
            if is_waiting:
                self._stage = _Stage.OVER
            return is_waiting

    def release(self) -> None:
        """Give the adapter back; a repetition has no effect."""
        self.try_end()
        with self._lock:
            lease, self._lease = self._lease, None
            self._stage = _Stage.OVER
        if lease is not None:
            lease.release()
