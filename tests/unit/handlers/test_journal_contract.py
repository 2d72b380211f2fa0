"""What every journal must do, on every store: a directory, Valkey, a Valkey cluster, S3."""

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from handlers.journal import directory_lists, redis, redis_connection, s3, s3_objects
from handlers.journal.codec import EventCodec
from handlers.journal.event import DamagedRecord, Event, EventTooLarge, image_hash
from handlers.journal.journal import (
    ANYONE,
    NO_KEYS,
    EventTaken,
    Journal,
    JournalClosed,
    JournalFull,
    OwnerFull,
    expiry,
    owner_key,
)
from handlers.journal.url import open_journal
from handlers.settings.journal import JournalSettings
from tests.unit.handlers.journal_stores import CLOSE, HOURS_S, Store, new_id, turn
from tests.waiting import wait_until

SECRET = "text that must not remain in the store"

# Sequential operations


def test_events_come_back_in_order(store: Store) -> None:
    """Events are read in order from any number on, at most as many as requested; another session has none of them."""
    sid = new_id()
    events = [Event(kind="open", images=("0" * 64,)), *(turn(f"{i} \u00e9\n\U0001f600") for i in range(20))]
    for number, event in enumerate(events):
        store.journal.append(sid, number, event, ANYONE)

    assert store.journal.read(sid) == events
    assert store.reopened().read(sid, 1) == events[1:]
    assert store.journal.read(sid, 20) == events[20:]
    assert store.journal.read(sid, 21) == []
    assert store.journal.read(sid, 3, 10) == events[3:13]
    assert store.journal.read(sid, 20, 10) == events[20:]
    assert store.journal.read(sid, max_events=0) == []
    assert store.journal.read(new_id()) == []


def test_a_number_is_taken_once(store: Store) -> None:
    """A second writer of a number gets a conflict, even with equal content; the stored event stays."""
    sid = new_id()
    store.journal.append(sid, 0, turn("first"), ANYONE)

    for text in ("second", "first"):
        with pytest.raises(EventTaken):
            store.reopened().append(sid, 0, turn(text), ANYONE)

    assert [event.answer for event in store.journal.read(sid)] == ["first"]


def test_an_event_may_be_written_again(store: Store) -> None:
    """A writer that got no confirmation writes it again: the store keeps it once and reports no conflict."""
    sid, event = new_id(), turn("once")

    store.journal.append(sid, 0, event, ANYONE)
    store.journal.append(sid, 0, event, ANYONE)

    assert store.journal.read(sid) == [event]


def test_images_are_kept_by_their_hash(store: Store) -> None:
    """The store returns any bytes unchanged and keeps equal ones once; a name that is not a hash reads nothing."""
    sid = new_id()
    for data in (bytes(range(256)) * 4096, b"closed", b"x"):
        name = store.journal.put_image(sid, data, ANYONE)

        assert name == store.journal.put_image(sid, data, ANYONE) == image_hash(data)
        assert store.reopened().get_image(sid, name) == data
    for missing in ("0" * 64, "../../etc/passwd", ""):
        with pytest.raises(FileNotFoundError):
            store.journal.get_image(sid, missing)
    with pytest.raises(FileNotFoundError):
        store.journal.get_image(new_id(), name)


@pytest.mark.parametrize("bad", ["..", "a/b", "", "ts-seq-", "claims"])
def test_what_is_no_session_id_is_refused(store: Store, bad: str) -> None:
    """What is not a session id is refused, and never becomes a path or a key."""
    for action in (store.journal.read, lambda sid: store.journal.close(sid, CLOSE), store.journal.delete):
        with pytest.raises(ValueError, match="session id"):
            action(bad)
    for write in (
        lambda: store.journal.append(bad, 0, turn("a"), ANYONE),
        lambda: store.journal.put_image(bad, b"x", ANYONE),
    ):
        with pytest.raises(ValueError, match="session id"):
            write()


