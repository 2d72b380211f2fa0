"""How many sessions a journal has, on every store, and what a measurement makes of changes at the same time."""

import time
from typing import Any

import pytest

from handlers.journal import redis_scripts
from handlers.journal import s3 as s3_journal
from handlers.journal.budget import Budget
from handlers.journal.event import CLOSE, Event
from handlers.journal.journal import ANYONE, Journal, JournalFull, owner_key
from handlers.settings import JournalSettings
from tests.unit.handlers.journal_stores import Store, new_id, turn

ALICE = owner_key("alice")


def open_session(journal: Journal, lives_s: int = 3600, owner: str = ANYONE) -> str:
    sid = new_id(lives_s)
    journal.append(sid, 0, Event(kind="open"), owner)
    return sid


def test_a_journal_has_room_for_a_number_of_sessions(store: Store) -> None:
    """Closed, deleted and expired sessions count no longer, also where another instance measures the journal."""
    journal, other = (store.reopened(max_sessions=3) for _ in range(2))
    sessions = [open_session(journal, lives_s, ALICE) for lives_s in (600, 3600, 7200)]
    expires_at = int(sessions[0].split("-")[3], 16)
    journal.append(sessions[1], 1, turn("counts once"), ALICE)
    other.check_room()

    for each in (journal, other):
        each.sweep(int(time.time()))
        with pytest.raises(
            JournalFull, match=r"3 open sessions, the most it may have \(journal\.max_sessions\)"
        ) as full:
            each.check_room()
        assert full.value.room_at == expires_at + 60
    for _ in range(2):
        journal.close(sessions[1], CLOSE)
    assert journal.num_sessions == 2
    journal.delete(sessions[2])
    assert journal.num_sessions == 1
    other.sweep(int(time.time()))
    assert other.num_sessions == 1
    other.sweep(expires_at + 5, is_full=False)

    assert other.num_sessions == 0


def test_a_worker_refuses_openings_beyond_the_number(make_client: Any, store: Store) -> None:
    """The metrics count what is open; a close makes room."""
    client = make_client(journal=store.reopened(max_sessions=1))
    sid = client.open()

    refused = client.call({"requestType": "NEW_SESSION"})

    assert (refused.status, refused.error, refused.headers["Retry-After"]) == (429, "Overloaded", "3660")
    assert "journal.max_sessions" in refused.json["error"]["message"]
    assert client.service.numbers()["journal"]["sessions"] == 1
    client.call({"type": "close_session", "session_id": sid})
    client.open()


def test_no_limit() -> None:
    budget = Budget(JournalSettings(max_sessions=0))
    budget.add(ANYONE, 1, 1, 1)

    budget.check(ANYONE)


def test_a_measurement_keeps_what_is_written_meanwhile() -> None:
    """And what is closed meanwhile; the next measurement counts neither again."""
    budget = Budget(JournalSettings(max_caller_bytes=100))
    budget.add(ALICE, 5, 80, 2)
    measured = budget.begin_measurement()
    measured.add(ALICE, 5, 80, 2)
    budget.add(ALICE, 7, 60, 1)
    budget.add(ALICE, 5, -30, -1)

    budget.replace(measured)

    assert (budget.used_bytes, budget.num_sessions) == (110, 2)
    with pytest.raises(JournalFull, match=r"journal\.max_caller_bytes"):
        budget.check(ALICE)
    measured = budget.begin_measurement()
    measured.add(ALICE, 5, 50, 1)
    budget.replace(measured)
    assert (budget.used_bytes, budget.num_sessions) == (50, 1)


@pytest.mark.parametrize("store", [pytest.param("s3", marks=pytest.mark.s3)], indirect=True)
def test_a_session_that_opens_between_two_sweeps_of_one_measurement(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measurement has passed its place in the bucket."""
    monkeypatch.setattr(s3_journal, "MAX_MEASURED", 1)
    journal = store.reopened()
    open_session(store.journal, 7200)
    journal.sweep(int(time.time()))

    open_session(journal, 600)
    for _ in range(5):
        journal.sweep(int(time.time()), is_full=False)

    assert journal.num_sessions == 2


@pytest.mark.parametrize("store", [pytest.param("valkey", marks=pytest.mark.redis)], indirect=True)
def test_a_scan_that_repeats_keys_counts_them_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may return a key twice while its table of keys shrinks."""
    sid = open_session(store.journal, owner=ALICE)
    store.journal.put_image(sid, b"a picture", ALICE)
    store.journal.sweep(int(time.time()))
    once = store.journal.used_bytes
    scan, cursors = redis_scripts.RedisScripts.scan, iter([1, 2, 0])

    def repeat(scripts: Any, cursor: int, pattern: str) -> tuple[int, list[str]]:
        _, keys = scan(scripts, 0, pattern)
        return next(cursors), keys * 2

    monkeypatch.setattr(redis_scripts.RedisScripts, "scan", repeat)
    store.journal.sweep(int(time.time()))

    assert (store.journal.used_bytes, store.journal.num_sessions) == (once, 1)
