"""Placement: which instance a request for one of many models goes to.

What instances hold is known from their reports. Between two reports there are notes: a model that an instance was
sent a request for is on its way there, so that a burst of requests for one cold model makes one load and not many.

    a request goes to an instance that holds its model in memory, on the device before in host memory
    while every such instance has too many requests for the model, one more loads it, one at a time
    a model that nobody holds goes where least is to be done; where it lies unpacked on a disk counts for it
    what a report does not name is gone, unless it was noted after the question, or is being asked for now

Both directions of the index are bounded: so many models of each instance. 10,000 models on 100 instances each are
a million pairs, of about a hundred bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from enum import IntEnum
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

from torchmoor.proxy.routing.pool import C, Pool
from torchmoor.proxy.routing.strategy import Pick

RESIDENT = "model-resident"  # it is in the instance's memory
LOADING = "model-loading"  # another request has begun to load it there
UNPACKED = "model-unpacked"  # it is on the instance's disk
COLD = "model-cold"
COPY = "model-copy"  # it is in memory elsewhere, where too much waits for it

MAX_NOTES = 4096  # models on their way to an instance; the oldest is forgotten
MANY_HOLDERS = 8  # above which they are compared only if the least busy instance is none of them
FREE_PARTS = 8  # free memory is compared in so many parts of the whole: less of a difference is none


class Tier(IntEnum):
    """Where an instance has a model; the least is the best."""

    DEVICE = 0
    HOST = 1
    LOADING = 2
    DISK = 3
    BROKEN = 4  # it was tried there, and could not be loaded


_IN_MEMORY = frozenset((Tier.DEVICE, Tier.HOST))
# What an instance may be busier than others, in doublings of load, and still get a model that is no longer in memory.
_WORTH = {Tier.DISK: 2, Tier.BROKEN: 1}


class Report(NamedTuple):
    """What an instance says that it holds. used_bytes, max_bytes: of its device's budget; 0 if it does not say."""

    models: Mapping[str, Tier]
    used_bytes: int = 0
    max_bytes: int = 0


class _Room(NamedTuple):
    """Memory at the last report: of max_bytes, used_bytes by so many models."""

    used_bytes: int
    max_bytes: int
    num_models: int


_FRESH = _Room(0, 0, 0)


