"""The data plane, of one process or of several, as the parts outside of it see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVarTuple

from torchmoor.async_inference.service import AsyncInference
from torchmoor.fleet.process_commands import ProcessParts
from torchmoor.metrics.invocations import InvocationMetrics
from torchmoor.metrics.process_counts import ProcessCounts
from torchmoor.proxy.dispatch.recent_decisions import DecisionQuery
from torchmoor.proxy.instances.endpoint import Variant
from torchmoor.proxy.instances.handler_operations import HandlerOperations
from torchmoor.proxy.instances.instance import Instance

Values = TypeVarTuple("Values")


class VariantTraffic(Protocol):
    """A variant, its counts, and its requests that wait now."""

    variant: Variant
    metrics: InvocationMetrics

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an instance."""

    @property
    def waiting_turns(self) -> Mapping[str, int]:
        """Waiting turns of sessions, by the instance that they wait for."""


class DataPlaneView(Protocol):
    """The data plane of one process or of several, for the admin plane, the autoscaler and the fleet."""

    operations: HandlerOperations
    async_inference: AsyncInference | None  # None if no endpoint takes asynchronous requests

    @property
    def port(self) -> int:
        """Return the port that it listens on."""

    def counts(self) -> ProcessCounts:
        """Return the numbers that belong to no variant; without an access log, not its numbers."""

    def traffic(self) -> Sequence[VariantTraffic]:
        """Return the traffic of each variant."""

    async def refresh(self) -> None:
        """Collect the counts of other processes, if there are any."""

    async def find_decisions(self, query: DecisionQuery) -> dict[str, Any]:
        """Return the routing decisions of all processes."""

    def is_idle(self, instance: Instance) -> bool:
        """Return whether a draining instance has nothing left to do."""

    def on_need(self, wake: Callable[[], None]) -> None:
        """Register a callback for when a request waits for an instance to be started."""

    def carry_out(self, command: Callable[[ProcessParts, *Values], None], *values: *Values) -> None:
        """Call a function of process_commands.py in every process."""
