"""A loaded model, its lease, and the progress of its load, as the registry and the models share them."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from handlers.errors import LoadStopped, LoadTimedOut
from handlers.requests.incoming import Incoming
from handlers.requests.reply import PendingReply


class ModelTier(Enum):
    """Where a model is, fastest first. Without a GPU there is no HOST: device and host are one memory."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"  # unpacked, not in memory
    LOADING = "loading"
    LEAVING = "leaving"  # evicted, and counted until its memory is free
    BROKEN = "broken"


class ResidentModel(Protocol):
    """A model in memory.

    The registry calls to_host, to_device and close from its own threads, one at a time, and only without leases. The
    memory that they release is free when they return.
    """

    @property
    def device_bytes(self) -> int:
        """This model's own device memory, as measured now; on a CPU, its private memory."""
        ...

    @property
    def host_bytes(self) -> int:
        """This model's own host memory, as measured now; 0 on a CPU, where device_bytes counts it."""
        ...

    @property
    def mapped_bytes(self) -> int:
        """Mapped files: page cache, which the kernel may drop and read again."""
        ...

    def to_host(self) -> None: ...

    def to_device(self) -> None:
        """Move to the device. Raises OutOfMemory and stays on the host if the device has no room."""
        ...

    def close(self) -> None: ...


class AnsweringModel(ResidentModel, Protocol):
    """A model that answers requests by itself."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The model's versions, platform, inputs and outputs, as the open inference protocol names them."""
        ...

    def holds(self, session_id: str) -> bool:
        """Return whether a session is open here. Needs no lease."""
        ...

    def start(self, incoming: Incoming, reply: PendingReply) -> None:
        """Answer one request through the reply, now or later, from any thread, while the caller holds a lease."""
        ...


class _Lease:
    """The right to use something, which stays in its place until the release."""

    def __init__(self, on_release: Callable[[], None] | None) -> None:
        self._on_release = on_release
        self._lock = threading.Lock()

    def release(self) -> None:
        """End the lease. Any thread; a repetition has no effect."""
        with self._lock:
            on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()


class ModelLease(_Lease):
    """The right to use a model.

    found: hit (on the device), host, disk (unpacked) or cold (only in the source). load_s: how long the request waited.
    """

    def __init__(self, model: ResidentModel, on_release: Callable[[], None]) -> None:
        super().__init__(on_release)
        self.model = model
        self.found = "hit"
        self.load_s = 0.0


class DiskLease(_Lease):
    """The right to use a model's folder on disk. is_new: it was unpacked for this lease."""

    def __init__(self, version: str, folder: Path, on_release: Callable[[], None] | None, *, is_new: bool) -> None:
        super().__init__(on_release)
        self.version = version
        self.folder = folder
        self.is_new = is_new


class LoadProgress:
    """The progress of a load and its deadline. The loading thread writes it and calls `add`; any thread reads it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.stage = "queue"
        self.done = 0
        self.total = 0
        self._deadline = math.inf
        self._clock = clock
        self._is_stopped = False

    def allow(self, seconds: float) -> None:
        """Set the deadline to this many seconds from now, so that earlier time in a queue does not count."""
        self._deadline = self._clock() + seconds

    def begin(self, stage: str, total: int) -> None:
        """Enter a stage: download, unpack, load. total: the sum of what `add` will get, 0 if unknown."""
        self.stage, self.done, self.total = stage, 0, total
        self.check()

    def add(self, amount: int) -> None:
        """Count progress, then `check`."""
        self.done += amount
        self.check()

    def check(self) -> None:
        """Raise LoadTimedOut after the deadline, LoadStopped after `stop`."""
        if self._is_stopped:
            raise LoadStopped()
        if self._clock() >= self._deadline:
            raise LoadTimedOut(f"it took longer than handler.many.load_timeout_s and had come to: {self}")

    def stop(self) -> None:
        self._is_stopped = True

    def __str__(self) -> str:
        return f"{self.stage} {self.done}/{self.total}" if self.total else self.stage


Cancel = Callable[[], None]  # ends the wait for a model; a lease that was handed over stays
# Loads an unpacked folder onto the device. Raises ModelBroken, OutOfMemory, another HandlerError, or ValueError or
# OSError with a reason that the client may read. Any other exception is logged and counts as ModelBroken.
Loader = Callable[[Path, LoadProgress], ResidentModel]
