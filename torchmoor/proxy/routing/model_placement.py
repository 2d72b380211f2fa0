"""Placement of many models: which instance takes a request for one of them.

Instances report what they hold. Between two reports there are notes: a model that an instance was sent a request for
is on its way there, so that a burst of requests for one cold model causes one load; with the answer it is there.

* A request goes to an instance that holds its model in memory; device memory comes before host memory.
* If every such instance has too many requests for the model, one more instance loads it, one at a time.
* A model that no instance holds goes to the least busy instance; an unpacked copy on its disk counts in its favour.
* A model that a report does not name is gone, unless it was noted after the query or has a request now.

Both directions of the index hold at most max_models of each instance. 10,000 models on 100 instances each are a
million pairs of about 100 bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

from torchmoor.proxy.routing.pool import C, Pool
from torchmoor.proxy.routing.reasons import (
    MODEL_COLD,
    MODEL_COPY,
    MODEL_LOADING,
    MODEL_RESIDENT,
    MODEL_UNPACKED,
)
from torchmoor.proxy.routing.reported_status import ModelReport, ReportedTier
from torchmoor.proxy.routing.strategy import Pick

MAX_NOTES = 4096  # per instance; the oldest is forgotten
MANY_HOLDERS = 8  # with more, they are compared only if the least busy instance is not one of them
FREE_PARTS = 8  # free memory is compared in eighths of the whole


_IN_MEMORY = frozenset((ReportedTier.DEVICE, ReportedTier.HOST))
# How much busier than others, in doublings of load, an instance may be and still get a model that it has on disk.
_WORTH = {ReportedTier.DISK: 2, ReportedTier.BROKEN: 1}


class _Memory(NamedTuple):
    """An instance's memory for models at its last report."""

    used_bytes: int
    max_bytes: int
    num_models: int


_FRESH = _Memory(0, 0, 0)


class _Note(NamedTuple):
    """Where an instance has a model, or will have it, ahead of its report. at: number of the note, over all."""

    at: int
    tier: ReportedTier