def test_close_deletes_all_but_the_fact(store: Store) -> None:
    """A close deletes questions and images and keeps the fact of the close, which every reader learns."""
    sid = new_id()
    for number in range(12):
        store.journal.append(sid, number, turn(SECRET), ANYONE)
    store.journal.put_image(sid, SECRET.encode(), ANYONE)

    store.journal.close(sid, CLOSE)
    store.reopened().close(sid, CLOSE)

    for seen in (0, 5, 11, 12):
        assert store.journal.read(sid, seen) == [CLOSE]
    assert store.journal.read(sid, max_events=1) == [CLOSE]
    assert SECRET.encode() not in store.dump()


def test_nothing_is_written_after_a_close(store: Store) -> None:
    """A turn that was still running on another worker leaves nothing of a closed session in the store."""
    sid = new_id()
    store.journal.append(sid, 0, Event(kind="open"), ANYONE)
    store.journal.append(sid, 1, turn("seen by all"), ANYONE)
    store.reopened().close(sid, CLOSE)

    for number in (0, 1, 2):
        with pytest.raises(JournalClosed):
            store.journal.append(sid, number, turn(SECRET), ANYONE)
    with pytest.raises(JournalClosed):
        store.journal.put_image(sid, SECRET.encode(), ANYONE)

    assert SECRET.encode() not in store.dump()
    assert store.journal.read(sid, 2) == [CLOSE]


def test_a_session_without_events_can_be_closed(store: Store) -> None:
    """Closing a session without events makes its opening fail, which may be in progress elsewhere."""
    sid = new_id()

    store.journal.close(sid, CLOSE)

    assert store.journal.read(sid) == [CLOSE]
    with pytest.raises(JournalClosed):
        store.journal.append(sid, 0, Event(kind="open"), ANYONE)


def test_the_first_close_counts(store: Store) -> None:
    """Each later close, also a repeated one, and each reader learns which request closed first."""
    sid = new_id()
    store.journal.append(sid, 0, turn("a"), ANYONE)
    first = Event(kind="close", invocation_id="c1")

    returned = [
        store.journal.close(sid, first),
        store.reopened().close(sid, Event(kind="close", invocation_id="c2")),
        store.journal.close(sid, first),
    ]

    assert [event.nonce for event in returned] == [first.nonce] * 3
    assert [event.invocation_id for event in store.journal.read(sid)] == ["c1"]


def test_of_closes_at_once_one_is_first(store: Store) -> None:
    """Six instances that close a session concurrently all name the same one as the first."""
    sid, barrier = new_id(), threading.Barrier(6)
    store.journal.append(sid, 0, turn("a"), ANYONE)
    journals = {name: store.reopened() for name in "abcdef"}

    def close(name: str) -> str:
        barrier.wait(20)
        return journals[name].close(sid, Event(kind="close", invocation_id=name)).invocation_id

    with ThreadPoolExecutor(6) as pool:
        named = set(pool.map(close, journals))

    (winner,) = named
    assert [event.invocation_id for event in store.journal.read(sid)] == [winner]


@pytest.mark.parametrize("poison", ["type", "utf-8", "size", "owner"])
def test_a_damaged_event_is_refused(store: Store, poison: str) -> None:
    """An event that is too large, malformed or of another session is an error and is never skipped."""
    sid, journal = new_id(), store.reopened(max_event_bytes=1000)
    owned = EventCodec(JournalSettings(), NO_KEYS).encode(Event(kind="open"), new_id())
    data = {"type": b"[]", "utf-8": b"\xff", "size": b"{" * 2000, "owner": owned}[poison]
    journal.append(sid, 0, Event(kind="open"), ANYONE)
    assert len(journal.read(sid)) == 1

    store.poison(sid, "events", data)

    for max_events in (None, 1):
        with pytest.raises(DamagedRecord):
            journal.read(sid, max_events=max_events)