class Placement:
    """The models of one variant's instances.

    hot_outstanding: requests for a model at each of its holders above which it gets another copy. max_models: of one
    instance. is_cached: models stay in memory after their requests; if not, nobody holds one without a request.
    on_expected: told of each note, a model and an instance.
    """

    def __init__(self, *, hot_outstanding: int, max_models: int, is_cached: bool = True) -> None:
        self._hot = hot_outstanding
        self._max_models = max_models
        self._is_cached = is_cached
        self._memory: dict[str, dict[str, Tier]] = {}  # by model: who has it in memory, or will
        self._others: dict[str, dict[str, Tier]] = {}  # by model: who has it on disk, or could not load it
        self._reported: dict[str, dict[str, Tier]] = {}  # by instance
        self._notes: dict[str, dict[str, int]] = {}  # by instance: models that were sent there, and when
        self._outstanding: dict[str, dict[str, int]] = {}  # by model, then instance
        self._rooms: dict[str, _Room] = {}
        self._now = 0
        self.on_expected: Callable[[str, str], None] = _ignore

    # Choosing

    def choose(self, model: str, pool: Pool[C], excluded: frozenset[str] = frozenset()) -> Pick[C] | None:
        """The instance for a request, or None if none can take it now."""
        best: C | None = None
        best_key = (0, 0, 0)
        coming: C | None = None
        coming_key = (0, 0)
        is_coming = is_held = False
        holders = self._memory.get(model)
        if holders:
            outstanding = self._outstanding.get(model, _NONE)
            hot = self._hot
            if len(holders) > MANY_HOLDERS:  # most likely whoever is least busy is one of them
                least = pool.find_least_outstanding(excluded)
                if (
                    least is not None
                    and holders.get(least.name) is Tier.DEVICE
                    and outstanding.get(least.name, 0) < hot
                ):
                    return Pick(least, RESIDENT)
            for name, tier in holders.items():
                instance = pool.find(name)
                if instance is None or not instance.is_ready or name in excluded:
                    continue
                is_held = True
                is_coming = is_coming or tier is Tier.LOADING
                if instance.outstanding >= instance.capacity:
                    continue
                number = outstanding.get(name, 0)
                if tier is Tier.LOADING:
                    key = (number, instance.load)
                    if coming is None or key < coming_key:
                        coming, coming_key = instance, key
                else:
                    # Beyond `hot` the tier does not matter any more, only the queue.
                    full_key = (number, tier, instance.load) if number >= hot else (-1, tier, instance.load)
                    if best is None or full_key < best_key:
                        best, best_key = instance, full_key
        if best is not None and (best_key[0] < 0 or is_coming):
            return Pick(best, RESIDENT)
        if best is None and coming is not None:
            return Pick(coming, LOADING)
        fresh = self._choose_cold(model, pool, excluded)
        if best is not None:
            if fresh is None or fresh.load >= best.load:
                return Pick(best, RESIDENT)
            return Pick(fresh, COPY)
        if fresh is None:
            return None
        if is_held:
            return Pick(fresh, COPY)  # whoever holds it is full
        return Pick(fresh, UNPACKED if self._others.get(model, {}).get(fresh.name) is Tier.DISK else COLD)

    def _choose_cold(self, model: str, pool: Pool[C], excluded: frozenset[str]) -> C | None:
        """The open instance with the least to do, then the most free memory, then by rendezvous hashing.

        Load counts in doublings, so that models stay where they lie unpacked, and ties are many: they go where every
        proxy would send them. An instance that has the model in memory is none of these.
        """
        holders = self._memory.get(model, _NONE)
        others = self._others.get(model, _NONE)
        least: tuple[int, int] | None = None
        equal: list[C] = []
        for instance in pool.open_instances:
            name = instance.name
            if name in excluded or name in holders:
                continue
            tier = others.get(name)
            pressure = instance.load.bit_length() - (_WORTH[Tier(tier)] if tier is not None else 0)
            key = (pressure, -self._free_parts(name))
            if least is None or key < least:
                least, equal = key, [instance]
            elif key == least:
                equal.append(instance)
        if len(equal) < 2:
            return equal[0] if equal else None
        return max(equal, key=lambda instance: _weight(model, instance.name))

    def _free_parts(self, name: str) -> int:
        """An instance's free memory, less what its notes will need if they are like what it has."""
        used, most, number = self._rooms.get(name, _FRESH)
        if not most:
            return FREE_PARTS
        if number:
            used += len(self._notes.get(name, ())) * used // number
        return max(0, FREE_PARTS * (most - used) // most)

    # What was sent

    def begin(self, model: str, name: str) -> None:
        """A request for the model goes to an instance; `end` follows, once."""
        counts = self._outstanding.setdefault(model, {})
        counts[name] = counts.get(name, 0) + 1
        self.expect(model, name)

    def expect(self, model: str, name: str) -> None:
        """An instance was told to load the model, by a request or otherwise."""
        if self._memory.get(model, _NONE).get(name) is not None:
            return
        notes = self._notes.setdefault(name, {})
        if len(notes) >= MAX_NOTES:
            self._forget_note(next(iter(notes)), name)
        self._now += 1
        notes[model] = self._now
        self._show(model, name)
        self.on_expected(model, name)

    def end(self, model: str, name: str) -> None:
        """The request is over, whatever became of it."""
        counts = self._outstanding[model]
        counts[name] -= 1
        if not counts[name]:
            del counts[name]
            if not counts:
                del self._outstanding[model]
            if not self._is_cached:
                self._forget_note(model, name)

    def loaded(self, model: str, name: str) -> None:
        """An instance has answered with the model: it is in memory there, before any report says so."""
        holders = self._memory.get(model)
        if holders is not None and holders.get(name) is Tier.LOADING and self._is_cached:
            holders[name] = Tier.DEVICE

    def failed(self, model: str, name: str) -> None:
        """An instance has no such model, or no room for it."""
        self._forget_note(model, name)

    def _forget_note(self, model: str, name: str) -> None:
        notes = self._notes.get(name)
        if notes is not None and notes.pop(model, None) is not None:
            if not notes:
                del self._notes[name]
            self._show(model, name)

    # What instances say

    def mark(self) -> int:
        """To be taken before an instance is asked, and given with its report."""
        return self._now

    def report(self, name: str, report: Report, mark: int) -> None:
        """What an instance holds, in place of all that was known of it."""
        old = self._reported.get(name, {})
        new = {sys.intern(model): tier for model, tier in islice(report.models.items(), self._max_models)}
        self._reported[name] = new
        done = [
            model
            for model, noted_at in self._notes.get(name, _NONE).items()
            if noted_at <= mark
            and (new.get(model, Tier.DISK) < Tier.DISK or name not in self._outstanding.get(model, _NONE))
        ]
        for model in done:
            del self._notes[name][model]
        if done and not self._notes[name]:
            del self._notes[name]
        for model in {*done, *(old.keys() - new.keys())}:
            self._show(model, name)
        for model, tier in new.items():
            if old.get(model) is not tier:
                self._show(model, name)
        num_models = sum(tier in _IN_MEMORY for tier in new.values())
        self._rooms[name] = _Room(report.used_bytes, report.max_bytes, num_models)

    def forget(self, name: str) -> None:
        """The instance has lost its memory, or is gone; requests that run there still end with `end`."""
        models = {*self._reported.pop(name, ()), *self._notes.pop(name, ())}
        self._rooms.pop(name, None)
        for model in models:
            self._show(model, name)

    def _show(self, model: str, name: str) -> None:
        """Put a pair where reports and notes say."""
        tier = self._reported.get(name, {}).get(model)
        if model in self._notes.get(name, _NONE) and (tier is None or tier >= Tier.DISK):
            tier = Tier.LOADING
        _put(self._memory, model, name, tier if tier is not None and tier < Tier.DISK else None)
        _put(self._others, model, name, tier if tier is not None and tier >= Tier.DISK else None)

    # Questions

    def num_loaded(self, name: str) -> int:
        """Models in an instance's memory, by its last report."""
        return self._rooms.get(name, _FRESH).num_models

    def is_expecting(self, name: str) -> bool:
        """True while an instance may have loaded something that it has not reported."""
        return name in self._notes

    def is_held(self, model: str, name: str) -> bool:
        """True if an instance has the model in memory."""
        return self._memory.get(model, _NONE).get(name) in _IN_MEMORY

    def check_integrity(self) -> None:
        """Raise RuntimeError unless both directions say the same and every count is above zero."""
        shown = {(m, n) for index in (self._memory, self._others) for m, holders in index.items() for n in holders}
        known = {(m, n) for source in (self._reported, self._notes) for n, models in source.items() for m in models}
        if shown != known:
            raise RuntimeError(f"shown are {shown - known}, known are {known - shown}")
        if any(not counts or min(counts.values()) < 1 for counts in self._outstanding.values()):
            raise RuntimeError(f"outstanding are {self._outstanding}")
        if any(len(models) > self._max_models for models in self._reported.values()):
            raise RuntimeError(f"an instance has more than {self._max_models} models")

    @property
    def num_outstanding(self) -> int:
        """Requests that have begun and not ended."""
        return sum(number for counts in self._outstanding.values() for number in counts.values())

    def __repr__(self) -> str:
        return f"<Placement {len(self._memory)} models in memory, {self.num_outstanding} outstanding>"


_NONE: dict[str, int] = {}


def _ignore(model: str, name: str) -> None:
    """Nobody else routes by these notes."""


def _put(index: dict[str, dict[str, Tier]], model: str, name: str, tier: Tier | None) -> None:
    """Set or remove one pair; no model is left without an instance."""
    if tier is not None:
        index.setdefault(model, {})[name] = tier
        return
    holders = index.get(model)
    if holders is not None and holders.pop(name, None) is not None and not holders:
        del index[model]


def _weight(model: str, name: str) -> bytes:
    """As for sessions: when an instance leaves, only its own models move."""
    return blake2b(f"{model}\n{name}".encode(), digest_size=8).digest()
