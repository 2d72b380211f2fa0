"""The journal in a directory, and workers that share one: recording, rebuilding, refusing."""

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from handlers.chat.forms import Summary
from handlers.chat.sessions.journaled_sessions import MAX_CLAIMS, JournaledSessions
from handlers.chat.turns.turn import Turn
from handlers.errors import InternalError, JournalUnavailable
from handlers.journal.codec import EventCodec
from handlers.journal.directory import DirectoryJournal
from handlers.journal.event import Event
from handlers.journal.journal import ANYONE, NO_KEYS, EventsMissing, expiry, owner_key
from handlers.requests.incoming import Caller
from handlers.settings.journal import JournalSettings
from tests.unit.handlers.journal_stores import CLOSE
from tests.unit.handlers.test_chat_service import Hold, data_url, features_bytes, holds_nothing, question, reply_of
from tests.waiting import DEADLINE_S, wait_until
from torchmoor.wire.headers import NEW_SESSION, SESSION_ID

ID = "ts-seq-aaaaaaaaaaaaaaaa-6b013fa9-llava-0-k0aaaaaaaaaaaaaaaaaaaaaaaaaa"
OWNER = owner_key("llava", "alice")
SHORT = {"parameters": {"max_new_tokens": 12}}


class BrokenJournal(DirectoryJournal):
    """A journal whose disk becomes full when the test chooses."""

    is_broken = False

    def close(self, session_id: str, event: Event) -> Event:
        if self.is_broken:
            raise OSError(28, "No space left on device")
        return super().close(session_id, event)

    def append(self, session_id: str, number: int, event: Event, owner: str = ANYONE) -> None:
        if self.is_broken:
            raise OSError(28, "No space left on device")
        super().append(session_id, number, event, owner)


# The directory


def test_turn_that_ends_while_its_expired_session_is_swept_is_no_error(
    journal: DirectoryJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that ends after its expired session was swept is answered without a record.

    A live session whose folder is gone is an error.
    """
    link = os.link
    expired, live = ID.replace("6b013fa9", "00013fa9"), ID.replace("6b013fa9", "ff013fa9")

    def sweep_first(source: Path, target: Path) -> None:
        shutil.rmtree(target.parent)
        link(source, target)

    monkeypatch.setattr(os, "link", sweep_first)

    journal.append(expired, 0, Event(kind="open"), ANYONE)
    with pytest.raises(FileNotFoundError):
        journal.append(live, 0, Event(kind="open"), ANYONE)


def test_a_close_while_one_reads_is_seen(journal: DirectoryJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partially deleted session is not read as a whole one."""
    for number in range(3):
        journal.append(ID, number, Event(kind="turn", answer=str(number)), ANYONE)
    decode = EventCodec.decode

    def decode_and_close(codec: EventCodec, data: bytes, session_id: str) -> Event:
        event = decode(codec, data, session_id)
        monkeypatch.undo()
        journal.close(ID, CLOSE)
        return event

    monkeypatch.setattr(EventCodec, "decode", decode_and_close)

    assert [event.kind for event in journal.read(ID)] == ["close"]


def test_what_could_not_be_written_leaves_nothing(
    journal: DirectoryJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed write on a full disk leaves no partial file."""
    journal.append(ID, 0, Event(kind="open"), ANYONE)

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="space"):
        journal.put_image(ID, b"png", ANYONE)
    with pytest.raises(OSError, match="space"):
        journal.append(ID, 1, Event(kind="turn"), ANYONE)

    assert [path.name for path in (tmp_path / "journal" / ID).iterdir()] == ["00000000"]


def test_an_event_outlives_a_crash_with_all_that_it_names(
    journal: DirectoryJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session's folder and the image's folder are synced before the event, so that a crash loses none of them."""
    synced: list[tuple[str, list[str]]] = []
    fsync = os.fsync

    def sync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_dir():
            synced.append((path.name, sorted(each.name for each in path.iterdir())))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", sync)
    name = journal.put_image(ID, b"png", ANYONE)
    journal.append(ID, 0, Event(kind="open", images=(name,)), ANYONE)

    assert synced == [("journal", [ID]), (ID, [name]), (ID, ["00000000", name])]


def test_a_directory_that_is_gone_is_no_empty_journal(journal: DirectoryJournal, tmp_path: Path) -> None:
    """A missing directory, as of an unmounted share, is an error and does not make sessions look lost."""
    (tmp_path / "journal").rmdir()

    for action in (
        lambda: journal.read(ID),
        lambda: journal.append(ID, 0, Event(kind="open"), ANYONE),
        lambda: journal.put_image(ID, b"png", ANYONE),
        lambda: journal.claim("name", "value"),
        lambda: journal.enlist(ID, "label", ANYONE),
        lambda: journal.list_owned(ANYONE),
        lambda: journal.list_ids(),
    ):
        with pytest.raises(FileNotFoundError):
            action()
    assert not (tmp_path / "journal").exists()


def test_events_that_the_directory_has_lost_are_missed(journal: DirectoryJournal, tmp_path: Path) -> None:
    """A session whose folder is gone, as below an unmounted share, is an error: no other worker could continue it."""
    live = ID.replace("6b013fa9", "ff013fa9")
    for number in range(2):
        journal.append(live, number, Event(kind="turn"), ANYONE)
    shutil.rmtree(tmp_path / "journal" / live)

    with pytest.raises(EventsMissing, match="missing"):
        journal.append(live, 2, Event(kind="turn"), ANYONE)
    with pytest.raises(EventsMissing, match="missing"):  # so that no answer is computed that cannot be recorded
        journal.read(live, 2)
    assert not (tmp_path / "journal" / live).exists()

    (tmp_path / "journal").rmdir()
    for action in (lambda: journal.append(live, 2, Event(kind="turn"), ANYONE), lambda: journal.read(live, 2)):
        with pytest.raises(FileNotFoundError):
            action()


def test_a_damaged_image_is_not_given_out(journal: DirectoryJournal, tmp_path: Path) -> None:
    """An image whose bytes do not match the hash in its name is refused."""
    name = journal.put_image(ID, b"png", ANYONE)
    (tmp_path / "journal" / ID / name).write_bytes(b"pn")

    with pytest.raises(OSError, match="damaged"):
        journal.get_image(ID, name)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"5", b"{}", b'{"kind": "turn", "x": 1}', b'{"kind": "x"}', b"\xff"]
)
def test_bytes_that_are_no_event_are_refused(data: bytes) -> None:
    """A damaged event is an error and is never skipped."""
    with pytest.raises(ValueError, match=r"."):
        EventCodec(JournalSettings(), NO_KEYS).decode(data, ID)