def test_a_large_image_is_refused(store: Store) -> None:
    """Of two images that another program replaced, one is as large as allowed and one is larger."""
    sid, journal = new_id(), store.reopened(max_image_bytes=1000)
    name = journal.put_image(sid, b"png", ANYONE)
    assert journal.get_image(sid, name) == b"png"

    store.poison(sid, "images", b"x" * 1000)
    with pytest.raises(OSError, match="is damaged"):
        journal.get_image(sid, name)
    store.poison(sid, "images", b"x" * 1001)
    with pytest.raises(DamagedRecord):
        journal.get_image(sid, name)


def test_an_event_that_is_too_large_is_not_written(store: Store) -> None:
    sid, journal = new_id(), store.reopened(max_event_bytes=1000)

    with pytest.raises(EventTooLarge, match="over 1000"):
        journal.append(sid, 0, turn("x" * 500), ANYONE)
    journal.append(sid, 0, turn("x" * 100), ANYONE)

    assert [event.answer for event in journal.read(sid)] == ["x" * 100]


def test_delete_leaves_nothing(store: Store) -> None:
    """A delete removes everything, and accepts a session that does not exist."""
    sid = new_id()
    store.journal.append(sid, 0, turn(SECRET), ANYONE)
    store.journal.put_image(sid, SECRET.encode(), ANYONE)

    store.journal.delete(sid)
    store.journal.delete(sid)

    assert sid.encode() not in store.dump()
    assert store.journal.read(sid) == []


def test_sessions_are_counted_from_their_first_event_on(store: Store) -> None:
    """A session is counted from its first event until it is deleted or closed.

    A new measurement gives the same count.
    """
    before = store.journal.num_sessions
    first, second = new_id(), new_id()
    for sid in (first, second):
        for number in range(3):
            store.journal.append(sid, number, turn("x"), ANYONE)
    assert store.journal.num_sessions == before + 2

    store.journal.delete(first)
    assert store.journal.num_sessions == before + 1
    store.journal.sweep(int(time.time()), is_full=True)
    assert store.journal.num_sessions == before + 1
    store.journal.delete(second)
    assert store.journal.num_sessions == before


def test_what_has_expired_goes(store: Store) -> None:
    """An expired session, and the marker of a closed one, are deleted; others stay."""
    over, closed, open_ = new_id(lives_s=600), new_id(lives_s=600), new_id(lives_s=86_400)
    journal = open_journal(JournalSettings(url=store.url), tombstone_s=1)
    for sid in (over, closed, open_):
        journal.append(sid, 0, turn("a"), ANYONE)
        journal.put_image(sid, b"png", ANYONE)
        journal.put_image(sid, sid.encode(), ANYONE)
    journal.close(closed, CLOSE)
    assert journal.read(over)

    store.pass_time(HOURS_S)
    wait_until(
        lambda: all(sid.encode() not in sweep_and_dump(journal, store) for sid in (over, closed)),
        "both are gone",
        interval_s=0.1,
    )

    assert journal.read(over) == journal.read(closed) == []
    assert len(journal.read(open_)) == 1
    assert journal.get_image(open_, image_hash(b"png")) == b"png"


def test_what_has_expired_goes_without_a_full_sweep(store: Store) -> None:
    """Expired sessions, also of another instance, are deleted between two full sweeps; others stay."""
    now, name = int(time.time()), str(uuid4())
    journal, other = store.journal, store.reopened()
    before, over, open_ = new_id(lives_s=600), new_id(lives_s=600), new_id(lives_s=86_400)
    other.append(before, 0, turn("a"), ANYONE)
    journal.sweep(now, is_full=True)
    for sid in (over, open_):
        journal.append(sid, 0, turn("a"), ANYONE)
        journal.put_image(sid, sid.encode(), ANYONE)
    assert journal.claim(name, "one") == "one"
    store.pass_time(660)

    def what_is_left() -> bytes:
        journal.sweep(expiry(over) + 30, is_full=False)
        return store.dump()

    wait_until(
        lambda: all(sid.encode() not in what_is_left() for sid in (before, over)), "both are gone", interval_s=0.1
    )
    assert len(journal.read(open_)) == 1
    assert journal.claim(name, "two") == "one"


