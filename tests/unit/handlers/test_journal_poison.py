"""Journals with records of another program: each invalid record ends its own session and affects no other."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from handlers.errors import SettingsError
from handlers.journal.codec import EventCodec
from handlers.journal.directory import DirectoryJournal
from handlers.journal.event import DamagedRecord, Event
from handlers.journal.journal import ANYONE, NO_KEYS
from handlers.settings.handler import HandlerSettings
from handlers.settings.journal import JournalSettings
from tests.torchserve.drawings import data_url
from torchmoor.wire.session_ids import session_hash

SHORT = {"parameters": {"max_new_tokens": 12}}
MAX_EVENT_BYTES = 4096
LIMITS = JournalSettings(max_event_bytes=MAX_EVENT_BYTES)
OTHER_ID = "ts-seq-bbbbbbbbbbbbbbbb-6b013fa9-llava-0-k0aaaaaaaaaaaaaaaaaaaaaaaaaa"
GOOD = {"kind": "turn", "question": "q", "answer": "a", "nonce": "0", "session": "HASH"}  # hash of the session


def changed(**fields: Any) -> bytes:
    """Return a turn with these fields instead of its own; None removes one."""
    return json.dumps({name: value for name, value in {**GOOD, **fields}.items() if value is not None}).encode()


NOT_AN_IMAGE = hashlib.sha256(b"not an image").hexdigest()
BYTES = {
    "nothing": b"",
    "half an event": changed()[:-9],
    "no text": b"\xff\xfe{}",
    "a list": b"[]",
    "a number": b"NaN",
    "deep nesting": b"[" * 4000,
    "a huge number": b"[1" + b"0" * 4090 + b"]",
    "no kind": changed(kind=None),
    "no session": changed(session=None),
    "an unknown field": changed(extra=""),
    "an unknown kind": changed(kind="shell"),
    "a kind of another type": changed(kind=["turn"]),
    "a question of another type": changed(question=5),
    "an answer of another type": changed(answer={"type": "text"}),
    "an answer that is not a number": changed(answer=float("nan")),
    "an invocation id of another type": changed(invocation_id=[]),
    "half a surrogate pair": changed(question="\ud800"),
    "images of another type": changed(images="0" * 64),
    "the name of a file as an image": changed(images=["../../../etc/passwd"]),
    "an image that is not one": changed(images=[NOT_AN_IMAGE]),
    "more images than a session may have": changed(images=[NOT_AN_IMAGE] * 9),
    "another session's event": EventCodec(LIMITS, NO_KEYS).encode(
        Event(kind="turn", question="q", answer="a"), OTHER_ID
    ),
    "an owner of another type": changed(session=[1]),
    "a second opening": changed(kind="open", question="", answer=""),
    "too many bytes": changed(question="a" * MAX_EVENT_BYTES),
}


def write(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data.replace(b"HASH", session_hash(path.parent.name).encode()))


def write_sparse(path: Path) -> None:
    """Create a sparse file with a size of 300 GB."""
    with path.open("wb") as file:
        file.truncate(300 << 30)


POISON: dict[str, Callable[[Path], object]] = {
    **{name: write(data) for name, data in BYTES.items()},
    "300 GB": write_sparse,
    "a directory": Path.mkdir,
    "a link": lambda path: path.symlink_to("/etc/passwd"),
    "a pipe": os.mkfifo,
}


@pytest.fixture
def journal(tmp_path: Path) -> DirectoryJournal:
    return DirectoryJournal(tmp_path / "journal", LIMITS)


@pytest.mark.parametrize("poison", POISON.values(), ids=POISON.keys())
def test_a_poisoned_event_ends_its_session(
    two_workers: Any, tmp_path: Path, red: Any, poison: Callable[[Path], object]
) -> None:
    """Requests get SessionLost on the worker that holds the session and on another; other sessions continue."""
    holder, other = two_workers
    sid, unharmed = holder.open(data_url(red)), holder.open(data_url(red))
    holder.answer(sid, "what is it?", **SHORT)
    folder = tmp_path / "journal" / sid
    (folder / NOT_AN_IMAGE).write_bytes(b"not an image")
    poison(folder / "00000002")

    for worker in (holder, other, holder, other):
        asked = worker.ask(sid, "and its color?", **SHORT).wait()
        assert (asked.status, asked.error) == (410, "SessionLost")
    added = other.call({"type": "add_images", "session_id": sid, "image": data_url(red)})

    assert (added.status, added.error) == (410, "SessionLost")
    for worker in two_workers:
        sessions = worker.service.status()["sessions"]
        assert sessions["damaged"] >= 2
        assert sid not in worker.service.store.session_ids()
        assert worker.ask(unharmed, "what is it?", **SHORT).wait().status == 200


@pytest.mark.parametrize("poison", [POISON[name] for name in POISON if name != "a second opening"])
def test_a_poisoned_opening_ends_its_session(
    two_workers: Any, tmp_path: Path, red: Any, poison: Callable[[Path], object]
) -> None:
    """A worker that does not hold the session answers its question with SessionLost."""
    holder, other = two_workers
    sid = holder.open(data_url(red))
    path = tmp_path / "journal" / sid / "00000000"
    path.unlink()
    poison(path)

    assert other.ask(sid, "what is it?", **SHORT).wait().error == "SessionLost"


def test_a_poisoned_record_of_a_close_is_refused(two_workers: Any, tmp_path: Path) -> None:
    """A session with an invalid record of a close is lost, too."""
    holder, other = two_workers
    sid = holder.open()
    (tmp_path / "journal" / sid / "closed").write_bytes(b"{" * MAX_EVENT_BYTES)

    for worker in two_workers:
        assert worker.ask(sid, "what?").wait().error == "SessionLost"
    assert other.call({"type": "close_session", "session_id": sid}).error == "SessionLost"


@pytest.mark.parametrize("poison", [b"", b"\xff" * 2000, OTHER_ID.encode(), b"0" * (1 << 20)])
def test_a_poisoned_claim_opens_another_session(two_workers: Any, tmp_path: Path, poison: bytes) -> None:
    """A repeated opening gets a new session if its claim does not name a session of this fleet."""
    first, second = two_workers
    headers = {"amz-sdk-invocation-id": "o1"}
    opened = first.call({"requestType": "NEW_SESSION"}, headers=headers).json["session_id"]
    for path in (tmp_path / "journal" / "claims").iterdir():
        path.write_bytes(poison)

    again = second.call({"requestType": "NEW_SESSION"}, headers=headers)

    assert again.status == 200
    assert again.json["session_id"] != opened
    assert second.ask(again.json["session_id"], "hello", **SHORT).wait().status == 200


def test_an_image_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """An image's size is checked before its bytes are read."""
    journal = DirectoryJournal(tmp_path / "journal", JournalSettings(max_image_bytes=100))
    name = journal.put_image(OTHER_ID, b"a" * 100, ANYONE)
    assert journal.get_image(OTHER_ID, name) == b"a" * 100

    write_sparse(tmp_path / "journal" / OTHER_ID / name)
    with pytest.raises(DamagedRecord):
        journal.get_image(OTHER_ID, name)


def test_an_event_that_is_too_large_is_refused(two_workers: Any, journal: DirectoryJournal) -> None:
    """A turn whose event is too large fails with the reason and is not recorded; the session continues."""
    first, _ = two_workers
    sid = first.open()

    refused = first.ask(sid, "\u0001" * 800, **SHORT).wait()

    assert (refused.status, refused.error) == (400, "InvalidRequest")
    assert f"over {MAX_EVENT_BYTES}" in refused.json["error"]["message"]
    assert first.ask(sid, "what?", **SHORT).wait().status == 200
    assert len(journal.read(sid)) == 2


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        ({"intake": {"max_bytes": 65 << 20}}, r"handler\.journal\.max_image_bytes must be at least intake\.max_bytes"),
        (
            {"engine": {"max_question_chars": 1 << 20}},
            r"handler\.journal\.max_event_bytes must be at least 6 \* engine\.max_question_chars",
        ),
    ],
)
def test_the_journal_must_read_what_clients_may_send(groups: dict[str, Any], match: str) -> None:
    """Limits of the journal below those of requests are refused at the start; without a journal they do not matter."""
    with pytest.raises(SettingsError, match=match):
        HandlerSettings(**groups, journal={"url": "file:///journal"})

    HandlerSettings(**groups)