@pytest.mark.parametrize("stray", ["listed/note", f"listed/{OWNER}/folder", "claims/folder", "pictures/note"])
def test_a_sweep_passes_over_what_other_programs_have_left(
    journal: DirectoryJournal, tmp_path: Path, stray: str
) -> None:
    """A sweep ignores what other programs have left, deletes what has expired, and measures the rest."""
    live = ID.replace("6b013fa9", "ff013fa9")
    for session_id in (ID, live):
        journal.append(session_id, 0, Event(kind="open"), OWNER)
        journal.enlist(session_id, "vision", OWNER)
    path = tmp_path / "journal" / stray
    path.parent.mkdir(exist_ok=True)
    if path.name == "folder":
        path.mkdir()
        os.utime(path, (0, 0))
    else:
        path.write_text("x")

    journal.sweep(expiry(ID) + 1, is_full=True)

    assert [each.session_id for each in journal.list_owned(OWNER)] == [live]
    assert (journal.num_sessions, path.exists()) == (1, True)


def test_a_folder_that_only_root_may_read_stops_no_measurement(
    journal: DirectoryJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A journal may be at the top of a file system, which has a folder lost+found."""
    journal.append(ID.replace("6b013fa9", "ff013fa9"), 0, Event(kind="open"), OWNER)
    (tmp_path / "journal" / "lost+found").mkdir()
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if Path(path).name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    other = DirectoryJournal(tmp_path / "journal", JournalSettings())

    other.sweep(0, is_full=True)

    assert other.num_sessions == 1


def test_nobody_else_may_read_it(journal: DirectoryJournal, tmp_path: Path) -> None:
    """Files are readable by their owner only, because conversations are private."""
    journal.append(ID, 0, Event(kind="open"), ANYONE)

    for folder in (tmp_path / "journal", tmp_path / "journal" / ID):
        assert os.stat(folder).st_mode & 0o077 == 0


# Workers that share a journal


def test_another_worker_goes_on_with_the_same_answers(two_workers: Any, reference: Any, red: Any, blue: Any) -> None:
    """A session that moves in a conversation with two images answers as a stateless run does."""
    first, second = two_workers
    sid = first.open(data_url(red))
    answers = [first.answer(sid, "what is it?", **SHORT)]
    answers.append(first.answer(sid, "and this?", images=[data_url(blue)], **SHORT))

    moved = second.ask(sid, "what color is it?", **SHORT).wait()

    assert moved.headers["x-torchmoor-rebuilt-events"] == "3"
    messages = [
        question("what is it?", 1),
        reply_of(answers[0]),
        question("and this?", 1),
        reply_of(answers[1]),
        question("what color is it?"),
    ]
    assert moved.json["response_text"] == reference(messages, [red, blue], 12)


def test_a_session_that_comes_home_catches_up(two_workers: Any, reference: Any, red: Any) -> None:
    """A worker with an older state of a session reads the newer events from the journal and continues."""
    first, second = two_workers
    sid = first.open(data_url(red))
    answers = [first.answer(sid, "what is it?", **SHORT), second.answer(sid, "what color?", **SHORT)]

    home = first.ask(sid, "where is it?", **SHORT).wait()

    assert home.headers["x-torchmoor-rebuilt-events"] == "1"
    messages = [
        question("what is it?", 1),
        reply_of(answers[0]),
        question("what color?"),
        reply_of(answers[1]),
        question("where is it?"),
    ]
    assert home.json["response_text"] == reference(messages, [red], 12)


def test_images_that_wait_for_a_question_move_along(two_workers: Any, reference: Any, red: Any, blue: Any) -> None:
    """An image added on one worker belongs to the next question on another."""
    first, second = two_workers
    sid = first.open(data_url(red))
    first.call({"type": "add_images", "session_id": sid, "image": data_url(blue)})

    assert second.answer(sid, "what?", **SHORT) == reference([question("what?", 2)], [red, blue], 12)


def test_two_workers_cannot_both_answer_a_turn(
    make_client: Any, journal: DirectoryJournal, endless_llava: Any, red: Any
) -> None:
    """Of two concurrent turns on two workers one gets 409, and the conversation contains the other."""
    first = make_client(endless_llava, instance="llava-0", journal=journal)
    second = make_client(instance="llava-1", journal=journal)
    sid = first.open(data_url(red))
    hold = Hold(endless_llava)
    slow = first.ask(sid, "what is it?", **SHORT)
    hold.wait()
    won = second.answer(sid, "what color?", **SHORT)
    hold.release()

    lost = slow.wait()

    assert (lost.status, lost.error) == (409, "TurnConflict")
    assert [event.answer for event in journal.read(sid) if event.kind == "turn"] == [won]
    first.answer(sid, "go on", **SHORT)
    assert [event.question for event in journal.read(sid) if event.kind == "turn"] == ["what color?", "go on"]


def test_a_question_sent_again_while_it_runs_elsewhere_gets_the_one_answer(
    make_client: Any, journal: DirectoryJournal, endless_llava: Any, red: Any
) -> None:
    """The slower of two equal requests gets the answer instead of a conflict."""
    first = make_client(endless_llava, instance="llava-0", journal=journal)
    second = make_client(instance="llava-1", journal=journal)
    sid = first.open(data_url(red))
    again = {"amz-sdk-invocation-id": "one"}
    hold = Hold(endless_llava)
    slow = first.ask(sid, "what color?", headers=again, **SHORT)
    hold.wait()
    fast = second.ask(sid, "what color?", headers=again, **SHORT).wait()
    hold.release()

    assert slow.wait().json == fast.json
    assert slow.headers["x-torchmoor-cache-tier"] == "answer"
    assert [event.kind for event in journal.read(sid)] == ["open", "turn"]


def test_closed_on_one_worker_is_closed_on_all(two_workers: Any, red: Any) -> None:
    """A session is closed on a worker that still holds it and on one that never did."""
    first, second = two_workers
    sid, never_held = first.open(data_url(red)), first.open(data_url(red))
    first.answer(sid, "what is it?", **SHORT)
    assert second.call({"type": "close_session", "session_id": sid}).status == 200
    assert first.call({"type": "close_session", "session_id": never_held}).status == 200

    assert first.ask(sid, "what?").wait().error == "SessionClosed"
    assert second.ask(never_held, "what?").wait().error == "SessionClosed"


def test_a_question_sent_again_is_answered_from_the_journal(two_workers: Any, red: Any) -> None:
    """A repeated request gets the recorded answer from any worker, and the turn is recorded once."""
    first, second = two_workers
    sid = first.open(data_url(red))
    headers = {"amz-sdk-invocation-id": "0b3a"}
    once = first.ask(sid, "what is it?", headers=headers, **SHORT).wait()

    again = second.ask(sid, "what is it?", headers=headers, **SHORT).wait()
    streamed = first.ask(sid, "what is it?", headers=headers, stream=True, **SHORT).wait()

    assert again.json == once.json
    assert streamed.body.decode() == once.json["response_text"]
    assert again.headers["x-torchmoor-cache-tier"] == "answer"
    assert second.call(None, {"x-torchmoor-operation": "status"}).json["tokens"]["generated"] == 0


def test_a_question_sent_again_needs_no_room(make_client: Any, red: Any) -> None:
    """A repeated question is answered from the journal although the session has no room for another one."""
    client = make_client(session={"max_history_chars": 100})
    sid, headers, text = client.open(data_url(red)), {"amz-sdk-invocation-id": "0b3a"}, "what is it?" + " " * 60
    once = client.ask(sid, text, headers=headers, **SHORT).wait()
    assert once.status == 200

    again = client.ask(sid, text, headers=headers, **SHORT).wait()
    other = client.ask(sid, text, headers={"amz-sdk-invocation-id": "another"}, **SHORT).wait()

    assert (again.status, again.json) == (200, once.json)
    assert (other.status, other.error) == (400, "ContextTooLong")


def test_without_a_journal_a_session_of_another_worker_is_lost(make_client: Any, red: Any) -> None:
    first, second = make_client(instance="llava-0"), make_client(instance="llava-1")
    sid = first.open(data_url(red))

    assert second.ask(sid, "what?").wait().error == "SessionLost"
    for kind in ("stop_answer", "close_session"):
        assert second.call({"type": kind, "session_id": sid}).error == "SessionLost"


def test_a_session_that_the_journal_does_not_know_is_lost(two_workers: Any, make_client: Any, red: Any) -> None:
    """A valid id whose session was never recorded is reported as lost."""
    sid = make_client(instance="llava-2").open(data_url(red))

    assert two_workers[0].ask(sid, "what?").wait().error == "SessionLost"


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_that_cannot_be_recorded_is_not_acknowledged(
    make_client: Any, tmp_path: Path, red: Any, stream: bool
) -> None:
    """With a full disk the client gets an error, and the conversation continues once there is space."""
    journal = BrokenJournal(tmp_path / "journal", JournalSettings())
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


def test_a_session_whose_journal_has_lost_events_says_so(
    make_client: Any, tmp_path: Path, red: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of a session with lost events fail until an operator restores the data; then it continues."""
    journal = BrokenJournal(tmp_path / "journal", JournalSettings())
    client = make_client(instance="llava-0", journal=journal)
    sid = client.open(data_url(red))

    def lose(*arguments: object) -> None:
        raise EventsMissing("events before number 1 of this session are missing")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "read", lose)
        refused = client.ask(sid, "what is it?", **SHORT).wait()
    assert (refused.status, refused.error) == (503, "JournalUnavailable")
    assert b"has lost events; open a new session" in refused.body

    assert client.ask(sid, "what is it?", **SHORT).wait().status == 200