def test_sessions_are_listed_page_by_page(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each session is on one page; other names in the store are not returned as ids."""
    monkeypatch.setattr(s3_objects, "PAGE", 2)
    monkeypatch.setattr(redis_connection, "SCANNED", 2)
    ids = {new_id() for _ in range(7)}
    for sid in ids:
        for number in range(3):
            store.journal.append(sid, number, turn("a"), ANYONE)
        store.journal.put_image(sid, b"png", ANYONE)
    store.journal.claim("a", "b")

    found: list[str] = []
    cursor, is_last = "", False
    while not is_last:
        page, cursor = store.journal.list_ids(cursor)
        found += page
        is_last = not cursor

    assert set(found) == ids


def test_the_first_claim_counts(store: Store) -> None:
    """A later claim of a name returns the first one's value.

    Other names are free, and a stored name is not readable.
    """
    name = f"{SECRET} {uuid4()}"

    assert store.journal.claim(name, "one") == "one"
    assert store.journal.claim(name, "one") == "one"
    assert store.reopened().claim(name, "two") == "one"
    assert store.journal.claim(name + " ", "two") == "two"

    assert SECRET.encode() not in store.dump()


def test_claims_are_forgotten(store: Store) -> None:
    """A claim is forgotten when its time is over, and not before."""
    journal, name = store.reopened(claim_s=600), str(uuid4())
    assert journal.claim(name, "one") == "one"
    assert journal.claim(name, "two") == "one"

    store.pass_time(HOURS_S)
    wait_until(lambda: sweep_and_dump(journal, store) == b"", "nothing is left", interval_s=0.1)

    assert journal.claim(name, "two") == "two"


def sweep_and_dump(journal: Journal, store: Store) -> bytes:
    """Return what a sweep leaves after hours have passed; Valkey expires keys without a sweep."""
    journal.sweep(int(time.time()) + HOURS_S, is_full=True)
    return store.dump()


# At once


def test_of_many_writers_one_has_a_number(store: Store) -> None:
    """Six instances race for the same five numbers; each number has one winner, and a reader sees that one's."""
    sid, barrier = new_id(), threading.Barrier(6)
    journals = {name: store.reopened() for name in "abcdef"}

    def race(name: str) -> list[int]:
        won = []
        for number in range(5):
            barrier.wait(20)
            try:
                journals[name].append(sid, number, turn(name), ANYONE)
                won.append(number)
            except EventTaken:
                pass
        return won

    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(race, journals))

    assert sorted(number for numbers in won for number in numbers) == list(range(5))
    winners = {number: name for name, numbers in zip(journals, won, strict=True) for number in numbers}
    assert [event.answer for event in store.journal.read(sid)] == [winners[number] for number in range(5)]


RACE = """
import json, sys
from handlers.journal.event import Event
from handlers.journal.journal import ANYONE, EventTaken
from handlers.journal.url import open_journal
from handlers.settings.journal import JournalSettings
url, sid, name = sys.argv[1:]
journal, won = open_journal(JournalSettings(url=url), 3600), []
print("ready", flush=True)
sys.stdin.readline()
for number in range(12):
    try:
        journal.append(sid, number, Event(kind="turn", answer=name), ANYONE)
        won.append(number)
    except EventTaken:
        pass
print(json.dumps(won))
"""


def test_of_several_processes_one_has_a_number(store: Store) -> None:
    """Several processes race for numbers, as on different machines, synchronised only by the store."""
    sid = new_id()
    command = [sys.executable, "-c", RACE, store.url, sid]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, name], **pipes) for name in "abc"]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        won = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()

    assert sorted(number for numbers in won for number in numbers) == list(range(12))
    assert len(store.journal.read(sid)) == 12


