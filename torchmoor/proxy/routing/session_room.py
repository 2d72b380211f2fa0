"""The instance with the most room for a new session, which strategies choose by default."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from torchmoor.proxy.routing.pool import C, Pool

MAX_COMPARED = 16  # up to this many instances are all compared; of more, two are drawn


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