def test_an_opening_that_cannot_be_recorded_leaves_no_session(make_client: Any, tmp_path: Path, red: Any) -> None:
    """A client never gets the id of a session that is not recorded."""
    journal = BrokenJournal(tmp_path / "journal", JournalSettings())
    client = make_client(instance="llava-0", journal=journal)
    journal.is_broken = True

    refused = client.call({"type": "start_session", "image": data_url(red)})

    assert (refused.status, refused.error) == (503, "JournalUnavailable")
    assert client.service.store.session_ids() == []


def test_an_opening_that_nobody_heard_of_is_deleted(
    make_client: Any, journal: DirectoryJournal, tmp_path: Path, red: Any
) -> None:
    """The session of a client that disconnected before it read the id is deleted from the disk."""
    client = make_client(instance="llava-0", journal=journal)
    opening = client.call({"type": "start_session", "image": data_url(red)})

    opening.reply.cancel()

    wait_until(lambda: not list((tmp_path / "journal").glob("ts-seq-*")), "the session's journal is deleted")
    assert client.service.store.session_ids() == []


def test_a_session_is_closed_without_being_taken_in(make_client: Any, journal: DirectoryJournal, red: Any) -> None:
    """A full worker closes another worker's session without rebuilding it."""
    first = make_client(instance="llava-0", journal=journal)
    second = make_client(instance="llava-1", journal=journal, session={"features_bytes": 1, "max_sessions": 1})
    sid = first.open(data_url(red))
    second.open()

    assert second.call({"type": "close_session", "session_id": sid}).status == 200

    assert second.service.status()["images"]["encoded"] == 0
    assert second.call({"type": "close_session", "session_id": sid}).error == "SessionClosed"