def test_a_close_and_turns_at_once(store: Store) -> None:
    """A concurrent close deletes turns that were recorded before it and makes later ones fail."""
    for num_recorded in (0, 5):
        sid = new_id()
        journals = [store.reopened() for _ in range(3)]
        barrier = threading.Barrier(4)

        recorded = threading.Semaphore(0)

        def talk(
            journal: Journal,
            sid: str = sid,
            barrier: threading.Barrier = barrier,
            recorded: threading.Semaphore = recorded,
        ) -> int:
            number = 0
            barrier.wait(20)
            while True:
                try:
                    journal.put_image(sid, f"{SECRET} {number}".encode(), ANYONE)
                    journal.append(sid, number, turn(SECRET), ANYONE)
                    recorded.release()
                except EventTaken:
                    pass
                except JournalClosed:
                    return number
                if journal.read(sid, number, 1) == [CLOSE]:
                    return number
                number += 1

        with ThreadPoolExecutor(3) as pool:
            talking = [pool.submit(talk, journal) for journal in journals]
            barrier.wait(20)
            for _ in range(num_recorded):
                assert recorded.acquire(timeout=30)
            store.journal.close(sid, CLOSE)
            seen = [future.result(30) for future in talking]

        assert SECRET.encode() not in store.dump()
        for number in seen:
            assert store.journal.read(sid, number) == [CLOSE]


def test_claims_at_once(store: Store) -> None:
    """Of eight claims of a name one counts, and all return its value."""
    name, barrier = str(uuid4()), threading.Barrier(8)

    def claim(value: str) -> str:
        barrier.wait(20)
        return store.journal.claim(name, value)

    with ThreadPoolExecutor(8) as pool:
        told = set(pool.map(claim, "abcdefgh"))

    assert len(told) == 1


OPERATIONS = st.tuples(st.sampled_from(("append", "append", "read", "put_image", "get_image", "close")), st.booleans())


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(OPERATIONS, max_size=14))
def test_any_order_of_operations(store: Store, operations: list[tuple[str, bool]]) -> None:
    """Two instances, with their own views of a session, get the results of an in-memory list and flag."""
    sid, events, is_closed, has_image = new_id(), [], False, False
    instances = (store.journal, store.reopened())
    seen = [0, 0]
    for number, (operation, is_second) in enumerate(operations):
        journal = instances[is_second]
        if operation == "append":
            event = turn(str(number))
            if is_closed:
                with pytest.raises(JournalClosed):
                    journal.append(sid, seen[is_second], event, ANYONE)
            elif seen[is_second] < len(events):
                with pytest.raises(EventTaken):
                    journal.append(sid, seen[is_second], event, ANYONE)
            else:
                journal.append(sid, seen[is_second], event, ANYONE)
                events.append(event)
                seen[is_second] += 1
        elif operation == "read":
            assert journal.read(sid, seen[is_second]) == ([CLOSE] if is_closed else events[seen[is_second] :])
            seen[is_second] = len(events)
        elif operation == "put_image" and is_closed:
            with pytest.raises(JournalClosed):
                journal.put_image(sid, b"png", ANYONE)
        elif operation == "put_image":
            has_image = bool(journal.put_image(sid, b"png", ANYONE))
        elif operation == "get_image" and has_image and not is_closed:
            assert journal.get_image(sid, image_hash(b"png")) == b"png"
        elif operation == "get_image":
            with pytest.raises(FileNotFoundError):
                journal.get_image(sid, image_hash(b"png"))
        else:
            journal.close(sid, CLOSE)
            is_closed = True


# KV caches


