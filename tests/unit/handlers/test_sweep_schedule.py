"""When sessions expire, and when the journals of expired sessions are deleted."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from handlers.chat.sessions import expiry
from handlers.chat.sessions.expiry import ExpiryThread, Sweep, SweepSchedule
from handlers.journal.journal import REMOVED_WITHIN_S
from tests.waiting import wait_until

START = 1_800_000_000


class Clocks:
    """The wall clock, which can be set, and the monotonic one."""

    def __init__(self) -> None:
        self.passed_s = 0
        self.ahead_s = 0
        self.schedule = SweepSchedule(lambda: START + self.passed_s + self.ahead_s, lambda: 5 + self.passed_s)

    def run(self, seconds: int) -> list[Sweep]:
        """Advance the time, and call the schedule every second."""
        sweeps = []
        for _ in range(seconds):
            sweeps.append(self.schedule.next())
            self.passed_s += 1
        return [sweep for sweep in sweeps if sweep is not None]


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


def test_every_session_is_deleted_within_a_minute(clocks: Clocks) -> None:
    """A session that is too young for one deletion is deleted by the next, within a minute of its expiry."""
    bounds = [sweep.expired_before for sweep in clocks.run(300)]

    assert bounds[0] == START - 30
    longest = max(later - earlier for earlier, later in pairwise(bounds))
    assert 30 + longest < REMOVED_WITHIN_S


def test_full_sweeps_are_ten_minutes_apart(clocks: Clocks) -> None:
    """The first full sweep is due at once, later ones every ten minutes."""
    sweeps = clocks.run(1201)

    assert [20 * number for number, sweep in enumerate(sweeps) if sweep.is_full] == [0, 600, 1200]


def test_clock_that_jumps_forward_for_a_while_deletes_nothing_early(clocks: Clocks) -> None:
    """A clock that is briefly ahead deletes no other worker's sessions.

    A lasting change is accepted after ten minutes.
    """
    clocks.run(100)
    clocks.ahead_s = 86_400
    for sweep in clocks.run(500):
        assert sweep.expired_before <= START + clocks.passed_s - 30
    clocks.ahead_s = 0
    clocks.run(700)
    clocks.ahead_s = 86_400

    sweeps = clocks.run(700)

    assert sweeps[0].expired_before < START + clocks.passed_s < sweeps[-1].expired_before


def test_clock_that_is_set_back_is_believed_at_once(clocks: Clocks) -> None:
    clocks.run(100)
    clocks.ahead_s = -3600

    assert clocks.run(1)[0].expired_before == START + 100 - 3600 - 30


def test_thread_expires_and_sweeps_again_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(expiry, "INTERVAL_S", 0.001)
    expiries: list[int] = []
    sweeps: list[Sweep] = []

    def expire() -> None:
        expiries.append(len(expiries))
        if len(expiries) == 1:
            raise KeyError("session")

    def sweep(expired_before: int, *, is_full: bool) -> None:
        sweeps.append(Sweep(expired_before, is_full))

    known: Any = SimpleNamespace(sweep=sweep)
    thread = ExpiryThread(expire, known, lambda: START)
    wait_until(lambda: len(expiries) > 2, "sessions are expired again")
    thread.stop()

    assert sweeps[0].is_full
    assert sweeps[0].expired_before == pytest.approx(START - 30, abs=1)
    assert "sessions could not be expired" in caplog.text
