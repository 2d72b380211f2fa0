"""What each proxy process of this host has outstanding at each instance, where all of them can read it.

A memory map of an anonymous file that the processes inherit, with one row a process. Rules:

    a process writes its own row only, and reads the others'; nobody locks
    the parent clears the row of a process that has died, which no longer writes it: its leases end with it
    a row is a count a slot, and a ring of the slots whose counts changed last

A reader goes on in each ring where it stopped, so that keeping up costs what has changed and not what there is; one
that is more than a ring behind reads the whole row. On one processor's memory order a reader could see the ring
before the count that it speaks of; then it is wrong by one request until that instance's next change.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

from torchmoor.errors import ConfigError
from torchmoor.proxy.instances.instance import Instance

MAX_SLOTS = 4096  # instances
MAX_VARIANTS = 256
RING = 256  # changes that a reader may be behind; a power of two
_MASK = 0xFFFFFFFF

# Cells of 4 bytes from the beginning of a row
_RING = 2  # the first is the number of changes, the second unused
_COUNTS = _RING + RING
_TURNS = _COUNTS + MAX_SLOTS  # sessions' turns that wait for the instance; see replicas.waiting
_WAITING = _TURNS + MAX_SLOTS  # pairs of 8 bytes for each variant; see replicas.waiting
_ROW = _WAITING + 4 * MAX_VARIANTS
_ROW_BYTES = -(-4 * _ROW // mmap.PAGESIZE) * mmap.PAGESIZE


class _Row:
    """Another process's row, as far as this one has read it."""

    __slots__ = ("start", "seen", "last")

    def __init__(self, start: int) -> None:
        self.start = start
        self.seen = 0
        self.last: dict[int, int] = {}


class _Place:
    """An instance that is counted here, and who is told of its load."""

    __slots__ = ("instance", "update")

    def __init__(self, instance: Instance, update: Callable[[Instance], None]) -> None:
        self.instance = instance
        self.update = update


