"""One TorchServe instance as the proxy counts it: where it listens, its state and its load.

Owns the counters that routing reads. Knows nothing of HTTP: `idle` is a list that the upstream pool keeps here
so that taking a connection is one `pop()`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import Any

from torchmoor.config.health import RecoverySettings
from torchmoor.config.routing import ALL_TRAFFIC
from torchmoor.proxy.instances.breaker import Breaker, BreakerState


class InstanceState(Enum):
    """STARTING -> READY <-> DOWN, as probes find it; DRAINING instead of READY while an operator wants that."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"


# Looking a member up in its Enum takes longer than choosing an instance.
_READY = InstanceState.READY


class Lease:
    """One outstanding invocation of an instance; released once, however often it is asked for.

    `with instance.lease():` where a block holds it, `release()` where callbacks do.
    """

    __slots__ = ("instance", "_is_held")

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self._is_held = True
        instance.outstanding += 1
        instance.on_load(instance)

    def release(self) -> None:
        """Count down; later calls do nothing."""
        if self._is_held:
            self._is_held = False
            instance = self.instance
            instance.outstanding -= 1
            instance.on_load(instance)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Instance:
    """A TorchServe process that serves the model of one variant of an endpoint.

    name: stable across restarts, part of session ids (`^[a-z0-9](-?[a-z0-9]+)*$`, 63 characters at most).
    port: the inference port; management_port: None where the instance is probed by /ping only; metrics_port: None
    where its metrics are nobody's business here.
    capacity: the most invocations that routing sends there at a time. Without late binding sticky ones are not held
    back by it: they can go nowhere else, and the handler refuses what it cannot take.
    session_room: sessions that it can still take, by its own last word less those sent since; None while unknown.
    breaker: whether its answers are good; share: how much of the usual it gets, less than 1.0 while it comes back.
    on_load: told of every change of `outstanding`; the registry's, while it knows the instance.
    source: the DNS name that has brought it; empty where somebody has named it.
    started_at: when its process was started, in monotonic seconds; None where somebody else has done that.
    """

    __slots__ = (
        "name",
        "endpoint",
        "variant",
        "model",
        "host",
        "port",
        "management_port",
        "metrics_port",
        "capacity",
        "state",
        "outstanding",
        "session_room",
        "breaker",
        "share",
        "on_load",
        "idle",
        "started_at",
        "source",
    )

    def __init__(
        self,
        *,
        name: str,
        endpoint: str,
        model: str,
        port: int,
        variant: str = ALL_TRAFFIC,
        host: str = "127.0.0.1",
        management_port: int | None = None,
        metrics_port: int | None = None,
        capacity: int = 64,
        state: InstanceState = InstanceState.STARTING,
        started_at: float | None = None,
        source: str = "",
    ) -> None:
        self.name = name
        self.endpoint = endpoint
        self.variant = variant
        self.model = model
        self.host = host
        self.port = port
        self.management_port = management_port
        self.metrics_port = metrics_port
        self.capacity = capacity
        self.state = state
        self.outstanding = 0
        self.session_room: int | None = None
        self.breaker = Breaker(RecoverySettings())
        self.share = 1.0
        self.on_load: Callable[[Instance], None] = _ignore
        self.idle: list[Any] = []
        self.started_at = started_at
        self.source = source

    @property
    def is_ready(self) -> bool:
        """True if new work may be sent there; while its breaker is half open, that is one request at a time."""
        if self.state is not _READY:
            return False
        breaker = self.breaker.state
        return breaker is BreakerState.CLOSED or (breaker is BreakerState.HALF_OPEN and self.outstanding == 0)

    def url(self, port: int | None = None) -> str:
        """Where it listens, or listens at another of its ports, as a URL begins."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port if port is None else port}"

    @property
    def load(self) -> int:
        """Outstanding invocations, as much more as its share is less."""
        return self.outstanding if self.share == 1.0 else int(self.outstanding / self.share)

    def lease(self) -> Lease:
        """Hold one outstanding invocation until the response body has ended."""
        return Lease(self)

    def close_idle(self) -> None:
        """Close the pooled connections: the process behind them is gone or going."""
        idle, self.idle = self.idle, []
        for connection in idle:
            connection.close()

    def __repr__(self) -> str:
        load = f"{self.outstanding}/{self.capacity} outstanding"
        return f"<Instance {self.name} {self.state.name} {load}>"


def _ignore(instance: Instance) -> None:
    """Nobody routes by the load of an instance that no registry knows."""