def test_a_turn_that_ends_after_the_close_elsewhere_says_so(
    make_client: Any, journal: DirectoryJournal, endless_llava: Any, tmp_path: Path, red: Any
) -> None:
    """A turn that ends after a close on another worker is not recorded, and leaves nothing of the session in memory."""
    first = make_client(endless_llava, instance="llava-0", journal=journal)
    second = make_client(instance="llava-1", journal=journal)
    sid = first.open(data_url(red))
    hold = Hold(endless_llava)
    running = first.ask(sid, "what is it?", **SHORT)
    hold.wait()
    assert second.call({"type": "close_session", "session_id": sid}).status == 200
    hold.release()

    assert running.wait().error == "SessionClosed"
    assert first.service.store.session_ids() == []
    assert holds_nothing(first)
    assert [path.name for path in (tmp_path / "journal" / sid).iterdir()] == ["closed"]


def test_a_turn_loses_also_if_another_request_has_caught_up(
    make_client: Any, journal: DirectoryJournal, endless_llava: Any, red: Any
) -> None:
    """If another request caught the session up, a turn that began before still conflicts."""
    first = make_client(endless_llava, instance="llava-0", journal=journal)
    second = make_client(instance="llava-1", journal=journal)
    sid = first.open(data_url(red))
    hold = Hold(endless_llava)
    running = first.ask(sid, "what is it?", **SHORT)
    hold.wait()
    won = second.answer(sid, "what color?", **SHORT)
    assert first.service.recorder.catch_up(first.service.store.get(sid, Caller())) == 1
    hold.release()

    assert running.wait().error == "TurnConflict"
    answers = [event.answer for event in journal.read(sid) if event.kind == "turn"]
    assert answers == [won]


def test_no_turn_sees_an_image_before_it_is_recorded(client: Any, monkeypatch: pytest.MonkeyPatch, red: Any) -> None:
    """A turn never uses an unrecorded image; an image that cannot be recorded is removed."""
    sid = client.open(data_url(red))
    session = client.service.store.get(sid, Caller())
    was_free: list[bool] = []

    def fail(*args: Any) -> None:
        with ThreadPoolExecutor(1) as other:
            was_free.append(other.submit(session.recording.acquire, False).result())
        raise JournalUnavailable("try again")

    monkeypatch.setattr(client.service.recorder, "record", fail)
    refused = client.call({"type": "add_images", "session_id": sid, "image": data_url(red)})

    assert refused.error == "JournalUnavailable"
    assert was_free == [False]
    assert len(session.pending_images) == 1


@pytest.mark.parametrize("damage", ["event", "image"])
def test_a_damaged_journal_is_told_and_can_be_mended(
    two_workers: Any, journal: DirectoryJournal, tmp_path: Path, reference: Any, red: Any, blue: Any, damage: str
) -> None:
    """A damaged journal is an error; after its repair, nothing is read twice."""
    first, second = two_workers
    sid = first.open(data_url(red))
    first.call({"type": "add_images", "session_id": sid, "image": data_url(blue)})
    folder = tmp_path / "journal" / sid
    path = folder / ("00000001" if damage == "event" else journal.read(sid)[1].images[0])
    whole = path.read_bytes()
    path.write_bytes(b"[]")

    refused = second.ask(sid, "what?", **SHORT).wait()
    path.write_bytes(whole)

    assert refused.error == ("SessionLost" if damage == "event" else "JournalUnavailable")
    assert second.answer(sid, "what?", **SHORT) == reference([question("what?", 2)], [red, blue], 12)