def test_parts_of_a_kv_cache_are_kept_by_number(store: Store) -> None:
    """A later part replaces an earlier one with its number; a reader gets the parts up to the first missing one."""
    journal = store.reopened(max_kv_bytes=1 << 20)
    sid = new_id()
    journal.append(sid, 0, Event(kind="open"), ANYONE)
    for number, data in ((0, b"zero"), (1, b"old"), (3, b"three"), (1, b"one")):
        assert journal.put_kv(sid, number, data, ANYONE)

    assert store.journal.read_kv(sid, 0, 8, 100) == [b"zero", b"one"]
    assert store.journal.read_kv(sid, 1, 1, 100) == [b"one"]
    assert store.journal.read_kv(sid, 3, 2, 100) == [b"three"]
    assert store.journal.read_kv(new_id(), 0, 2, 100) == []
    assert store.journal.read(sid) == [Event(kind="open")]
    with pytest.raises(DamagedRecord):
        store.journal.read_kv(sid, 3, 1, 4)


def test_a_kv_cache_goes_with_its_session(store: Store) -> None:
    """Close and delete remove a session's KV cache, and later parts are not written."""
    journal = store.reopened(max_kv_bytes=1 << 20)
    for end in (lambda sid: store.journal.close(sid, CLOSE), store.journal.delete):
        sid = new_id()
        journal.append(sid, 0, Event(kind="open"), ANYONE)
        assert journal.put_kv(sid, 0, SECRET.encode(), ANYONE)

        end(sid)

        assert SECRET.encode() not in store.dump()
        assert store.journal.read_kv(sid, 0, 1, 100) == []
    sid = new_id()
    journal.append(sid, 0, Event(kind="open"), ANYONE)
    journal.close(sid, CLOSE)
    assert not journal.put_kv(sid, 0, SECRET.encode(), ANYONE)
    assert SECRET.encode() not in store.dump()


def test_kv_caches_have_a_budget_of_their_own(store: Store) -> None:
    """A part beyond the budget is not written.

    Ended sessions free room, and openings are never refused because of it.
    """
    journal = store.reopened(max_kv_bytes=40_000, max_bytes=30_000, max_endpoint_bytes=30_000, max_caller_bytes=30_000)
    sids = [new_id(), new_id()]
    for sid in sids:
        journal.append(sid, 0, Event(kind="open"), ANYONE)
    assert journal.put_kv(sids[0], 0, bytes(30_000), ANYONE)

    with pytest.raises(JournalFull):
        journal.put_kv(sids[1], 0, bytes(30_000), ANYONE)
    with pytest.raises(JournalFull):
        store.journal.put_kv(sids[1], 0, b"off", ANYONE)
    journal.check_room(ANYONE)
    journal.sweep(int(time.time()) - HOURS_S, is_full=True)
    with pytest.raises(JournalFull):
        journal.put_kv(sids[1], 0, bytes(30_000), ANYONE)
    assert journal.read_kv(sids[1], 0, 1, 100_000) == []
    journal.check_room(ANYONE)
    journal.close(sids[0], CLOSE)
    assert journal.put_kv(sids[1], 0, bytes(30_000), ANYONE)


@pytest.mark.parametrize("share", [{"max_kv_bytes": 80_000}, {"max_kv_bytes": 200_000, "max_caller_kv_bytes": 40_000}])
def test_each_owner_has_a_budget_for_kv_caches(store: Store, share: dict[str, int]) -> None:
    """An owner may use half of the budget by default; other owners' caches and openings are not affected.

    A sweep measures the same, and another worker knows it after its own sweep.
    """
    journal, other = store.reopened(**share), store.reopened(**share)
    alice, bob = (owner_key("llava", name) for name in ("alice", "bob"))
    sids = {owner: new_id() for owner in (alice, bob, ANYONE)}
    for owner, sid in sids.items():
        journal.append(sid, 0, Event(kind="open"), owner)
    assert journal.put_kv(sids[alice], 0, bytes(30_000), alice)

    for worker in (journal, other):
        for _ in range(2):  # an S3 journal measures in steps
            worker.sweep(int(time.time()) - HOURS_S, is_full=True)
        with pytest.raises(OwnerFull):
            worker.put_kv(sids[alice], 1, bytes(30_000), alice)
    assert journal.read_kv(sids[alice], 1, 1, 100_000) == []
    journal.check_room(alice)
    assert journal.put_kv(sids[bob], 0, bytes(30_000), bob)
    journal.close(sids[alice], CLOSE)
    sid = new_id()
    journal.append(sid, 0, Event(kind="open"), alice)
    assert journal.put_kv(sid, 0, bytes(30_000), alice)


