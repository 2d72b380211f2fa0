"""Counts of several processes in one map, and what waits in each; here the processes are objects."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.errors import ConfigError
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry
from torchmoor.proxy.instances.shared_counts import MAX_SLOTS, RING, SharedCounts, Slots
from torchmoor.run.processes import waiting
from torchmoor.run.processes.waiting import WaitingElsewhere

NAMES = ("a", "b")
ROOT = Path(__file__).parents[4]


class Side:
    """What one process has: its own registry, and its view of the counts."""

    def __init__(self, file: int, row: int | None, num_rows: int) -> None:
        self.registry = Registry([EndpointSettings(name="chat", variants=(VariantSettings(model="chat"),))])
        self.counts = SharedCounts(file, num_rows=num_rows, row=row)
        for slot, name in enumerate(NAMES):
            self.add(name, slot)

    def add(self, name: str, slot: int) -> None:
        instance = Instance(name=name, endpoint="chat", model="chat", port=1, state=InstanceState.READY)
        self.registry.add(instance)
        self.counts.attach(instance, slot)

    def __getitem__(self, name: str) -> Instance:
        found = self.registry.find(name)
        assert found is not None
        return found

    @property
    def seen(self) -> tuple[int, ...]:
        """Outstanding at each instance, after a look at the others."""
        self.counts.refresh()
        pool = self.registry.endpoints()[0].variants[0].pool
        pool.check_integrity()
        return tuple(self[name].outstanding for name in NAMES)


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = SharedCounts.make_file(3)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def make(file: int) -> Iterator[Callable[[int | None], Side]]:
    sides: list[Side] = []

    def make_side(row: int | None) -> Side:
        sides.append(Side(file, row, 3))
        return sides[-1]

    yield make_side
    for side in sides:
        side.counts.close()


def test_each_process_sees_the_sum(make: Callable[[int | None], Side]) -> None:
    """Leases count in all processes while they are held, and in the parent, which has none of its own."""
    first, second, parent = make(0), make(1), make(None)

    leases = [first["a"].lease(), first["a"].lease(), second["a"].lease(), second["b"].lease()]

    assert first.seen == second.seen == parent.seen == (3, 1)
    assert (first["a"].elsewhere, second["a"].elsewhere) == (1, 2)
    for lease in leases:
        lease.release()
    assert first.seen == second.seen == parent.seen == (0, 0)


def test_least_outstanding_is_that_of_all_processes(make: Callable[[int | None], Side]) -> None:
    """The pool stands in the order of the sums."""
    first, second = make(0), make(1)

    with first["a"].lease():
        assert second.seen == (1, 0)
        found = second.registry.endpoints()[0].variants[0].pool.find_least_outstanding()

    assert found is second["b"]


def test_reader_that_is_far_behind_reads_everything(make: Callable[[int | None], Side]) -> None:
    """More changes than the ring holds are no reason to be wrong."""
    first, second = make(0), make(1)

    with first["b"].lease():
        for _ in range(RING):
            first["a"].lease().release()

        assert second.seen == (0, 1)


def test_cleared_row_counts_no_more_and_can_be_used_again(make: Callable[[int | None], Side]) -> None:
    """The lease rule: what a dead process had outstanding is gone; its successor begins at zero."""
    dead, living, parent = make(0), make(1), make(None)
    dead["a"].lease()
    living["a"].lease()
    assert living.seen == parent.seen == (2, 0)

    parent.counts.clear(0)
    successor = make(0)

    assert living.seen == parent.seen == successor.seen == (1, 0)
    successor["b"].lease()
    assert living.seen == parent.seen == (1, 1)


def test_instance_that_is_started_again_begins_at_zero(make: Callable[[int | None], Side]) -> None:
    """What was outstanding at the process before it ends uncounted, here and elsewhere."""
    first, second = make(0), make(1)
    lease = first["a"].lease()
    assert second.seen == (1, 0)

    for side in (first, second):
        side.counts.detach("a")
        side.registry.remove("a")
        side.add("a", 0)
    lease.release()

    assert first.seen == second.seen == (0, 0)
    with second["a"].lease():
        assert first.seen == (1, 0)


def test_more_instances_than_slots_are_refused(make: Callable[[int | None], Side]) -> None:
    """The map has a bound."""
    with pytest.raises(ConfigError, match=str(MAX_SLOTS)):
        make(0).add("c", MAX_SLOTS)


def test_slot_is_used_again_while_a_process_still_counts_the_last_instance_there(
    make: Callable[[int | None], Side],
) -> None:
    """What that process has outstanding at it leaves the sum as soon as it hears that the instance is gone."""
    first, second = make(0), make(1)
    old = second["a"].lease()
    first.counts.detach("a")
    first.registry.remove("a")

    first.add("c", 0)
    second.counts.detach("a")
    old.release()

    first.counts.refresh()
    assert first["c"].outstanding == 0
    second.add("c", 0)
    with second["c"].lease():
        first.counts.refresh()
        assert first["c"].outstanding == 1


def test_instances_that_come_and_go_need_no_more_slots_than_there_are_at_a_time() -> None:
    """Names may change for ever, where each instance that is started has one of its own."""
    slots = Slots()
    assert [slots.take("a"), slots.take("b"), slots.take("a")] == [0, 1, 0]

    for number in range(2 * MAX_SLOTS):
        slots.give_back("a" if number == 0 else f"a{number - 1}")
        assert slots.take(f"a{number}") == 0

    assert slots.take("c") == 2


def hammer(file: int, row: int, num_changes: int) -> None:
    """A process that begins and ends requests as fast as it can, looks at the others, and ends with one at `b`."""
    side, rng = Side(file, row, 3), Random(row)
    held = []
    for _ in range(num_changes):
        held.append(side[rng.choice(NAMES)].lease())
        if len(held) > 5:
            held.pop(rng.randrange(5)).release()
        side.counts.refresh()
    for lease in held:
        lease.release()
    side["b"].lease()


def test_no_change_is_lost_between_processes_that_never_wait_for_one_another(
    file: int, make: Callable[[int | None], Side]
) -> None:
    """However they run into each other, each knows in the end what all the others have outstanding."""
    reader = make(0)
    script = (
        "import sys; from tests.unit.torchmoor.fleet.test_shared_counts import hammer; hammer(*map(int, sys.argv[1:]))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script, str(file), str(row), "10000"], cwd=ROOT, pass_fds=[file])
        for row in (1, 2)
    ]
    while any(process.poll() is None for process in processes):
        assert all(0 <= reader[name].elsewhere <= 12 for name in NAMES)
        reader.counts.refresh()

    assert [process.returncode for process in processes] == [0, 0]
    assert reader.seen == (0, 2)


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def queues(make: Callable[[int | None], Side], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[WaitingElsewhere]]:
    """One variant's waiting requests as three processes see them, without their beats."""
    monkeypatch.setattr(waiting.asyncio, "get_running_loop", lambda: NoTimers())
    clock = Clock()
    wakers = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(3)]
    yield [WaitingElsewhere(make(row).counts, 0, wakers, lambda: None, clock=clock) for row in range(3)]
    for waker in wakers:
        os.close(waker)


