"""What the registry and the models know of each other: a loaded model, the lease of one, and how far a load is."""

import math
import threading
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from handlers.errors import LoadStopped, LoadTimedOut

if TYPE_CHECKING:
    from handlers.reply import Reply
    from handlers.requests import Incoming


class Tier(Enum):
    """Where a model is, from the fastest to the slowest. On a CPU there is no HOST: device and host are one memory."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"  # unpacked, not in memory
    LOADING = "loading"
    LEAVING = "leaving"  # evicted, and still counted until its memory is free
    BROKEN = "broken"


class Loaded(Protocol):
    """A model in memory. The registry calls to_host, to_device and close from its own threads, one at a time, and
    only while nobody has a lease; what they free is free when they return.
    """

    @property
    def device_bytes(self) -> int:
        """Device memory that is this model's alone, as it stands now; on a CPU its private memory."""
        ...

    @property
    def host_bytes(self) -> int:
        """Host memory that is this model's alone, as it stands now; nothing on a CPU, where it is device_bytes."""
        ...

    @property
    def mapped_bytes(self) -> int:
        """Files that it has mapped: page cache, which the kernel may drop and read again."""
        ...

    def start(self, incoming: "Incoming", reply: "Reply") -> None:
        """Answer one request through the reply, now or later, from any thread. The caller holds a lease meanwhile."""
        ...

    def to_host(self) -> None: ...

    def to_device(self) -> None:
        """Raises OutOfMemory if the device has no room, and stays on the host."""
        ...

    def close(self) -> None: ...


class Lease:
    """The right to use a model: until it is released, the model stays where it is."""

    def __init__(
        self,
        name: str,
        version: str,
        model: Loaded,
        give_back: Callable[[], None],
        *,
        found: str = "hit",
        load_s: float = 0.0,
    ) -> None:
        """give_back: the registry's, called once. found, load_s: where the model was, and how long this one waited:

        hit, on the device; host; disk, unpacked; cold, only in the source.
        """
        self.found = found
        self.load_s = load_s
        self.name = name
        self.version = version
        self.model = model
        self._give_back: Callable[[], None] | None = give_back
        self._lock = threading.Lock()

    def release(self) -> None:
        """May be called from any thread, and more than once."""
        with self._lock:
            give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class Waiter(Protocol):
    """One who waits for a model."""

    def cancel(self) -> None:
        """Nobody waits any more: neither callback is called from now on. A lease that was given already stays."""
        ...


class Progress:
    """How far a load is, and its clock: whoever works on it calls `add` now and then, which ends what takes too long.

    Written by the thread that loads, read by any.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.stage = "queue"
        self.done = 0
        self.total = 0
        self._deadline = math.inf
        self._clock = clock
        self._is_stopped = False

    def allow(self, seconds: float) -> None:
        """So long from now on; before, no time is kept: waiting for a thread is nobody's fault."""
        self._deadline = self._clock() + seconds

    def begin(self, stage: str, total: int) -> None:
        """The next part of the work: download, unpack, load. total: what `add` will sum up to, 0 if nobody knows."""
        self.stage, self.done, self.total = stage, 0, total
        self.check()

    def add(self, amount: int) -> None:
        """Raises what `check` raises."""
        self.done += amount
        self.check()

    def check(self) -> None:
        """Raises LoadTimedOut if the time is over, and LoadStopped if the worker ends."""
        if self._is_stopped:
            raise LoadStopped("the worker is stopping")
        if self._clock() >= self._deadline:
            raise LoadTimedOut(f"it took longer than handler.many.load_timeout_s and had come to: {self}")

    def stop(self) -> None:
        """The next `check` raises LoadStopped."""
        self._is_stopped = True

    def __str__(self) -> str:
        return f"{self.stage} {self.done}/{self.total}" if self.total else self.stage


# From an unpacked folder to a model on the device. Raises ModelBroken, OutOfMemory, another HandlerError, or
# ValueError or OSError with a reason that the client may read; anything else counts as broken, too, and is logged.
Loader = Callable[[Path, Progress], Loaded]
