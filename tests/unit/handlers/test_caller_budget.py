"""A caller's share of a journal's budget: on every store, through a worker, and its effect on other callers."""

import random
import time
from typing import Any

import pytest
from PIL import Image

from handlers.journal.event import Event
from handlers.journal.journal import ANYONE, JournalFull, OwnerFull, owner_key
from handlers.settings.journal import JournalSettings
from tests.torchserve.drawings import data_url
from tests.unit.handlers.journal_stores import CLOSE, Store, new_id, turn

ALICE, BOB = owner_key("llava", "alice"), owner_key("llava", "bob")
SHARE = 200_000
SHORT = {"parameters": {"max_new_tokens": 12}}


def picture_of(sid: str) -> bytes:
    """Return 120,000 bytes that no other session has."""
    return sid.encode().ljust(120_000, b"x")


def noise() -> str:
    """Return the address of an image of about 19,000 bytes."""
    return data_url(Image.frombytes("RGB", (80, 80), random.Random(0).randbytes(80 * 80 * 3)))


def open_session(journal: Any, owner: str, picture: bytes, lives_s: int = 3600) -> str:
    sid = new_id(lives_s)
    name = journal.put_image(sid, picture, owner)
    journal.append(sid, 0, Event(kind="open", images=(name,)), owner)
    return sid


def is_full(journal: Any, owner: str) -> bool:
    try:
        journal.check_room(owner)
    except OwnerFull:
        return True
    return False


def test_a_caller_has_room_up_to_its_share(store: Store) -> None:
    """A full share affects neither other callers nor turns; a close makes room."""
    journal = store.reopened(max_caller_bytes=SHARE)
    first, _ = (open_session(journal, ALICE, picture_of(str(number))) for number in range(2))
    open_session(journal, ANYONE, picture_of("anyone"))

    with pytest.raises(OwnerFull, match=r"one caller's may hold 200000 \(journal\.max_caller_bytes\)"):
        journal.check_room(ALICE)
    journal.check_room(BOB)
    journal.check_room(ANYONE)
    journal.append(first, 1, turn("still written"), ALICE)
    journal.put_image(first, b"still stored", ALICE)
    journal.close(first, CLOSE)

    journal.check_room(ALICE)


def test_a_shared_image_counts_once(store: Store) -> None:
    """A shared image counts once, also after a measurement, until its last session closes."""
    journal, other = store.reopened(max_caller_bytes=SHARE), store.reopened(max_caller_bytes=SHARE)
    sessions = [open_session(journal, ALICE, picture_of("all")) for _ in range(4)]
    more = picture_of("more")

    def sweep() -> None:
        for each in (journal, other):
            each.sweep(int(time.time()), is_full=True)

    assert not is_full(journal, ALICE)
    sweep()
    assert not is_full(journal, ALICE)
    sessions.append(open_session(journal, ALICE, more))
    assert is_full(journal, ALICE)
    sweep()
    assert [is_full(each, ALICE) for each in (journal, other)] == [True, True]
    for sid in sessions[:4]:
        journal.close(sid, CLOSE)
    assert not is_full(journal, ALICE)
    sweep()
    assert not is_full(other, ALICE)


def test_another_instance_learns_the_share_and_its_end(store: Store) -> None:
    """Another instance counts what was written elsewhere, and has room again a minute after the first expiry."""
    journal, other = (store.reopened(max_caller_bytes=SHARE) for _ in range(2))
    now = int(time.time())
    sessions = [open_session(journal, ALICE, picture_of(str(lives_s)), lives_s) for lives_s in (600, 7200)]
    expires_at = int(sessions[0].split("-")[3], 16)
    assert not is_full(other, ALICE)

    other.sweep(now, is_full=True)

    for each in (journal, other):
        with pytest.raises(JournalFull) as caught:
            each.check_room(ALICE)
        assert abs((caught.value.room_at or 0) - expires_at - 60) <= 1  # Valkey counts seconds that are left
        each.sweep(expires_at - 5, is_full=False)
        assert is_full(each, ALICE)
        each.sweep(expires_at + 5, is_full=False)
        assert not is_full(each, ALICE)


def test_a_worker_refuses_openings_of_a_caller_with_a_full_share(make_client: Any, store: Store) -> None:
    """The error names the budget and says when there is room. Turns go on, other callers open, a close makes room."""
    client = make_client(journal=store.reopened(max_caller_bytes=15_000))
    alice, bob = ({"x-torchmoor-principal": name} for name in ("alice", "bob"))
    opening = {"type": "start_session", "image": noise()}
    sid = client.call(opening, alice).json["session_id"]

    refused = client.call(opening, alice)

    assert (refused.status, refused.error) == (429, "CallerBudgetReached")
    assert "journal.max_caller_bytes" in refused.json["error"]["message"]
    assert refused.headers["Retry-After"] == "3660"
    assert client.ask(sid, "what is it?", headers=alice, **SHORT).wait().status == 200
    assert client.call(opening, bob).status == 200
    assert client.call(opening).status == 200
    assert client.service.numbers()["journal"]["refusals"] == 1
    assert client.call({"type": "close_session", "session_id": sid}, alice).status == 200
    assert client.call(opening, alice).status == 200


def test_client_addresses_have_shares_without_keys(make_client: Any, store: Store) -> None:
    """Without keys a caller is the client address from the proxy.

    A session continued from another address keeps its share.
    """
    client = make_client(journal=store.reopened(max_caller_bytes=15_000))
    one, two = ({"x-torchmoor-source": address} for address in ("192.0.2.1", "192.0.2.2"))
    opening = {"type": "start_session", "image": noise()}
    sid = client.call(opening, one).json["session_id"]

    assert client.call(opening, one).error == "CallerBudgetReached"
    assert client.call(opening, two).status == 200
    assert client.ask(sid, "what is it?", headers=two, **SHORT).wait().status == 200


def test_no_limit(store: Store) -> None:
    """0 switches the budget off."""
    journal = store.reopened(max_caller_bytes=0)
    open_session(journal, ALICE, picture_of("one"))

    journal.check_room(ALICE)
    assert JournalSettings().max_caller_bytes == 25 << 30
