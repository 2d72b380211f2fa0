"""The instances of one variant that the autoscaler starts and stops, their phases, and their recent requests.

The phases are:

    RUNNING     starting, or serving
    WITHDRAWN   drained by an operator: serves nothing, so that another may be started in its place, up to MaxCapacity;
                stopped by the next scale-in
    DRAINING    gets no new requests and finishes its own; may be resumed until it is idle
    STOPPING    receives nothing; its processes are being stopped

The autoscaler is torchmoor.fleet.autoscaler.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from torchmoor.async_inference.request import Backlog
from torchmoor.fleet.scaling import Scaling
from torchmoor.fleet.torchserve import Launch
from torchmoor.proxy.instances.endpoint import Variant

PERIOD_S = 60.0
SAMPLE_S = 1.0  # samples are at least this far apart, so PERIOD_S bounds their number


class RecentRequests:
    """How many requests a variant got in the last minute, for SageMakerVariantInvocationsPerInstance.

    Samples a count that only grows.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()  # times and counts; the first one is a period old, or less

    def count(self, total: int, now: float) -> int:
        """Return by how much the count has grown in the last period, or since the first call.

        now: monotonic seconds.
        """
        samples = self._samples
        if not samples or now >= samples[-1][0] + SAMPLE_S:
            samples.append((now, total))
        while len(samples) > 1 and samples[1][0] <= now - PERIOD_S:
            samples.popleft()
        return total - samples[0][1]


class Phase(Enum):
    """Phase of a scaled instance; see the module."""

    RUNNING = "running"
    WITHDRAWN = "withdrawn"
    DRAINING = "draining"
    STOPPING = "stopping"


@dataclass(slots=True, eq=False)
class ScaledInstance:
    """An instance that the autoscaler started.

    stays_until: it has sessions, which are counted again after this time. withdrawn_from: the highest desired number
    since an operator drained it.
    """

    name: str
    task: asyncio.Task[None] | None  # None: it was started before it was scaled
    phase: Phase = Phase.RUNNING
    stays_until: float | None = None
    withdrawn_from: int = 0

    @property
    def is_starting(self) -> bool:
        """Return whether its first start has not ended."""
        return self.task is not None and not self.task.done()


class ScaledVariant:
    """One variant's instances. launches: MaxCapacity of them, in the order of their start, or more if more run."""

    def __init__(self, variant: Variant, launches: Sequence[Launch], running: Iterable[str] = ()) -> None:
        """variant: with Autoscaling. running: names of instances that run already."""
        settings = variant.settings.scaling
        assert settings is not None
        assert len(launches) >= settings.max_capacity
        self.variant = variant
        self.settings = settings
        self.launches = {launch.name: launch for launch in launches}
        self.members = {name: ScaledInstance(name, None) for name in running}
        self.scaling = Scaling(settings.initial_count)
        self.num_sent = 0
        self.pending: Backlog | None = None  # as last read from the queue
        self.recent_requests = RecentRequests()
        self.backoff_s = 0.0
        self.starts_after = 0.0
        self.has_failed = False  # a start, since all instances were last needed

    @property
    def is_full(self) -> bool:
        """Return whether no further instance can be started."""
        return len(self.members) >= len(self.launches)

    def in_phase(self, phase: Phase) -> list[ScaledInstance]:
        """Return the members in a phase, oldest first."""
        return [member for member in self.members.values() if member.phase is phase]
