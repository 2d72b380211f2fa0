"""Deadlines found by one sweep: each item expires unless an earlier one's end has moved its deadline."""

from collections.abc import Callable

import pytest

from tests.unit.torchmoor.movable_loop import pass_time
from torchmoor.fault_log import INTERVAL_S
from torchmoor.proxy.http.sweeper import Sweeper

LATER = 100.0


class Thing:
    """Expires at 1.0; then it runs an action on others and moves its own deadline."""

    def __init__(self) -> None:
        self.deadline = 1.0
        self.num_expired = 0
        self.others: list[Thing] = []
        self.change: Callable[[Thing], None] = lambda other: None

    def expire(self) -> None:
        self.num_expired += 1
        self.deadline = LATER
        for other in self.others:
            self.change(other)


def move(other: Thing) -> None:
    """Move a deadline, as when a waiting request is sent because another one's end frees an instance."""
    other.deadline = LATER


@pytest.mark.parametrize("is_moved", [True, False], ids=["moved", "forgotten"])
def test_a_sweep_asks_each_thing_again_before_it_expires(is_moved: bool) -> None:
    """Each item's deadline is checked again before it expires, so whichever comes first spares the other."""
    sweeper = Sweeper(1.0, clock=lambda: 2.0)
    first, second = Thing(), Thing()
    for thing, other in ((first, second), (second, first)):
        thing.others = [other]
        thing.change = move if is_moved else sweeper.forget
        sweeper.watch(thing)

    sweeper.sweep()

    assert first.num_expired + second.num_expired == 1


def test_a_deadline_whose_handling_fails_does_not_hold_up_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """It is handled again at each sweep, and logged once per interval."""

    class Broken(Thing):
        def expire(self) -> None:
            self.num_expired += 1
            raise ZeroDivisionError

    now = 2.0
    sweeper = Sweeper(1.0, clock=lambda: now)
    broken, others = Broken(), [Thing() for _ in range(20)]
    for thing in (*others[:10], broken, *others[10:]):
        sweeper.watch(thing)

    sweeper.sweep()
    sweeper.sweep()

    assert [thing.num_expired for thing in others] == [1] * 20
    assert broken.num_expired == 2
    assert len(caplog.records) == 1
    now += INTERVAL_S
    sweeper.sweep()
    assert [record.getMessage() for record in caplog.records] == [
        f"a deadline was not handled of=Broken left_out={num_left_out} error=ZeroDivisionError"
        for num_left_out in (0, 1)
    ]


@pytest.mark.parametrize("ahead_s", [1.5, 2.5])
async def test_a_late_sweep_waits_for_what_has_arrived(ahead_s: float) -> None:
    """A loop that was held up handles what it has received before the deadlines, but waits for that only once."""
    sweeper = Sweeper(1.0, clock=lambda: LATER)
    thing = Thing()
    sweeper.watch(thing)
    sweeper.start()

    await pass_time(ahead_s)
    assert thing.num_expired == (ahead_s < 2)
    await pass_time(ahead_s)
    sweeper.stop()

    assert thing.num_expired == 1