def test_a_session_that_finds_no_room_is_rebuilt_later(
    make_client: Any, journal: DirectoryJournal, tiny_llava: Any, reference: Any, red: Any, blue: Any
) -> None:
    """After running out of memory during a rebuild, the next question continues it."""
    first = make_client(instance="llava-0", journal=journal)
    sid = first.open()
    said = first.answer(sid, "what?", images=[data_url(red), data_url(blue)], **SHORT)
    one = features_bytes(tiny_llava)
    second = make_client(instance="llava-1", journal=journal, session={"features_bytes": one})

    assert second.ask(sid, "go on", **SHORT).wait().error == "OutOfMemory"
    second.service.images.max_features_bytes = 2 * one
    answer = second.answer(sid, "go on", **SHORT)

    messages = [question("what?", 2), reply_of(said), question("go on")]
    assert answer == reference(messages, [red, blue], 12)


def test_requests_at_once_take_a_session_over_once(two_workers: Any, journal: DirectoryJournal, red: Any) -> None:
    """Concurrent requests rebuild a session once, and all are answered."""
    first, second = two_workers
    sid = first.open(data_url(red))

    asking = [second.ask(sid, f"what is {i}?", **SHORT) for i in range(3)]

    assert [exchange.wait().status for exchange in asking] == [200] * 3
    assert second.service.status()["sessions"]["adopted"] == 1
    assert [event.kind for event in journal.read(sid)] == ["open", "turn", "turn", "turn"]


def test_there_is_no_answer_to_stop_in_a_session_that_another_worker_held(two_workers: Any) -> None:
    """After a failover a stop finds no answer; it gets an error only if the session has ended."""
    first, second = two_workers
    sid, stop = first.open(), {"type": "stop_answer"}

    stopped = second.call({**stop, "session_id": sid})
    assert (stopped.status, stopped.json) == (200, {"success": True, "stopped": False})
    assert first.call({"type": "close_session", "session_id": sid}).status == 200
    assert second.call({**stop, "session_id": sid}).error == "SessionClosed"


def test_another_question_under_the_same_invocation_id_is_asked(
    two_workers: Any, journal: DirectoryJournal, red: Any
) -> None:
    """A client that sends one id for all questions gets different answers."""
    sid = two_workers[0].open(data_url(red))
    headers = {"amz-sdk-invocation-id": "0b3a"}
    two_workers[0].ask(sid, "what is it?", headers=headers, **SHORT).wait()

    other = two_workers[0].ask(sid, "what color?", headers=headers, **SHORT).wait()

    assert other.headers["x-torchmoor-cache-tier"] == "kv"
    assert [event.question for event in journal.read(sid)] == ["", "what is it?", "what color?"]


def test_the_repeated_answer_has_the_question_too_if_that_was_asked_for(two_workers: Any, red: Any) -> None:
    """The repeated answer is identical, including the question on request."""
    first, second = two_workers
    sid = first.open(data_url(red))
    fields = {
        "headers": {"amz-sdk-invocation-id": "0b3a"},
        "parameters": {"max_new_tokens": 4, "return_full_text": True},
    }
    once = first.ask(sid, "what is it?", **fields).wait()

    assert second.ask(sid, "what is it?", **fields).wait().json == once.json


def test_a_turn_that_ends_while_the_worker_stops_is_answered(make_client: Any, endless_llava: Any, red: Any) -> None:
    """The running turn and the one that waits behind it get an error when the worker stops."""
    client = make_client(endless_llava)
    sid = client.open(data_url(red))
    hold = Hold(endless_llava)
    asking = [client.ask(sid, "what is it?", **SHORT) for _ in range(2)]
    hold.wait()
    stopping = client.begin_stop()
    hold.release()
    stopping.join()

    for exchange in asking:
        assert exchange.wait().error == InternalError.__name__
        assert "stopping" in exchange.json["error"]["message"]


# Repeated requests


@pytest.mark.parametrize("is_journaled", [True, False])
def test_each_of_the_last_turns_is_answered_again(
    make_client: Any, journal: DirectoryJournal, red: Any, is_journaled: bool
) -> None:
    """A delayed retry gets its own answer, not a later one, and no question is asked twice."""
    client = make_client(instance="llava-0", journal=journal if is_journaled else None)
    sid = client.open(data_url(red))
    asked = {f"id-{i}": f"what is {i}?" for i in range(4)}
    said = {key: client.answer(sid, text, headers=invocation(key), **SHORT) for key, text in asked.items()}

    again = {key: client.ask(sid, text, headers=invocation(key), **SHORT).wait() for key, text in asked.items()}

    assert {key: exchange.json["response_text"] for key, exchange in again.items()} == said
    assert {exchange.headers["x-torchmoor-cache-tier"] for exchange in again.values()} == {"answer"}
    assert client.service.status()["turns"]["finished"] == 4


def test_a_rebuilt_session_knows_its_last_turns(two_workers: Any, red: Any) -> None:
    """A retry on another instance also gets its own answer."""
    first, second = two_workers
    sid = first.open(data_url(red))
    said = [first.answer(sid, text, headers=invocation(text), **SHORT) for text in ("what?", "where?", "why?")]

    assert second.answer(sid, "what?", headers=invocation("what?"), **SHORT) == said[0]
    assert second.answer(sid, "where?", headers=invocation("where?"), **SHORT) == said[1]


