"""The journal in a directory, and workers that share one: what is recorded, rebuilt, refused."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from handlers.chat.journal import DirectoryJournal, Event, EventTaken, image_hash, open_journal
from handlers.errors import ConfigError
from tests.unit.handlers.test_chat_service import data_url, question, reply_of

ID = "ts-seq-aaaaaaaaaaaaaaaa-6b013fa9-llava-0-k0aaaaaaaaaaaaaaaaaaaaaaaaaa"
SHORT = {"parameters": {"max_new_tokens": 12}}


@pytest.fixture
def journal(tmp_path: Path) -> DirectoryJournal:
    return DirectoryJournal(tmp_path / "journal")


@pytest.fixture
def two_workers(make_client: Any, journal: DirectoryJournal) -> tuple[Any, Any]:
    """Two workers of one fleet: the same keys, one journal."""
    return make_client(instance="llava-0", journal=journal), make_client(instance="llava-1", journal=journal)


class BrokenJournal(DirectoryJournal):
    """A journal whose disk is full from a moment that the test chooses."""

    is_broken = False

    def append(self, session_id: str, number: int, event: Event) -> None:
        if self.is_broken:
            raise OSError(28, "No space left on device")
        super().append(session_id, number, event)


# The directory


def test_events_come_back_in_order(journal: DirectoryJournal) -> None:
    """What is appended is read, from any number on; nothing else is."""
    events = [Event(kind="open", images=("0" * 64,)), Event(kind="turn", question="what? \u00e9", answer="a\nb")]
    for number, event in enumerate(events):
        journal.append(ID, number, event)

    assert journal.read(ID) == events
    assert journal.read(ID, 1) == events[1:]
    assert journal.read(ID, 2) == []
    assert journal.read(ID.replace("a", "b")) == []


def test_only_one_of_many_writers_has_a_number(journal: DirectoryJournal) -> None:
    """Of eight threads that write the same event, one succeeds; a reader sees that one's."""
    outcomes: list[str] = []
    start = threading.Barrier(8)

    def write(name: str) -> None:
        start.wait()
        try:
            journal.append(ID, 0, Event(kind="turn", answer=name))
            outcomes.append(name)
        except EventTaken:
            outcomes.append("")

    threads = [threading.Thread(target=write, args=(str(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    (winner,) = [name for name in outcomes if name]
    assert len(outcomes) == 8
    assert [event.answer for event in journal.read(ID)] == [winner]


def test_images_are_kept_by_their_hash(journal: DirectoryJournal) -> None:
    """The same bytes are stored once and come back; a name that is no hash reads nothing."""
    name = journal.put_image(ID, b"png")

    assert name == journal.put_image(ID, b"png") == image_hash(b"png")
    assert journal.get_image(ID, name) == b"png"
    for missing in ("0" * 64, "../../etc/passwd", ""):
        with pytest.raises(OSError, match=r"."):
            journal.get_image(ID, missing)


def test_ids_that_are_paths_are_refused(journal: DirectoryJournal) -> None:
    """A session id never leaves the journal's directory."""
    for bad in ("..", "a/b", "", "."):
        with pytest.raises(ValueError, match="session id"):
            journal.read(bad)


def test_close_deletes_all_but_the_fact(journal: DirectoryJournal, tmp_path: Path) -> None:
    """After a close neither questions nor images are on the disk."""
    journal.append(ID, 0, Event(kind="turn", question="secret", answer="secret"))
    journal.put_image(ID, b"png")

    journal.close(ID)
    journal.close(ID)

    assert [event.kind for event in journal.read(ID)] == ["close"]
    assert [path.name for path in (tmp_path / "journal" / ID).iterdir()] == ["closed"]


def test_sweep_deletes_what_has_expired(journal: DirectoryJournal) -> None:
    """The expiry is in the id; what has not expired stays."""
    journal.append(ID, 0, Event(kind="open"))

    journal.sweep(0x6B013FA9)
    assert journal.read(ID)
    journal.sweep(0x6B013FA9 + 1)

    assert journal.read(ID) == []


def test_nobody_else_may_read_it(journal: DirectoryJournal, tmp_path: Path) -> None:
    """Conversations are their users' own."""
    journal.append(ID, 0, Event(kind="open"))

    for folder in (tmp_path / "journal", tmp_path / "journal" / ID):
        assert os.stat(folder).st_mode & 0o077 == 0


@pytest.mark.parametrize("url", ["", "on", "http://x/y", "file://host/x", "file:relative", "redis://x"])
def test_urls_that_name_no_journal_are_refused(url: str) -> None:
    """A misspelt journal must not mean none."""
    with pytest.raises(ConfigError, match=r"handler\.journal\.url"):
        open_journal(url)


def test_off_is_no_journal(tmp_path: Path) -> None:
    assert open_journal("off") is None
    assert isinstance(open_journal((tmp_path / "a b").as_uri()), DirectoryJournal)


# Workers that share one


def test_another_worker_goes_on_with_the_same_answers(two_workers: Any, reference: Any, red: Any, blue: Any) -> None:
    """A session moves in the middle of a conversation with two images; its answers are those of a stateless run."""
    first, second = two_workers
    sid = first.open(data_url(red))
    answers = [first.answer(sid, "what is it?", **SHORT)]
    answers.append(first.answer(sid, "and this?", images=[data_url(blue)], **SHORT))

    moved = second.ask(sid, "what color is it?", **SHORT).wait()

    assert moved.headers["X-Torchmoor-Rebuilt-Events"] == "3"
    messages = [
        question("what is it?", 1),
        reply_of(answers[0]),
        question("and this?", 1),
        reply_of(answers[1]),
        question("what color is it?"),
    ]
    assert moved.json["response_text"] == reference(messages, [red, blue], 12)


def test_a_session_that_comes_home_catches_up(two_workers: Any, reference: Any, red: Any) -> None:
    """The first worker still holds the session, but older: it reads what happened elsewhere and goes on from there."""
    first, second = two_workers
    sid = first.open(data_url(red))
    answers = [first.answer(sid, "what is it?", **SHORT), second.answer(sid, "what color?", **SHORT)]

    home = first.ask(sid, "where is it?", **SHORT).wait()

    assert home.headers["X-Torchmoor-Rebuilt-Events"] == "1"
    messages = [
        question("what is it?", 1),
        reply_of(answers[0]),
        question("what color?"),
        reply_of(answers[1]),
        question("where is it?"),
    ]
    assert home.json["response_text"] == reference(messages, [red], 12)


def test_images_that_wait_for_a_question_move_along(two_workers: Any, reference: Any, red: Any, blue: Any) -> None:
    """A picture added on one worker belongs to the next question on another."""
    first, second = two_workers
    sid = first.open(data_url(red))
    first.call({"type": "add_images", "session_id": sid, "image": data_url(blue)})

    assert second.answer(sid, "what?", **SHORT) == reference([question("what?", 2)], [red, blue], 12)


def test_two_workers_cannot_both_answer_a_turn(
    make_client: Any, journal: DirectoryJournal, endless_llava: Any, red: Any
) -> None:
    """Of two turns at once on two workers one is told 409, and the conversation has the other one's."""
    gates = {"llava-0": threading.Event(), "llava-1": threading.Event()}
    first = make_client(endless_llava, instance="llava-0", journal=journal)
    second = make_client(instance="llava-1", journal=journal)
    sid = first.open(data_url(red))
    reached = threading.Event()

    def hold(embeds: Any, parts: Any) -> None:
        reached.set()
        gates["llava-0"].wait(20)

    endless_llava.before_step = hold
    slow = first.ask(sid, "what is it?", **SHORT)
    assert reached.wait(20)
    won = second.answer(sid, "what color?", **SHORT)
    gates["llava-0"].set()

    lost = slow.wait()

    assert (lost.status, lost.error) == (409, "TurnConflict")
    assert [event.answer for event in journal.read(sid) if event.kind == "turn"] == [won]
    assert first.ask(sid, "go on", **SHORT).wait().headers["X-Torchmoor-Rebuilt-Events"] == "1"


def test_closed_on_one_worker_is_closed_on_all(two_workers: Any, red: Any) -> None:
    """Also on a worker that still holds the session, and on one that never did."""
    first, second = two_workers
    sid, never_held = first.open(data_url(red)), first.open(data_url(red))
    first.answer(sid, "what is it?", **SHORT)
    assert second.call({"type": "close_session", "session_id": sid}).status == 200
    assert first.call({"type": "close_session", "session_id": never_held}).status == 200

    assert first.ask(sid, "what?").wait().error == "SessionClosed"
    assert second.ask(never_held, "what?").wait().error == "SessionClosed"


def test_a_question_sent_again_is_answered_from_the_journal(two_workers: Any, red: Any) -> None:
    """A client that did not hear of the answer gets the same one, from any worker, and the turn is not there twice."""
    first, second = two_workers
    sid = first.open(data_url(red))
    headers = {"amz-sdk-invocation-id": "0b3a"}
    once = first.ask(sid, "what is it?", headers=headers, **SHORT).wait()

    again = second.ask(sid, "what is it?", headers=headers, **SHORT).wait()
    streamed = first.ask(sid, "what is it?", headers=headers, stream=True, **SHORT).wait()

    assert again.json == once.json
    assert streamed.body.decode() == once.json["response_text"]
    assert again.headers["X-Torchmoor-Cache-Tier"] == "answer"
    assert second.call(None, {"x-torchmoor-operation": "status"}).json["tokens"]["generated"] == 0


def test_without_a_journal_a_session_of_another_worker_is_lost(make_client: Any, red: Any) -> None:
    """Off is a setting, and a lost session says so."""
    first, second = make_client(instance="llava-0"), make_client(instance="llava-1")
    sid = first.open(data_url(red))

    assert second.ask(sid, "what?").wait().error == "SessionLost"
    assert second.call({"type": "close_session", "session_id": sid}).error == "SessionLost"


def test_a_session_that_the_journal_does_not_know_is_lost(two_workers: Any, make_client: Any, red: Any) -> None:
    """A real id whose session was never recorded."""
    sid = make_client(instance="llava-2").open(data_url(red))

    assert two_workers[0].ask(sid, "what?").wait().error == "SessionLost"


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_that_cannot_be_recorded_is_not_acknowledged(
    make_client: Any, tmp_path: Path, red: Any, stream: bool
) -> None:
    """With a full disk the client is told so, and the conversation goes on where it was once there is room."""
    journal = BrokenJournal(tmp_path / "journal")
    client = make_client(instance="llava-0", journal=journal)
    sid = client.open(data_url(red))
    journal.is_broken = True

    refused = client.ask(sid, "what is it?", stream=stream, **SHORT).wait()

    if stream:
        assert b"\x1e" in refused.body
        assert b"JournalUnavailable" in refused.body
    else:
        assert (refused.status, refused.error) == (503, "JournalUnavailable")
    journal.is_broken = False
    after = client.ask(sid, "what is it?", **SHORT).wait()
    assert after.status == 200
    assert [event.kind for event in journal.read(sid)] == ["open", "turn"]


def test_an_opening_that_cannot_be_recorded_leaves_no_session(make_client: Any, tmp_path: Path, red: Any) -> None:
    """An id that is told to a client is one that survives."""
    journal = BrokenJournal(tmp_path / "journal")
    client = make_client(instance="llava-0", journal=journal)
    journal.is_broken = True

    refused = client.call({"type": "start_session", "image": data_url(red)})

    assert (refused.status, refused.error) == (503, "JournalUnavailable")
    assert client.service.store.session_ids() == []
