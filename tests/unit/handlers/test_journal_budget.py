"""A journal's directory with a budget: when it is full, new sessions are refused and open ones continue."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from handlers.journal.directory import DirectoryJournal
from handlers.journal.event import Event
from handlers.journal.journal import ANYONE, JournalFull
from handlers.settings.journal import JournalSettings
from tests.unit.handlers.journal_stores import CLOSE

SHORT = {"parameters": {"max_new_tokens": 12}}
BLOCK_BYTES = 4096
EXPIRES_AT = 1_795_243_945
ID = f"ts-seq-aaaaaaaaaaaaaaaa-{EXPIRES_AT:08x}-llava-0-k0aaaaaaaaaaaaaaaaaaaaaaaaaa"
OTHER_ID = f"ts-seq-bbbbbbbbbbbbbbbb-{EXPIRES_AT + 1000:08x}-llava-0-k0aaaaaaaaaaaaaaaaaaaaaaaaaa"


def make_journal(root: Path, **settings: int) -> DirectoryJournal:
    return DirectoryJournal(root / "journal", JournalSettings(**{"min_free_bytes": 0, **settings}))


def picture_of(sid: str) -> bytes:
    """Return 100,000 bytes that no other session has."""
    return sid.encode().ljust(100_000, b"x")


def test_a_directory_has_room_up_to_its_budget(tmp_path: Path) -> None:
    """What is written counts in whole blocks; closing a session makes room."""
    journal = make_journal(tmp_path, max_bytes=3 * BLOCK_BYTES)
    journal.append(ID, 0, Event(kind="open"), ANYONE)
    journal.put_image(ID, b"x" * (BLOCK_BYTES + 1), ANYONE)
    with pytest.raises(JournalFull, match="the most it may hold"):
        journal.check_room(ANYONE)
    journal.append(ID, 1, Event(kind="turn", question="still written"), ANYONE)

    journal.close(ID, CLOSE)

    journal.check_room(ANYONE)
    assert journal.used_bytes < 3 * BLOCK_BYTES


def test_a_sweep_measures_the_directory(tmp_path: Path) -> None:
    """A sweep counts what other workers wrote and what was there before; expired sessions free their space."""
    before = make_journal(tmp_path)
    for sid in (ID, OTHER_ID):
        before.append(sid, 0, Event(kind="open"), ANYONE)
        before.put_image(sid, picture_of(sid), ANYONE)
    journal = make_journal(tmp_path, max_bytes=150_000)

    journal.sweep(EXPIRES_AT - 1, is_full=True)
    with pytest.raises(JournalFull):
        journal.check_room(ANYONE)
    journal.sweep(EXPIRES_AT + 1, is_full=True)

    journal.check_room(ANYONE)
    assert 100_000 < journal.used_bytes < 150_000


@pytest.mark.parametrize("deleter", ["this worker", "another worker"])
def test_an_expired_session_frees_its_space_between_full_sweeps(tmp_path: Path, deleter: str) -> None:
    """An expired session stops counting whichever worker deletes it; an open one stays and counts."""
    other = make_journal(tmp_path)
    for sid in (ID, OTHER_ID):
        other.append(sid, 0, Event(kind="open"), ANYONE)
        other.put_image(sid, picture_of(sid), ANYONE)
    journal = make_journal(tmp_path, max_bytes=150_000)
    for each in (journal, other):
        each.sweep(EXPIRES_AT - 1, is_full=True)
    with pytest.raises(JournalFull) as caught:
        journal.check_room(ANYONE)
    assert caught.value.room_at == EXPIRES_AT + 60

    journal.sweep(EXPIRES_AT, is_full=False)
    assert len(journal.read(ID)) == 1
    if deleter == "another worker":
        other.sweep(EXPIRES_AT + 1, is_full=False)
    journal.sweep(EXPIRES_AT + 1, is_full=False)

    journal.check_room(ANYONE)
    assert 100_000 < journal.used_bytes < 150_000
    assert not (tmp_path / "journal" / ID).exists()
    assert len(journal.read(OTHER_ID)) == 1


@pytest.mark.parametrize("is_full", [True, False])
def test_expired_sessions_stop_counting_although_a_sweep_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    journal = make_journal(tmp_path)
    for sid in (ID, OTHER_ID):
        journal.append(sid, 0, Event(kind="open"), ANYONE)

    def fail(path: Path) -> Any:
        raise OSError("the disk does not answer")

    monkeypatch.setattr(Path, "iterdir", fail)
    monkeypatch.setattr(os, "listdir", fail)
    with pytest.raises(OSError, match="the disk") if is_full else nullcontext():
        journal.sweep(EXPIRES_AT + 1, is_full=is_full)

    assert journal.num_sessions == 1


def test_a_new_session_is_removed_before_the_next_full_sweep(tmp_path: Path) -> None:
    """A session that began after the last full sweep is removed, and so is a turn recorded after a session's end."""
    journal = make_journal(tmp_path)
    journal.sweep(EXPIRES_AT - 600, is_full=True)
    for number in range(2):
        journal.append(ID, number, Event(kind="turn"), ANYONE)
        assert journal.used_bytes == BLOCK_BYTES

        journal.sweep(EXPIRES_AT + 1, is_full=False)

        assert not (tmp_path / "journal" / ID).exists()
        assert journal.used_bytes == 0


