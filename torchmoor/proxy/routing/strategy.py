"""The contract of routing strategies: what they see of a request and what they return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol

from torchmoor.proxy.routing.pool import C, Pool


@dataclass(frozen=True, slots=True)
class StrategyRequest:
    """What a routing strategy sees of a request.

    excluded: instances that have refused or failed it already. prefix: the body's first bytes, as many as the
    strategy asks for, or the whole body if it is shorter. prefix_id: the client's PrefixAwareId. affinity: a
    64-bit hash of the caller and its affinity key; None without one.
    """

    excluded: frozenset[str] = frozenset()
    prefix: bytes = b""
    prefix_id: bytes = b""
    affinity: int | None = None


FIRST_ATTEMPT = StrategyRequest()


class Pick(NamedTuple, Generic[C]):
    """A chosen instance and the reason, which the client gets."""

    instance: C
    reason: str


class Strategy(Protocol):
    """Chooses among a variant's instances. num_prefix_bytes: the part of a body that it needs; 0 for nothing.

    Each variant has an object of its own in each process. It may be asked more than once for a request, and a pick may
    be discarded; requests of sessions do not ask it.
    """

    num_prefix_bytes: int

    def choose(self, request: StrategyRequest, pool: Pool[C]) -> Pick[C] | None:
        """Return the instance for a request, or None if none can take it now."""
        ...