@pytest.mark.parametrize("has_tools", [False, True])
def test_a_retry_that_another_instance_answers_meanwhile_gets_the_recorded_answer(
    make_client: Any, endless_llava: Any, journal: DirectoryJournal, red: Any, has_tools: bool
) -> None:
    """If another instance records a retried answer first, the client gets that one whole, even if its own differs."""
    first = make_client(instance="llava-0", journal=journal)
    second = make_client(endless_llava, instance="llava-1", journal=journal)
    sid = first.open(data_url(red))
    body = {"messages": [{"role": "user", "content": "what is it?"}], "max_tokens": 12, "temperature": 50}
    if has_tools:
        body["tools"] = [{"type": "function", "function": {"name": "look"}}]
    headers = {**invocation("a"), "x-amzn-sagemaker-session-id": sid}
    hold = Hold(endless_llava)
    asking = second.send(body, headers)
    hold.wait()
    recorded = first.call(body, headers)
    hold.release()

    answer = asking.wait()

    assert (answer.status, recorded.status) == (200, 200)
    assert answer.json["choices"][0]["message"] == recorded.json["choices"][0]["message"]
    assert [event.kind for event in journal.read(sid)] == ["open", "turn"]


def test_images_of_a_question_that_loses_do_not_count(
    make_client: Any, endless_llava: Any, journal: DirectoryJournal, red: Any, blue: Any
) -> None:
    """Images of a question that lost to another instance's do not count towards the session's limit."""
    few = {"max_images": 2}
    first = make_client(endless_llava, instance="llava-0", journal=journal, session=few)
    second = make_client(instance="llava-1", journal=journal, session=few)
    sid = first.open(data_url(red))
    hold = Hold(endless_llava)
    asking = first.ask(sid, "what?", images=[data_url(blue)], **SHORT)
    hold.wait()
    second.answer(sid, "and this?", images=[data_url(red)], **SHORT)
    hold.release()

    assert asking.wait().error == "TurnConflict"

    assert first.answer(sid, "why?", **SHORT)
    session = first.session(sid)
    assert (len(session.pending_images), len(session.images)) == (0, 2)


def test_images_that_another_worker_has_added_meanwhile_count_for_a_running_question(
    make_client: Any, endless_llava: Any, journal: DirectoryJournal, red: Any, blue: Any
) -> None:
    """Images that another worker adds during a question count, so that the journal never exceeds a worker's limit."""
    few = {"max_images": 2}
    first = make_client(endless_llava, instance="llava-0", journal=journal, session=few)
    second = make_client(instance="llava-1", journal=journal, session=few)
    sid = first.open(data_url(red))
    add = {"type": "add_images", "session_id": sid, "image": data_url(red)}
    hold = Hold(endless_llava)
    asking = first.ask(sid, "what?", images=[data_url(blue)], **SHORT)
    hold.wait()
    assert second.call(add).status == 200
    assert first.call(add).status == 400  # it has caught up
    hold.release()

    assert (asking.wait().status, asking.json["error"]["message"]) == (400, "a conversation may have 2 images, not 3")

    assert first.answer(sid, "what?", **SHORT)
    assert second.answer(sid, "what?", **SHORT)


def test_what_is_remembered_of_a_session_is_bounded(make_client: Any, journal: DirectoryJournal, red: Any) -> None:
    """A request older than the setting remembers is treated as new."""
    client = make_client(instance="llava-0", journal=journal, journal_settings={"max_replays": 2})
    sid = client.open(data_url(red))
    for text in ("what?", "where?", "why?"):
        client.answer(sid, text, headers=invocation(text), **SHORT)

    tiers = [
        client.ask(sid, text, headers=invocation(text), **SHORT).wait().headers["x-torchmoor-cache-tier"]
        for text in ("where?", "what?")
    ]

    assert tiers == ["answer", "kv"]


@pytest.mark.parametrize("is_journaled", [True, False])
def test_images_that_are_sent_again_are_added_once(
    make_client: Any, journal: DirectoryJournal, red: Any, blue: Any, is_journaled: bool
) -> None:
    client = make_client(instance="llava-0", journal=journal if is_journaled else None)
    sid = client.open(data_url(red))

    for image, key in ((blue, "a"), (blue, "a"), (red, "a"), (blue, "b"), (blue, "a")):
        body = {"type": "add_images", "session_id": sid, "image": data_url(image)}
        assert client.call(body, invocation(key)).json == {"success": True, "images": 1}

    assert len(client.service.store.get(sid, Caller()).pending_images) == 4


def test_images_that_are_sent_again_to_another_instance_are_added_once(
    two_workers: Any, journal: DirectoryJournal, red: Any, blue: Any
) -> None:
    """Images are added once also while the first instance is still adding them, when both write the same number."""
    first, second = two_workers
    sid = first.open(data_url(red))
    body = {"type": "add_images", "session_id": sid, "image": data_url(blue)}
    second.answer(sid, "what?", **SHORT)

    sending = [client.send(body, invocation("a")) for client in (first, second) for _ in range(2)]

    assert [exchange.wait().status for exchange in sending] == [200] * 4
    assert [event.kind for event in journal.read(sid)] == ["open", "turn", "images"]


def known_sessions(two_workers: Any) -> list[Any]:
    return [client.service.known for client in two_workers]