class SharedCounts:
    """One process's view: it keeps `outstanding` and `elsewhere` of the instances that it is told to count.

    row: this process's own; None for the parent, which only reads, and clears.
    """

    def __init__(self, file: int, *, num_rows: int, row: int | None) -> None:
        self.num_rows = num_rows
        self.row = row
        self._map = mmap.mmap(file, num_rows * _ROW_BYTES)
        self._cells = memoryview(self._map).cast("I")
        self._times = memoryview(self._map).cast("d")
        self._own = None if row is None else _start(row)
        self._others = [_Row(_start(other)) for other in range(num_rows) if other != row]
        self._places: dict[int, _Place] = {}
        self._slots: dict[str, int] = {}

    @staticmethod
    def make_file(num_rows: int) -> int:
        """An anonymous file for so many processes; the caller closes the descriptor."""
        file = os.memfd_create("torchmoor-counts")
        os.ftruncate(file, num_rows * _ROW_BYTES)
        return file

    def close(self) -> None:
        """Let go of the map."""
        self._cells.release()
        self._times.release()
        self._map.close()

    # Instances

    def attach(self, instance: Instance, slot: int) -> None:
        """Count an instance, which the registry knows, together with the other processes that use this slot."""
        if not 0 <= slot < MAX_SLOTS:
            raise ConfigError(f"several processes count at most {MAX_SLOTS} instances together")
        place = self._places[slot] = _Place(instance, instance.on_load)
        self._slots[instance.name] = slot
        for row in self._others:
            count = row.last[slot] = self._cells[row.start + _COUNTS + slot]
            instance.elsewhere += count
            instance.outstanding += count
        place.update(instance)
        if self._own is not None:
            instance.on_load = self._make_writer(slot, self._own, instance.on_load)

    def is_counting(self, instance: Instance) -> bool:
        """True if it is attached."""
        slot = self._slots.get(instance.name)
        return slot is not None and self._places[slot].instance is instance

    def detach(self, name: str) -> None:
        """The instance is gone: what is still outstanding there ends, or has ended, uncounted."""
        slot = self._slots.pop(name, None)
        if slot is None:
            return
        place = self._places.pop(slot)
        instance = place.instance
        instance.on_load = place.update
        instance.outstanding -= instance.elsewhere
        instance.elsewhere = 0
        if self._own is not None:
            cells, own = self._cells, self._own
            cells[own + _COUNTS + slot] = cells[own + _TURNS + slot] = 0  # the next one of that name begins anew
            cells[own + _RING + cells[own] % RING] = slot
            cells[own] = (cells[own] + 1) & _MASK

    def _make_writer(self, slot: int, own: int, update: Callable[[Instance], None]) -> Callable[[Instance], None]:
        cells, at, ring = self._cells, own + _COUNTS + slot, own + _RING

        def write(instance: Instance) -> None:
            """The count before the log: whoever reads of a change finds it."""
            cells[at] = instance.outstanding - instance.elsewhere
            number = cells[own]
            cells[ring + number % RING] = slot
            cells[own] = (number + 1) & _MASK
            update(instance)

        return write

    # Other processes

    def refresh(self) -> None:
        """Take over what the other processes have counted since; to be called before each choice."""
        cells, places = self._cells, self._places
        for row in self._others:
            start, seen = row.start, row.seen
            number = cells[start]
            if number == seen:
                continue
            row.seen = number
            counts, last = start + _COUNTS, row.last
            for slot in self._changed_slots(start, seen, number):
                place = places.get(slot)
                if place is not None and (change := cells[counts + slot] - last[slot]):
                    last[slot] += change
                    instance = place.instance
                    instance.elsewhere += change
                    instance.outstanding += change
                    place.update(instance)

    def _changed_slots(self, start: int, seen: int, number: int) -> list[int]:
        """The slots of the changes from seen to number; all of them if the ring has been written over meanwhile."""
        cells, ring = self._cells, start + _RING
        behind = (number - seen) & _MASK
        if behind < RING:
            slots = [cells[ring + (seen + step) % RING] for step in range(behind)]
            if (cells[start] - seen) & _MASK < RING:
                return slots
        return list(self._places)

    def clear(self, row: int) -> None:
        """A process has died: nothing of what it counted is outstanding any more. For the parent only."""
        start = _start(row)
        cells = self._cells
        for cell in range(start + _COUNTS, start + _ROW):
            cells[cell] = 0
        cells[start] = (cells[start] + RING) & _MASK  # everybody reads the whole row again

    # What waits, for replicas.waiting

    def write_waiting(self, variant: int, due: float, written_at: float) -> None:
        """When the next of this process's waiting requests is due; 0.0 if none waits."""
        assert self.row is not None
        at = _time(self.row, variant)
        self._times[at] = due
        self._times[at + 1] = written_at

    def read_waiting(self, row: int, variant: int) -> tuple[float, float]:
        """What a process last wrote: due, written_at."""
        at = _time(row, variant)
        return self._times[at], self._times[at + 1]

    def write_turns(self, name: str, number: int) -> None:
        """How many sessions' turns wait in this process for an instance."""
        slot = self._slots.get(name)
        if slot is not None and self._own is not None:
            self._cells[self._own + _TURNS + slot] = number

    def read_turns(self, row: int, name: str) -> int:
        """How many wait in another process for an instance."""
        slot = self._slots.get(name)
        return 0 if slot is None else self._cells[_start(row) + _TURNS + slot]


class Slots:
    """Which instance is counted in which slot; for the parent, who tells the processes.

    A slot is used again once its instance is gone. A process that has not heard of that yet may still write there what
    it has at the old one; it clears the cell when it does, and the others follow.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free: list[int] = []

    def take(self, name: str) -> int:
        """The instance's slot, from now on."""
        if name not in self._slots:
            self._slots[name] = self._free.pop() if self._free else len(self._slots)
        return self._slots[name]

    def give_back(self, name: str) -> None:
        """The instance is gone."""
        slot = self._slots.pop(name, None)
        if slot is not None:
            self._free.append(slot)


def _start(row: int) -> int:
    """A row's first cell."""
    return row * _ROW_BYTES // 4


def _time(row: int, variant: int) -> int:
    """The first of a variant's two times in a row, in units of 8 bytes."""
    return (_start(row) + _WAITING) // 2 + 2 * variant