def test_callers_without_a_name_share_all_room_for_kv_caches(store: Store) -> None:
    journal = store.reopened(max_kv_bytes=80_000)
    sid = new_id()
    journal.append(sid, 0, Event(kind="open"), ANYONE)
    assert all(journal.put_kv(sid, number, bytes(30_000), ANYONE) for number in range(2))


def test_a_kv_cache_expires_with_its_session(store: Store) -> None:
    """A sweep deletes an expired session's KV cache, which then no longer counts."""
    journal = store.reopened(max_kv_bytes=40_000)
    sid = new_id(lives_s=600)
    journal.append(sid, 0, Event(kind="open"), ANYONE)
    assert journal.put_kv(sid, 0, SECRET.encode() * 500, ANYONE)

    store.pass_time(700)
    journal.sweep(int(time.time()) + 700, is_full=True)

    assert SECRET.encode() not in store.dump()
    other = new_id(lives_s=7200)
    journal.append(other, 0, Event(kind="open"), ANYONE)
    assert journal.put_kv(other, 0, bytes(30_000), ANYONE)


def test_each_owner_has_a_list(store: Store) -> None:
    """Another worker reads the list; adding twice adds once, and removing a missing id has no effect."""
    owners = [owner_key("llava", name) for name in ("alice", "bob")]
    sids = [new_id(600), new_id(900)]
    for sid in (*sids, sids[0]):
        store.journal.enlist(sid, "vision", owners[0])
    store.journal.enlist(sids[0], "user_data", owners[0])
    store.journal.enlist(new_id(), "vision", ANYONE)
    store.journal.delist(sids[0], "user_data", owners[0])
    store.journal.delist(new_id(), "vision", owners[0])

    listed = store.reopened().list_owned(owners[0])

    assert sorted(listed) == [(expiry(sid), sid, "vision") for sid in sids]
    assert store.journal.list_owned(owners[1]) == []
    assert len(store.journal.list_owned(ANYONE)) == 1
    for sid, label in (("../x", "vision"), (sids[0], "../x"), (sids[0], "")):
        with pytest.raises(ValueError, match="session id and a label"):
            store.journal.enlist(sid, label, ANYONE)
    with pytest.raises(ValueError, match="owner"):
        store.journal.list_owned("../x")


def test_expired_sessions_leave_their_list(store: Store) -> None:
    """The sweep removes them and keeps the others."""
    early, late = new_id(lives_s=600), new_id(lives_s=7200)
    for sid in (early, late):
        store.journal.enlist(sid, "vision", ANYONE)

    store.pass_time(700)
    store.journal.enlist(late, "vision", ANYONE)
    store.journal.sweep(int(time.time()) + 700, is_full=True)

    # Redis goes by the score, from which the test has taken the time.
    assert [listed.session_id for listed in store.journal.list_owned(ANYONE)] == [late]
    assert early.encode() not in store.dump()


def test_a_list_returns_a_limited_number(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list returns at most the requested number of ids: those that expire last."""
    for module in (directory_lists, redis, s3):
        monkeypatch.setattr(module, "MAX_LISTED", 2)
    sids = [new_id(lives_s) for lives_s in (300, 500, 400)]
    for sid in sids:
        store.journal.enlist(sid, "vision", ANYONE)

    assert sorted(listed.session_id for listed in store.journal.list_owned(ANYONE)) == sorted(sids[1:])