def test_an_opening_that_is_sent_again_is_one_session(two_workers: Any, red: Any) -> None:
    """A repeated opening gets the session that any instance recorded first.

    Another caller, endpoint, request or image is another opening, and so is one without an invocation id.
    """
    first, second = known_sessions(two_workers)
    sids = [client.open(data_url(red)) for client in two_workers]
    caller = Caller("llava", "p1")

    assert first.claim_opening(caller, "id", ("a",), sids[0]) == sids[0]
    assert first.claim_opening(caller, "id", ("a",), sids[0]) == sids[0]
    assert second.claim_opening(caller, "id", ("a",), sids[1]) == sids[0]
    for other in (Caller("llava", "p2"), Caller("other", "p1")):
        assert second.claim_opening(other, "id", ("a",), sids[1]) == sids[1]
    assert second.claim_opening(caller, "id 2", ("a",), sids[1]) == sids[1]
    assert second.claim_opening(caller, "id", ("b",), sids[1]) == sids[1]
    for sid, known in zip(sids, (first, second), strict=True):
        assert known.claim_opening(caller, "", ("a",), sid) == sid


def test_an_opening_that_was_answered_elsewhere_is_not_undone(
    two_workers: Any, journal: DirectoryJournal, red: Any
) -> None:
    """The session stays although the first instance's client left, because the second instance returned its id."""
    first, second = known_sessions(two_workers)
    sids = [client.open(data_url(red)) for client in two_workers]
    first.claim_opening(Caller("", ""), "id", (), sids[0])
    assert second.claim_opening(Caller("", ""), "id", (), sids[1]) == sids[0]

    first.discard(sids[0])
    second.discard(sids[1])

    assert [event.kind for event in journal.read(sids[0])] == ["open"]
    assert journal.read(sids[1]) == []


