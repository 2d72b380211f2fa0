"""One TorchServe instance as the proxy sees it: its address, its state and its load.

Owns the counters that routing reads. Does not know HTTP: in `idle` and `long_bodies` the upstream pool keeps its own
objects, so that taking a connection is a single `pop()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torchmoor.config.body_heap import DEFAULT_INFLIGHT_BODY_BYTES, counted_body_bytes, longest_body_bytes
from torchmoor.config.recovery import RecoverySettings
from torchmoor.config.routing import ALL_TRAFFIC
from torchmoor.proxy.instances.breaker import Breaker, BreakerState
from torchmoor.proxy.routing.reported_status import ReportedStatus


class InstanceState(Enum):
    """STARTING -> READY <-> DOWN, by probes; DRAINING instead of READY while an operator drains it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"


SERVING = frozenset((InstanceState.READY, InstanceState.DRAINING))  # in these states it answers requests
# A lookup in an Enum takes longer than choosing an instance.
_READY, _CLOSED, _HALF_OPEN = InstanceState.READY, BreakerState.CLOSED, BreakerState.HALF_OPEN


class Lease:
    """One outstanding invocation of an instance and the bytes of its body; counts down once."""

    __slots__ = ("instance", "_is_held", "_num_counted")

    def __init__(self, instance: Instance, num_body_bytes: int = 0) -> None:
        self.instance = instance
        self._is_held = True
        self._num_counted = counted_body_bytes(num_body_bytes) if num_body_bytes else 0
        instance.outstanding += 1
        instance.inflight_body_bytes += self._num_counted
        if instance.breaker.state is _HALF_OPEN and instance.trial is None:
            instance.trial = self
        instance.on_load(instance)

    def try_hold_body(self, num_body_bytes: int) -> bool:
        """Change the body's counted length, unless the instance has no room for the difference."""
        instance, counted = self.instance, counted_body_bytes(num_body_bytes)
        total = instance.inflight_body_bytes + counted - self._num_counted
        if total > instance.max_inflight_body_bytes:
            return False
        self._num_counted = counted
        instance.inflight_body_bytes = total
        return True

    def try_end_trial(self) -> bool:
        """Let the half-open breaker admit another trial, if this is one: its answer has begun, and may take long."""
        instance = self.instance
        if instance.trial is not self:
            return False
        instance.trial = None
        instance.on_load(instance)
        return True

    def release(self) -> None:
        """Stop counting the invocation; later calls do nothing."""
        if self._is_held:
            self._is_held = False
            instance = self.instance
            instance.outstanding -= 1
            instance.inflight_body_bytes -= self._num_counted
            if instance.trial is self:
                instance.trial = None
            instance.on_load(instance)


def _ignore(instance: Instance) -> None:
    """Do nothing: no registry knows the instance."""


@dataclass(frozen=True, slots=True)
class InstanceEnd:
    """The end of an instance's process. at: in seconds since 1970. log: the last lines of its log."""

    at: float
    reason: str
    log: tuple[str, ...]


