"""The base class of routing strategies, the request that they see, their pick, and the room for new sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, Generic, NamedTuple

from torchmoor.proxy.routing.pool import C, Pool
from torchmoor.proxy.routing.reasons import SESSION_ROOM

MAX_COMPARED = 16  # up to this many instances are all compared; of more, two are drawn


@dataclass(frozen=True, slots=True)
class StrategyRequest:
    """The properties of a request that a routing strategy can use.

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


class Strategy:
    """Chooses among a variant's instances, for requests without a session and for new sessions.

    Each variant has one in each process. It may be called more than once for a request, and a pick may be discarded.
    name: the RoutingStrategy of a variant. num_prefix_bytes: the part of a body that it needs; 0 for nothing. A turn of
    a session goes to the session's instance, and a request for one of many models to one that has the model, so the
    strategy is not called for them.
    """

    name: ClassVar[str]
    num_prefix_bytes = 0

    @classmethod
    def make(cls, settings: Any, rng: Random) -> Strategy:
        """Build the strategy from a variant's settings (VariantSettings of config/routing.py)."""
        return cls()

    def choose(self, request: StrategyRequest, pool: Pool[C]) -> Pick[C] | None:
        """Return the instance for a request, or None if none can take it now."""
        raise NotImplementedError

    def place_session(self, request: StrategyRequest, pool: Pool[C], rng: Random) -> Pick[C] | None:
        """Return the instance for a new session, the roomiest; None if no room is known, then `choose` decides."""
        roomiest = find_roomiest(pool, request.excluded, rng)
        return None if roomiest is None else Pick(roomiest, SESSION_ROOM)

    def note_sent(self, request: StrategyRequest, name: str, *, body_bytes: int) -> Any:
        """Note a request that goes to an instance. Returns a value for `check`; None: do not call `check`."""
        return None

    def check(self, name: str, expected: Any, *, num_kept: int, num_tokens: int) -> None:
        """Compare what note_sent returned with the cached tokens that the instance's answer reports."""

    def forget(self, name: str) -> None:
        """Drop what is known of an instance that is not ready or gone."""


def find_roomiest(pool: Pool[C], excluded: frozenset[str], rng: Random) -> C | None:
    """Return the instance for a new session: the open one with the most session room, then the least load.

    Of more than MAX_COMPARED instances, only two are compared, drawn at random. In a large fleet an instance reports
    its room rarely, and the roomiest one would get all new sessions until its next report: in benchmarks/scale.py, the
    fullest of 1,000 instances then has 1.6 times the mean, and 1.1 times with two drawn.

    Rooms within an eighth of the largest count as equal; otherwise one more place would outweigh any load. An unknown
    room counts as the largest. The room of an instance in slow start is multiplied by its share. None if no room is
    known: then load alone decides.
    """
    instances = pool.open_instances
    if len(instances) > MAX_COMPARED:
        drawn = _roomiest_of(rng.sample(instances, 2), excluded)
        if drawn is not None and drawn.session_room != 0:
            return drawn
    return _roomiest_of(instances, excluded)


def _roomiest_of(instances: Sequence[C], excluded: frozenset[str]) -> C | None:
    instances = [instance for instance in instances if instance.name not in excluded]
    rooms = {i.name: i.session_room * i.share for i in instances if i.session_room is not None}
    if not rooms:
        return None
    most = max(rooms.values())
    enough = most - most // 8
    roomy = [instance for instance in instances if rooms.get(instance.name, enough) >= enough]
    return min(roomy, key=lambda instance: (instance.load, -rooms.get(instance.name, most + 1)))