def test_a_first_answer_whose_client_leaves_at_its_end_is_no_failure(
    make_client: Any, journal: DirectoryJournal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The session that its question has opened is undone, and its journal stays deleted."""
    client = make_client(journal=journal)
    commit = Turn.commit

    def leave_first(turn: Turn, summary: Summary) -> None:
        asked.reply.cancel()
        wait_until(lambda: not journal.list_ids()[0], "the session's journal is deleted")
        commit(turn, summary)

    monkeypatch.setattr(Turn, "commit", leave_first)
    asked = client.send({"inputs": "one", **SHORT}, {SESSION_ID: NEW_SESSION})
    wait_until(lambda: client.service.numbers()["turns"]["failed"] == 1, "the turn has ended")

    assert journal.list_ids() == ([], "")
    assert client.service.numbers()["journal"]["failures"] == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_retry_that_waits_for_the_first_attempt_gets_its_answer(
    make_client: Any, endless_llava: Any, journal: DirectoryJournal
) -> None:
    """The client of the first attempt leaves, which does not end the session for the retry on the same worker."""
    client, hold = make_client(endless_llava, journal=journal), Hold(endless_llava)
    body = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 2}
    headers = {SESSION_ID: NEW_SESSION, **invocation("id")}

    first = client.send(body, headers)
    hold.wait()
    second = client.send(body, headers)
    wait_until(lambda: client.service.store.count_waiting() == 1, "the retry waits")
    first.reply.cancel()
    hold.release()

    assert second.wait().status == 200
    sid = second.headers[SESSION_ID].partition(";")[0]
    assert [event.kind for event in journal.read(sid)] == ["open", "turn"]


def test_a_session_whose_journal_is_deleted_as_it_is_taken_over_is_lost(
    two_workers: Any, journal: DirectoryJournal, red: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its question is not answered as if it were the first one."""
    sid = two_workers[0].open(data_url(red))
    journal.delete(sid)
    monkeypatch.setattr(JournaledSessions, "is_known", lambda known, session_id: True)  # as it was before

    assert two_workers[1].ask(sid, "what is it?", **SHORT).wait().error == "SessionLost"
    assert two_workers[1].service.store.session_ids() == []


def test_an_undone_opening_is_not_taken_over(
    make_client: Any, endless_llava: Any, journal: DirectoryJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session is lost at once, although its journal is deleted later: a request would lose its journal."""
    client, hold = make_client(endless_llava, journal=journal), Hold(endless_llava)
    discard, may_discard = JournaledSessions.discard, threading.Event()

    def discard_late(known: JournaledSessions, session_id: str) -> None:
        assert may_discard.wait(DEADLINE_S)
        discard(known, session_id)

    monkeypatch.setattr(JournaledSessions, "discard", discard_late)
    first = client.send({"inputs": "one", **SHORT}, {SESSION_ID: NEW_SESSION})
    hold.wait()
    [sid] = journal.list_ids()[0]
    first.reply.cancel()
    hold.release()
    wait_until(lambda: client.service.store.session_ids() == [], "the opening is undone")

    assert client.ask(sid, "what is it?", **SHORT).wait().error == "SessionLost"
    may_discard.set()
    wait_until(lambda: not journal.list_ids()[0], "the session's journal is deleted")


def test_a_session_whose_journal_is_deleted_as_its_images_are_read_is_lost(
    two_workers: Any, red: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not a failure of the journal, which operators would look for."""
    sid = two_workers[0].open(data_url(red))
    get_image = DirectoryJournal.get_image

    def delete_first(journal: DirectoryJournal, session_id: str, image: str) -> bytes:
        journal.delete(session_id)
        return get_image(journal, session_id, image)

    monkeypatch.setattr(DirectoryJournal, "get_image", delete_first)

    assert two_workers[1].ask(sid, "what is it?", **SHORT).wait().error == "SessionLost"
    assert two_workers[1].service.numbers()["journal"]["failures"] == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_an_opening_that_was_undone_is_not_answered_elsewhere(
    two_workers: Any, journal: DirectoryJournal, red: Any
) -> None:
    """After an opening is undone, the second instance's own session counts."""
    first, second = known_sessions(two_workers)
    sids = [client.open(data_url(red)) for client in two_workers]
    first.claim_opening(Caller("", ""), "id", (), sids[0])
    first.discard(sids[0])

    assert second.claim_opening(Caller("", ""), "id", (), sids[1]) == sids[1]
    assert journal.read(sids[0]) == []


def test_an_opening_after_an_undone_one_is_found_by_its_retry(two_workers: Any, red: Any) -> None:
    """Of three attempts to open a session, the first is undone, and the third gets the session of the second."""
    first, second = known_sessions(two_workers)
    sids = [client.open(data_url(red)) for client in (*two_workers, two_workers[0])]
    first.claim_opening(Caller("", ""), "id", (), sids[0])
    first.discard(sids[0])
    second.claim_opening(Caller("", ""), "id", (), sids[1])

    assert first.claim_opening(Caller("", ""), "id", (), sids[2]) == sids[1]


def test_openings_of_many_ended_sessions_are_not_claimed(two_workers: Any) -> None:
    """An opening reads a limited number of claims, however many sessions its invocation id has opened before."""
    known = known_sessions(two_workers)[0]
    for _ in range(MAX_CLAIMS):
        sid = two_workers[0].open()
        assert known.claim_opening(Caller("", ""), "id", (), sid) == sid
        known.discard(sid)

    for _ in range(2):
        sid = two_workers[0].open()
        assert known.claim_opening(Caller("", ""), "id", (), sid) == sid


def invocation(key: str) -> dict[str, str]:
    return {"amz-sdk-invocation-id": key}


# Closes


@pytest.mark.parametrize("has_journal", [True, False])
def test_a_close_that_is_sent_again_gets_the_first_answer(make_client: Any, journal: Any, has_journal: bool) -> None:
    """A repeated close gets the first answer; one with another invocation id is an error for a closed session."""
    client = make_client(journal=journal if has_journal else None)
    sid = client.open()
    close = {"type": "close_session", "session_id": sid}
    once = client.call(close, headers={"amz-sdk-invocation-id": "c1"})

    again = client.call(close, headers={"amz-sdk-invocation-id": "c1"})
    other = client.call(close, headers={"amz-sdk-invocation-id": "c2"})
    anonymous = client.call(close)

    assert (once.status, again.json, again.headers) == (200, once.json, once.headers)
    assert (other.error, anonymous.error) == ("SessionClosed", "SessionClosed")
    assert client.service.status()["sessions"]["closed"] == 1


def test_a_close_that_is_sent_again_to_another_instance_gets_the_first_answer(two_workers: Any) -> None:
    """The journal names the request that closed the session."""
    first, second = two_workers
    sid = first.open()
    close = {"type": "close_session", "session_id": sid}
    headers = {"amz-sdk-invocation-id": "c1"}

    assert first.call(close, headers=headers).json == {"success": True}
    assert second.call(close, headers=headers).json == {"success": True}
    assert second.call(close, headers={"amz-sdk-invocation-id": "c2"}).error == "SessionClosed"


def close_request(sid: str) -> dict[str, str]:
    return {"type": "close_session", "session_id": sid}


def test_claims_that_are_forgotten_do_not_change_who_closed(two_workers: Any, tmp_path: Path) -> None:
    """The request that closed a session is known as long as the closed session, even after its claim has expired."""
    first, second = two_workers
    sid = first.open()
    first.call(close_request(sid), headers=invocation("c1"))
    shutil.rmtree(tmp_path / "journal" / "claims", ignore_errors=True)

    assert second.call(close_request(sid), headers=invocation("c2")).error == "SessionClosed"
    assert second.call(close_request(sid), headers=invocation("c1")).json == {"success": True}


def test_a_close_that_failed_does_not_stop_another_one(make_client: Any, tmp_path: Path) -> None:
    """After the journal refuses a close, the next request closes the session."""
    journal = BrokenJournal(tmp_path / "journal", JournalSettings())
    client = make_client(journal=journal)
    sid = client.open()
    journal.is_broken = True
    refused = client.call(close_request(sid), headers=invocation("c1"))
    journal.is_broken = False

    closed = client.call(close_request(sid), headers=invocation("c2"))
    again = client.call(close_request(sid), headers=invocation("c2"))
    late = client.call(close_request(sid), headers=invocation("c1"))

    assert (refused.error, late.error) == ("JournalUnavailable", "SessionClosed")
    assert closed.json == again.json == {"success": True}


@pytest.mark.parametrize("has_journal", [True, False])
def test_of_two_closes_at_once_one_is_answered_with_success(
    make_client: Any, journal: Any, monkeypatch: pytest.MonkeyPatch, has_journal: bool
) -> None:
    """Of two concurrent closes one succeeds, and the other gets the error for a closed session."""
    client = make_client(journal=journal if has_journal else None)
    sid, barrier = client.open(), threading.Barrier(2)
    try_close = client.service.known.try_close

    def meet_and_close(*given: Any) -> bool:
        barrier.wait(20)
        return bool(try_close(*given))

    monkeypatch.setattr(client.service.known, "try_close", meet_and_close)
    both = [client.send(close_request(sid), headers=invocation(name)) for name in ("c1", "c2")]
    errors = sorted(str(exchange.wait().error) for exchange in both)

    assert errors == ["None", "SessionClosed"]
    assert client.service.status()["sessions"]["closed"] == 1