@dataclass(eq=False, repr=False, kw_only=True)
class InstanceFacts:
    """The properties of an instance that never change.

    Those in PlacedSettings come from the configuration, by their names.

    name: stable across restarts, part of session ids (`^[a-z0-9](-?[a-z0-9]+)*$`, at most 63 characters). port: the
    inference port. management_port: None if it is probed by /ping only. metrics_port: None if its metrics are not
    shown. capacity: the most invocations that routing sends there at a time. Without late binding it does not limit a
    session's turns: no other instance can serve them, and the handler refuses what it cannot take.
    max_inflight_body_bytes: bytes of its JVM's heap that requests' bodies may take at a time. takes_operations: its
    handler is torchmoor's and knows operations. Another handler would take them for invocations. generation: of its
    endpoint. source: the DNS name that lists it; empty if the configuration does. started_at: when this proxy started
    its process, in monotonic seconds; None if it did not. gpu: as CUDA_VISIBLE_DEVICES names it; None without one, or
    if this proxy did not start it.
    """

    name: str
    endpoint: str
    model: str
    port: int
    variant: str = ALL_TRAFFIC
    generation: int = 0
    host: str = "127.0.0.1"
    management_port: int | None = None
    metrics_port: int | None = None
    capacity: int = 64
    max_inflight_body_bytes: int = DEFAULT_INFLIGHT_BODY_BYTES
    started_at: float | None = None
    takes_operations: bool = True
    source: str = ""
    gpu: str | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class Instance(InstanceFacts):
    """A TorchServe process that serves the model of one variant of an endpoint.

    inflight_body_bytes: the part of the JVM's heap for the bodies of outstanding requests, by their declared length, or
    the received one. reported: its last status, without the models, which ModelPlacement keeps. num_opened: openings
    sent to it since. breaker: opened by failed answers. trial: the invocation that its half-open breaker has let pass.
    share: of the usual work; below 1.0 during slow start. num_pieces: pieces of answers that it has sent after their
    heads, as in streams. on_load: called after every change of `outstanding`; set by the registry. batches_sequences:
    TorchServe batches its requests by sequence, as the health check finds out; see dispatch/sequences.py. is_drained:
    it gets no new work when it is ready; set by the registry. is_resumable: the autoscaler drains it, and resumes it if
    requests come. last_end: the last end of a process of this name that this proxy started.
    """

    state: InstanceState = InstanceState.STARTING
    batches_sequences: bool = False
    is_drained: bool = False
    is_resumable: bool = False
    outstanding: int = 0
    inflight_body_bytes: int = 0
    reported: ReportedStatus = field(default_factory=ReportedStatus)
    num_opened: int = 0
    breaker: Breaker = field(default_factory=lambda: Breaker(RecoverySettings()))
    trial: Lease | None = None
    share: float = 1.0
    num_pieces: int = 0
    on_load: Callable[[Instance], None] = _ignore
    idle: list[Any] = field(default_factory=list)
    long_bodies: Any = None
    last_end: InstanceEnd | None = None

    @property
    def is_ready(self) -> bool:
        """True if it may be sent new work."""
        if self.state is not _READY:
            return False
        state = self.breaker.state
        return state is _CLOSED or (state is _HALF_OPEN and self.trial is None)

    @property
    def can_be_operated(self) -> bool:
        """False if its handler would take an operation for an invocation."""
        return self.takes_operations and not self.batches_sequences

    def url(self, port: int | None = None) -> str:
        """Return the beginning of a URL at its inference port, or at another port."""
        return f"http://{self.authority(port)}"

    def authority(self, port: int | None = None) -> str:
        """Return its host with a port, as a URL and a Host field have them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port if port is None else port}"

    @property
    def load(self) -> int:
        """Outstanding invocations divided by the share."""
        return self.outstanding if self.share == 1.0 else int(self.outstanding / self.share)

    def take_status(self, status: ReportedStatus) -> None:
        """Replace the instance's last status."""
        self.reported = status._replace(models=None)
        self.num_opened = 0

    @property
    def session_room(self) -> int | None:
        """How many sessions it can still open: by its last status, less the openings sent since; None if unknown."""
        room = self.reported.session_room
        return None if room is None else max(0, room - self.num_opened)

    def lease(self, num_body_bytes: int = 0) -> Lease:
        """Count one outstanding invocation and its body's bytes until the answer has ended."""
        return Lease(self, num_body_bytes)

    def has_body_room(self, num_bytes: int) -> bool:
        """Return True if its JVM can hold another body of this length."""
        if not num_bytes:
            return True
        return self.inflight_body_bytes + counted_body_bytes(num_bytes) <= self.max_inflight_body_bytes

    @property
    def max_body_bytes(self) -> int:
        """Return the length of the longest body that it can hold."""
        return longest_body_bytes(self.max_inflight_body_bytes)

    def close_idle(self) -> None:
        """Close the pooled connections: the process behind them is gone or ending."""
        idle, self.idle = self.idle, []
        for connection in idle:
            connection.close()

    def __repr__(self) -> str:
        load = f"{self.outstanding}/{self.capacity} outstanding"
        return f"<Instance {self.name} {self.state.name} {load}>"