class NoTimers:
    """A loop whose timers never go off."""

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        """Forget it."""


def woken(queues: list[WaitingElsewhere]) -> list[int]:
    """The rows that have been woken since the last look."""
    found = []
    for row, waker in enumerate(queues[0]._wakers):
        try:
            os.eventfd_read(waker)
        except BlockingIOError:
            continue
        found.append(row)
    return found


def test_sooner_request_of_another_process_comes_first(queues: list[WaitingElsewhere]) -> None:
    """And its process is the one that is woken when there is room."""
    queues[0].tell_waiting(130.0, None, 0)
    queues[1].tell_waiting(120.0, None, 0)

    assert queues[0].comes_before(130.0)
    assert queues[2].comes_before(125.0)
    assert not queues[1].comes_before(120.0)
    assert not queues[2].comes_before(119.0)
    queues[2].pass_on(None)
    assert woken(queues) == [1]


def test_process_that_waits_for_nothing_more_is_left_out(queues: list[WaitingElsewhere]) -> None:
    """Its last request went, or its client did."""
    queues[0].tell_waiting(120.0, None, 0)
    queues[0].tell_waiting(None, None, 0)

    assert not queues[1].comes_before(200.0)
    queues[1].pass_on(None)
    assert woken(queues) == []


def test_process_that_hangs_holds_nobody_back(queues: list[WaitingElsewhere]) -> None:
    """Who has not written for a while does not count."""
    queues[0].tell_waiting(120.0, None, 0)
    clock = queues[1]._clock
    assert isinstance(clock, Clock)

    clock.now += waiting.STALE_S

    assert not queues[1].comes_before(200.0)


def test_turns_wait_for_their_instance_and_hold_nothing_else_back(queues: list[WaitingElsewhere]) -> None:
    """A process with turns alone is woken for their instance; other requests need not wait for it."""
    queues[0].tell_waiting(float("inf"), "a", 1)
    queues[1].tell_waiting(120.0, None, 0)
    a, b = (Instance(name=name, endpoint="chat", model="chat", port=1) for name in NAMES)

    assert queues[2].has_turn_for(a)
    assert not queues[2].has_turn_for(b)
    assert not queues[1].comes_before(150.0)
    queues[2].pass_on(a)
    assert woken(queues) == [0]
    queues[2].pass_on(b)
    assert woken(queues) == [1]


def test_no_turn_waits_for_the_next_instance_of_a_name(queues: list[WaitingElsewhere]) -> None:
    """Those that waited for the last one have gone elsewhere, or ended."""
    queues[0].tell_waiting(120.0, "a", 1)

    queues[0]._counts.detach("a")

    assert not queues[1].has_turn_for(Instance(name="a", endpoint="chat", model="chat", port=1))
