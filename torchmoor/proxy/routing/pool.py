"""The instances of one variant in the order of their load: a choice among 3 takes as long as one among 1,000.

An instance is *open* if it may be sent new work: it is ready and has fewer outstanding invocations than its capacity.
Its *load* is that number, raised while it gets only a share of the usual work. Call `update` after every change of an
instance's load or state; it only notes the instance, and the next query moves all noted instances to their places. So a
request's counting is cheap. When no instance is noted:

    an open instance is in the level of its load, behind those that reached that level before it
    an instance that is not open is in no level
    the ring has every instance, open or not, and changes only when one is added or removed

All proxies compute the order in which a key prefers the instances alike, from the names of the instances.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from random import Random
from typing import Generic, Protocol, TypeVar

from torchmoor.proxy.routing.reported_status import ReportedStatus

POINTS_PER_INSTANCE = 128  # on the ring: shares of the keys differ by about 1 / sqrt(128)
MAX_RANDOM_TRIES = 4

MAX_WALKED = 16  # preferred instances that are tried


class Candidate(Protocol):
    """An instance as routing sees it.

    share: of the usual work; below 1.0 for an instance that has just come back. reported: its handler's last status,
    without its models.
    """

    name: str
    capacity: int
    outstanding: int
    share: float
    reported: ReportedStatus

    @property
    def session_room(self) -> int | None:
        """Sessions that it can still take; None if unknown."""
        ...

    @property
    def load(self) -> int:
        """Outstanding invocations divided by the share."""
        ...

    @property
    def is_ready(self) -> bool:
        """True if new work may be sent there."""
        ...


C = TypeVar("C", bound=Candidate)


class Pool(Generic[C]):
    """Indexes instances by load (levels), by number (for random choices) and by hash (the ring)."""

    def __init__(self, instances: Iterable[C] = ()) -> None:
        self._members: dict[str, C] = {}
        self._changed: dict[C, None] = {}  # noted since the last query
        self._levels: list[OrderedDict[str, C]] = []
        self._level_of: dict[str, int] = {}
        self._least = 0  # no lower level has an instance
        self._total_load = 0  # of the open instances
        self._open: list[C] = []
        self._position: dict[str, int] = {}  # in _open
        self._ring: list[tuple[int, str]] = []
        for instance in instances:
            self.add(instance)

    # Changes

    def add(self, instance: C) -> None:
        """Add an instance; its name must be new."""
        self._members[instance.name] = instance
        for point in _points(instance.name):
            insort(self._ring, (point, instance.name))
        self.update(instance)

    def remove(self, instance: C) -> None:
        self._settle()
        name = instance.name
        del self._members[name]
        self._ring = [entry for entry in self._ring if entry[1] != name]
        self._set_level(instance, None)

    def update(self, instance: C) -> None:
        """Note that an instance's load or state has changed; a removed instance is ignored."""
        self._changed[instance] = None

    def _settle(self) -> None:
        """Move every noted instance to the place of its load and state."""
        for instance in self._changed:
            if self._members.get(instance.name) is instance:
                is_open = instance.outstanding < instance.capacity and instance.is_ready
                self._set_level(instance, instance.load if is_open else None)
        self._changed.clear()

    def _set_level(self, instance: C, level: int | None) -> None:
        name = instance.name
        old = self._level_of.get(name)
        if old is not None:
            del self._levels[old][name]
            self._total_load -= old
        if level is None:
            if old is not None:
                del self._level_of[name]
                self._close(name)
            return
        if old is None:
            self._position[name] = len(self._open)
            self._open.append(instance)
        levels = self._levels
        while len(levels) <= level:
            levels.append(OrderedDict())
        levels[level][name] = instance
        self._total_load += level
        self._level_of[name] = level
        if level < self._least:
            self._least = level

    def _close(self, name: str) -> None:
        """Remove an instance from the open ones; the last one takes its place."""
        position = self._position.pop(name)
        last = self._open.pop()
        if last.name != name:
            self._open[position] = last
            self._position[last.name] = position

    # Queries

    @property
    def open_instances(self) -> Sequence[C]:
        self._settle()
        return self._open

    @property
    def mean_load(self) -> float:
        self._settle()
        return self._total_load / max(1, len(self._open))

    @property
    def members(self) -> Iterable[C]:
        return self._members.values()

    def find(self, name: str) -> C | None:
        return self._members.get(name)

    def find_least_loaded(self, excluded: frozenset[str] = frozenset()) -> C | None:
        """Return the open instance with the least load.

        Of several, the one that has had this load the longest, so that requests spread.
        """
        self._settle()
        levels = self._levels
        level = self._least
        while level < len(levels) and not levels[level]:
            level += 1
        self._least = level
        for instances in levels[level:] if excluded else levels[level : level + 1]:
            for instance in instances.values():
                if instance.name not in excluded:
                    return instance
        return None

    def find_random(self, rng: Random, excluded: frozenset[str] = frozenset()) -> C | None:
        """Return a random open instance; one in slow start is less likely, in proportion to its share."""
        instances: Sequence[C] = self.open_instances
        for _ in range(MAX_RANDOM_TRIES):
            if not instances:
                return None
            instance = instances[int(rng.random() * len(instances))]
            if instance.name not in excluded and (instance.share == 1.0 or rng.random() < instance.share):
                return instance
        instances = [instance for instance in instances if instance.name not in excluded]
        return rng.choices(instances, [instance.share for instance in instances])[0] if instances else None

    def walk(self, key: int) -> Iterator[C]:
        """Yield every instance once, in the order in which a 64-bit key prefers them.

        The order depends on names only: all proxies agree, and an instance that comes or goes does not move others.
        """
        ring = self._ring
        seen: set[str] = set()
        start = bisect_left(ring, (key, ""))
        for step in range(len(ring)):
            name = ring[(start + step) % len(ring)][1]
            if name not in seen:
                seen.add(name)
                yield self._members[name]
                if len(seen) == len(self._members):
                    return

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every instance is where the rules say."""
        self._settle()
        placed = {name: level for level, found in enumerate(self._levels) for name in found}
        right = {
            instance.name: instance.load
            for instance in self._members.values()
            if instance.is_ready and instance.outstanding < instance.capacity
        }
        if placed != right or self._level_of != right:
            raise RuntimeError(f"levels are {placed}, but the instances' load is {right}")
        if {name: self._open[at].name for name, at in self._position.items()} != {name: name for name in right}:
            raise RuntimeError(f"open instances are {self._open}, but should be {sorted(right)}")
        if self._total_load != sum(right.values()):
            raise RuntimeError(f"the total load is {self._total_load}, but should be {sum(right.values())}")
        if min(right.values(), default=self._least) < self._least:
            raise RuntimeError(f"an instance is below level {self._least}")


def _points(name: str) -> Iterator[int]:
    """Yield an instance's points on the ring."""
    for number in range(POINTS_PER_INSTANCE // 8):
        digest = blake2b(f"{number}\n{name}".encode(), digest_size=64).digest()
        for start in range(0, 64, 8):
            yield int.from_bytes(digest[start : start + 8], "big")


def find_preferred(pool: Pool[C], key: int, limit: int, excluded: frozenset[str]) -> tuple[C, bool] | None:
    """Return the first instance in a key's order with fewer outstanding requests than the limit. key: 64 bits.

    The flag is True for the first in the key's order. None if the first MAX_WALKED all reach the limit. An instance in
    slow start has empty caches and gets its keys back gradually: first those whose place is below its share.
    """
    for number, instance in enumerate(islice(pool.walk(key), MAX_WALKED)):
        if (
            instance.outstanding < min(limit, instance.capacity)
            and instance.is_ready
            and (instance.share == 1.0 or _place_of(key) < instance.share)
            and instance.name not in excluded
        ):
            return instance, number == 0
    return None


def _place_of(key: int) -> float:
    """Return a number from 0 to 1 for the key, independent of its position on the ring.

    The golden ratio spreads neighbouring keys (Knuth, "The Art of Computer Programming" 3, 6.4).
    """
    return (key * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) / (1 << 64)