class ModelPlacement:
    """The models of one variant's instances.

    hot_outstanding: requests for a model at each of its holders; from then on it gets another copy. max_models: per
    instance. is_cached: whether models stay in memory after their requests. on_expected: called with each note's model
    and instance.
    """

    def __init__(self, *, hot_outstanding: int, max_models: int, is_cached: bool = True) -> None:
        self._hot = hot_outstanding
        self._max_models = max_models
        self._is_cached = is_cached
        self._memory: dict[str, dict[str, ReportedTier]] = {}  # by model: instances that have it in memory, or will
        self._others: dict[str, dict[str, ReportedTier]] = {}  # by model: those with it on disk, or that cannot load it
        self._reported: dict[str, dict[str, ReportedTier]] = {}  # by instance
        self._notes: dict[str, dict[str, _Note]] = {}  # by instance, then model: what its next report must confirm
        self._outstanding: dict[str, dict[str, int]] = {}  # by model, then instance
        self._reported_memory: dict[str, _Memory] = {}
        self._now = 0
        self.on_expected: Callable[[str, str], None] = _ignore

    # Choosing

    def choose(self, model: str, pool: Pool[C], excluded: frozenset[str] = frozenset()) -> Pick[C] | None:
        holders = self._memory.get(model, _NOWHERE)
        queued = self._outstanding.get(model, _NONE)
        if len(holders) > MANY_HOLDERS:  # the least busy instance is most likely one of them
            least = pool.find_least_loaded(excluded)
            is_held = least is not None and holders.get(least.name) is ReportedTier.DEVICE
            if least is not None and is_held and queued.get(least.name, 0) < self._hot:
                return Pick(least, MODEL_RESIDENT)
        ready = [
            (instance, tier)
            for name, tier in holders.items()
            if name not in excluded and (instance := pool.find(name)) is not None and instance.is_ready
        ]
        free = [holder for holder in ready if holder[0].outstanding < holder[0].capacity]
        resident = [holder for holder in free if holder[1] is not ReportedTier.LOADING]

        def by_load(holder: tuple[C, ReportedTier]) -> tuple[int, int]:
            return (holder[1], holder[0].load)

        def by_queue(holder: tuple[C, ReportedTier]) -> tuple[int, int, int]:
            return (queued.get(holder[0].name, 0), *by_load(holder))

        if resident:
            below_hot = [holder for holder in resident if queued.get(holder[0].name, 0) < self._hot]
            if below_hot:
                return Pick(min(below_hot, key=by_load)[0], MODEL_RESIDENT)
            best = min(resident, key=by_queue)[0]
            is_copied = any(tier is ReportedTier.LOADING for _, tier in ready)  # another copy is on its way
            fresh = None if is_copied else self._choose_cold(model, pool, excluded)
            if fresh is None or fresh.load >= best.load:
                return Pick(best, MODEL_RESIDENT)
            return Pick(fresh, MODEL_COPY)
        if free:
            return Pick(min(free, key=by_queue)[0], MODEL_LOADING)
        fresh = self._choose_cold(model, pool, excluded)
        if fresh is None:
            return None
        if ready:
            return Pick(fresh, MODEL_COPY)  # its holders are too busy
        is_unpacked = self._others.get(model, _NOWHERE).get(fresh.name) is ReportedTier.DISK
        return Pick(fresh, MODEL_UNPACKED if is_unpacked else MODEL_COLD)

    def _choose_cold(self, model: str, pool: Pool[C], excluded: frozenset[str]) -> C | None:
        """Return the open instance with the least load, then the most free memory, then by rendezvous hashing.

        Load counts in doublings, so that models stay where they are unpacked and ties are frequent; hashing breaks
        them the same way in every proxy. Instances that have the model in memory are left out.
        """
        holders = self._memory.get(model, _NOWHERE)
        others = self._others.get(model, _NOWHERE)
        least: tuple[int, int] | None = None
        equal: list[C] = []
        for instance in pool.open_instances:
            name = instance.name
            if name in excluded or name in holders:
                continue
            tier = others.get(name)
            pressure = instance.load.bit_length() - (_WORTH[tier] if tier is not None else 0)
            key = (pressure, -self._free_parts(name))
            if least is None or key < least:
                least, equal = key, [instance]
            elif key == least:
                equal.append(instance)
        if len(equal) < 2:
            return equal[0] if equal else None
        return max(equal, key=lambda instance: _weight(model, instance.name))

    def _free_parts(self, name: str) -> int:
        """Return an instance's free memory, less an estimate for its noted models: the mean of its present ones."""
        used, most, number = self._reported_memory.get(name, _FRESH)
        if not most:
            return FREE_PARTS
        if number:
            used += len(self._notes.get(name, ())) * used // number
        return max(0, FREE_PARTS * (most - used) // most)

    # Requests

    def begin(self, model: str, name: str) -> None:
        """Count a request for the model that goes to an instance; call `end` once when it is over."""
        counts = self._outstanding.setdefault(model, {})
        counts[name] = counts.get(name, 0) + 1
        self.expect(model, name)

    def expect(self, model: str, name: str) -> None:
        """Note that an instance will load the model."""
        if self._memory.get(model, _NOWHERE).get(name) is not None:
            return
        self._note(model, name, ReportedTier.LOADING)
        self.on_expected(model, name)

    def _note(self, model: str, name: str, tier: ReportedTier) -> None:
        notes = self._notes.get(name, {})
        if len(notes) >= MAX_NOTES and model not in notes:
            self._forget_note(next(iter(notes)), name)
        self._now += 1
        self._notes.setdefault(name, notes)[model] = _Note(self._now, tier)
        self._show(model, name)

    def end(self, model: str, name: str) -> None:
        """Count down a request that is over."""
        counts = self._outstanding[model]
        counts[name] -= 1
        if not counts[name]:
            del counts[name]
            if not counts:
                del self._outstanding[model]
            if not self._is_cached:
                self._forget_note(model, name)

    def loaded(self, model: str, name: str) -> None:
        """Count the model as loaded, before the next report says so: the instance has answered with it."""
        holders = self._memory.get(model)
        if holders is not None and holders.get(name) is ReportedTier.LOADING and self._is_cached:
            self._note(model, name, ReportedTier.DEVICE)

    def failed(self, model: str, name: str) -> None:
        """Forget the note: the instance does not have the model, or no memory for it."""
        self._forget_note(model, name)

    def _forget_note(self, model: str, name: str) -> None:
        notes = self._notes.get(name)
        if notes is not None and notes.pop(model, None) is not None:
            if not notes:
                del self._notes[name]
            self._show(model, name)

    # Reports

    def mark(self) -> int:
        """Return a mark to take before a status query and to pass with its report."""
        return self._now

    def report(self, name: str, report: ModelReport, mark: int) -> None:
        """Replace what is known of an instance by its report."""
        old = self._reported.get(name, {})
        new = {sys.intern(model): tier for model, tier in islice(report.models.items(), self._max_models)}
        self._reported[name] = new
        done = [
            model
            for model, note in self._notes.get(name, _NO_NOTES).items()
            if note.at <= mark
            and (
                new.get(model, ReportedTier.DISK) < ReportedTier.DISK or name not in self._outstanding.get(model, _NONE)
            )
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
        self._reported_memory[name] = _Memory(report.used_bytes, report.max_bytes, num_models)

    def forget(self, name: str) -> None:
        """Forget an instance that has restarted or is gone; its running requests still end with `end`."""
        models = {*self._reported.pop(name, ()), *self._notes.pop(name, ())}
        self._reported_memory.pop(name, None)
        for model in models:
            self._show(model, name)

    def _show(self, model: str, name: str) -> None:
        """Index a pair of model and instance by the reports and notes."""
        tier = self._reported.get(name, {}).get(model)
        note = self._notes.get(name, _NO_NOTES).get(model)
        if note is not None and (tier is None or tier >= ReportedTier.LOADING):
            tier = note.tier
        _put(self._memory, model, name, tier if tier is not None and tier < ReportedTier.DISK else None)
        _put(self._others, model, name, tier if tier is not None and tier >= ReportedTier.DISK else None)

    # Queries

    def names(self) -> set[str]:
        """Return the models that some instance has, in memory or on its disk."""
        found = {name for name, holders in self._memory.items() if any(tier in _IN_MEMORY for tier in holders.values())}
        return found | {name for name, others in self._others.items() if ReportedTier.DISK in others.values()}

    def num_loaded(self, name: str) -> int:
        """Return the number of models in an instance's memory, by its last report."""
        return self._reported_memory.get(name, _FRESH).num_models

    def is_expecting(self, name: str) -> bool:
        """Return True while an instance may have loaded a model that it has not reported."""
        return name in self._notes

    def is_held(self, model: str, name: str) -> bool:
        """Return True if an instance has the model in memory."""
        return self._memory.get(model, _NOWHERE).get(name) in _IN_MEMORY

    def check_integrity(self) -> None:
        """Raise RuntimeError unless both directions of the index agree and every count is above zero."""
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
        return sum(number for counts in self._outstanding.values() for number in counts.values())


_NONE: dict[str, int] = {}
_NO_NOTES: dict[str, _Note] = {}
_NOWHERE: dict[str, ReportedTier] = {}


def _ignore(model: str, name: str) -> None:
    """Do nothing: no other process uses these notes."""


def _put(index: dict[str, dict[str, ReportedTier]], model: str, name: str, tier: ReportedTier | None) -> None:
    """Set or remove one pair; drop a model with its last instance."""
    if tier is not None:
        index.setdefault(model, {})[name] = tier
        return
    holders = index.get(model)
    if holders is not None and holders.pop(name, None) is not None and not holders:
        del index[model]


def _weight(model: str, name: str) -> bytes:
    """Return the pair's rendezvous weight: when an instance leaves, only its own models move."""
    return blake2b(f"{model}\n{name}".encode(), digest_size=8).digest()