def test_a_disk_keeps_free_space(tmp_path: Path) -> None:
    """A disk with less free space than configured takes no new session, whatever the journal itself uses."""
    make_journal(tmp_path, min_free_bytes=1).check_room(ANYONE)

    with pytest.raises(JournalFull, match="bytes left, too few"):
        make_journal(tmp_path, min_free_bytes=1 << 60).check_room(ANYONE)


def test_temporary_files_of_killed_workers_are_removed(tmp_path: Path) -> None:
    """A sweep deletes old ones, and leaves those that a worker may be writing."""
    journal = make_journal(tmp_path)
    journal.append(ID, 0, Event(kind="open"), ANYONE)
    old, new = (tmp_path / "journal" / ID / name for name in (".0123456789abcdef", ".fedcba9876543210"))
    for path, age_s in ((old, 700), (new, 500)):
        path.write_bytes(b"half")
        written_at = path.stat().st_mtime - age_s
        os.utime(path, (written_at, written_at))

    journal.sweep(EXPIRES_AT - 1000, is_full=True)

    assert (old.exists(), new.exists()) == (False, True)
    assert len(journal.read(ID)) == 1


def test_a_full_journal_refuses_openings_only(make_client: Any, tmp_path: Path) -> None:
    """A refused opening leaves nothing behind; turns of open sessions go on, and a close makes room."""
    journal = make_journal(tmp_path, max_bytes=2 * BLOCK_BYTES)
    client = make_client(journal=journal)
    sid = client.open()
    client.answer(sid, "what?", **SHORT)
    folders = sorted(path.name for path in (tmp_path / "journal").iterdir())

    refused = client.call({"requestType": "NEW_SESSION"}, headers={"amz-sdk-invocation-id": "o1"})

    assert (refused.status, refused.error, refused.headers["Retry-After"]) == (429, "Overloaded", "3660")
    assert "journal.max_bytes" in refused.json["error"]["message"]
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == folders
    assert client.ask(sid, "go on", **SHORT).wait().status == 200
    numbers = client.service.numbers()
    assert numbers["journal"]["refusals"] == 1
    assert numbers["journal"]["bytes"] >= 2 * BLOCK_BYTES
    assert numbers["sessions"]["open"] == 1
    client.call({"type": "close_session", "session_id": sid})
    client.open()


def test_a_full_journal_says_when_there_is_room(make_client: Any, tmp_path: Path, clock: Any) -> None:
    """Retry-After is the time until the first session's space is free."""
    journal = make_journal(tmp_path, max_bytes=BLOCK_BYTES)
    client = make_client(journal=journal)
    journal.sweep(int(clock()), is_full=True)
    client.open(ttl_s=500)
    clock.advance(100)

    refused = client.call({"requestType": "NEW_SESSION"})

    assert (refused.error, refused.headers["Retry-After"]) == ("Overloaded", "460")
