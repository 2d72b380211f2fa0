"""The number of sessions in a journal, on every store, and measurements during concurrent changes."""

import time
from typing import Any

import pytest

from handlers.journal import redis_connection
from handlers.journal import s3 as s3_journal
from handlers.journal.budget import Budget
from handlers.journal.event import Event
from handlers.journal.journal import ANYONE, Journal, JournalFull, OwnerFull, owner_key
from handlers.settings.journal import JournalSettings
from tests.unit.handlers.journal_stores import CLOSE, Store, new_id, turn

ALICE = owner_key("llava", "alice")


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
    other.check_room(ALICE)

    for each in (journal, other):
        each.sweep(int(time.time()), is_full=True)
        with pytest.raises(
            JournalFull, match=r"3 open sessions, the most it may have \(journal\.max_sessions\)"
        ) as full:
            each.check_room(ALICE)
        assert full.value.room_at == expires_at + 60
    for _ in range(2):
        journal.close(sessions[1], CLOSE)
    assert journal.num_sessions == 2
    journal.delete(sessions[2])
    assert journal.num_sessions == 1
    other.sweep(int(time.time()), is_full=True)
    assert other.num_sessions == 1
    other.sweep(expires_at + 5, is_full=False)

    assert other.num_sessions == 0


def test_a_worker_refuses_openings_beyond_the_number(make_client: Any, store: Store) -> None:
    """Openings beyond the number are refused, the metrics count open sessions, and a close makes room."""
    client = make_client(journal=store.reopened(max_sessions=1))
    sid = client.open()

    refused = client.call({"requestType": "NEW_SESSION"})

    assert (refused.status, refused.error, refused.headers["Retry-After"]) == (429, "Overloaded", "3660")
    assert "journal.max_sessions" in refused.json["error"]["message"]
    assert client.service.numbers()["journal"]["sessions"] == 1
    client.call({"type": "close_session", "session_id": sid})
    client.open()


def is_full(journal: Journal, owner: str, setting: str) -> bool:
    try:
        journal.check_room(owner)
    except JournalFull as full:
        return not isinstance(full, OwnerFull) and f"(journal.{setting})" in str(full)
    return False


@pytest.mark.parametrize(("setting", "limit"), [("max_sessions", 2), ("max_endpoint_bytes", 150_000)])
def test_an_endpoint_cannot_fill_the_journal_for_others(store: Store, setting: str, limit: int) -> None:
    """All callers of an endpoint share its budget, also on an instance that opened none of the sessions."""
    journal, other = (store.reopened(**{setting: limit}) for _ in range(2))
    here, there = owner_key("llava", ""), owner_key("llm", "alice")

    def open_large(owner: str) -> str:
        sid = new_id()
        name = journal.put_image(sid, sid.encode().ljust(120_000, b"x"), owner)
        journal.append(sid, 0, Event(kind="open", images=(name,)), owner)
        return sid

    first = open_large(ALICE)
    assert not is_full(journal, here, setting)
    open_large(here)
    other.sweep(int(time.time()), is_full=True)

    for each in (journal, other):
        assert [is_full(each, owner, setting) for owner in (ALICE, here, there, ANYONE)] == [True, True, False, False]
    journal.append(first, 1, turn("still written"), ALICE)
    journal.close(first, CLOSE)
    assert not is_full(journal, here, setting)


def test_a_worker_of_two_endpoints_refuses_openings_of_the_full_one(make_client: Any, store: Store) -> None:
    """Openings of the full endpoint are refused and its turns continue.

    Anonymous callers count for the endpoint they use.
    """
    client = make_client(journal=store.reopened(max_sessions=1))
    full, other = ({"x-torchmoor-endpoint": name} for name in ("llava", "llava-2"))
    opening = {"requestType": "NEW_SESSION"}
    sid = client.call(opening, full).json["session_id"]

    refused = client.call(opening, full)

    assert (refused.status, refused.error, refused.headers["Retry-After"]) == (429, "Overloaded", "3660")
    assert "journal.max_sessions" in refused.json["error"]["message"]
    assert client.call(opening, other).status == 200
    assert client.ask(sid, "what?", headers=full, parameters={"max_new_tokens": 4}).wait().status == 200


def test_no_limit() -> None:
    """0 switches a budget off."""
    budget = Budget(JournalSettings(max_sessions=0, max_endpoint_bytes=0))
    budget.add(ANYONE, 1, 1, 1)

    budget.check(ANYONE)
    assert (JournalSettings().max_sessions, JournalSettings().max_endpoint_bytes) == (1_000_000, 100 << 30)


def test_a_measurement_keeps_what_is_written_meanwhile() -> None:
    """Sessions that are written or closed during a measurement count once, also after the next measurement."""
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
    """A session that opens behind the position of a measurement is counted."""
    monkeypatch.setattr(s3_journal, "MAX_MEASURED", 1)
    journal = store.reopened()
    open_session(store.journal, 7200)
    journal.sweep(int(time.time()), is_full=True)

    open_session(journal, 600)
    for _ in range(5):
        journal.sweep(int(time.time()), is_full=False)

    assert journal.num_sessions == 2


@pytest.mark.parametrize("store", [pytest.param("valkey", marks=pytest.mark.redis)], indirect=True)
def test_a_scan_that_repeats_keys_counts_them_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that the server's scan returns twice counts once."""
    sid = open_session(store.journal, owner=ALICE)
    store.journal.put_image(sid, b"a picture", ALICE)
    store.journal.sweep(int(time.time()), is_full=True)
    once = store.journal.used_bytes
    scan, cursors = redis_connection.RedisConnection.scan, iter([1, 2, 0])

    def repeat(connection: Any, cursor: int, pattern: str) -> tuple[int, list[str]]:
        _, keys = scan(connection, 0, pattern)
        return next(cursors), keys * 2

    monkeypatch.setattr(redis_connection.RedisConnection, "scan", repeat)
    store.journal.sweep(int(time.time()), is_full=True)

    assert (store.journal.used_bytes, store.journal.num_sessions) == (once, 1)
