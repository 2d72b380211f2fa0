"""The operation `end-closed`: a worker frees sessions that another instance has closed."""

import json
from pathlib import Path
from typing import Any

import pytest

from handlers.journal.directory import DirectoryJournal
from handlers.settings.journal import JournalSettings
from tests.unit.handlers.test_chat_service import data_url, holds_nothing

SHORT = {"parameters": {"max_new_tokens": 12}}


def end_closed(client: Any, *session_ids: str) -> Any:
    return client.call(json.dumps({"session_ids": session_ids}).encode(), {"x-torchmoor-operation": "end-closed"})


def test_session_that_was_closed_elsewhere_is_freed_on_request(two_workers: Any, red: Any) -> None:
    """The worker that held the session before frees its memory, also if an operator has pinned it there."""
    first, second = two_workers
    sid, unknown = first.open(data_url(red)), second.open()
    first.answer(sid, "what is it?", **SHORT)
    first.service.queues.pin(first.service.store.find(sid))
    second.answer(sid, "what color?", **SHORT)
    assert second.call({"type": "close_session", "session_id": sid}).status == 200

    answer = end_closed(first, sid, unknown)

    assert (answer.status, answer.json) == (200, {"ended": 1})
    assert holds_nothing(first)
    assert first.ask(sid, "and now?").wait().error == "SessionClosed"
    assert end_closed(first, sid).json == {"ended": 0}


def test_session_that_is_still_open_is_not_freed(two_workers: Any, red: Any) -> None:
    """A session that is open in the journal is kept, whatever the proxy believes."""
    first, _ = two_workers
    sid = first.open(data_url(red))

    assert end_closed(first, sid).json == {"ended": 0}

    assert first.service.store.holds(sid)
    assert first.answer(sid, "what is it?", **SHORT)


def test_session_stays_while_the_journal_cannot_say_whether_it_is_closed(make_client: Any, tmp_path: Path) -> None:
    client = make_client(journal=DirectoryJournal(tmp_path / "journal", JournalSettings()))
    sid = client.open()
    (tmp_path / "journal").rename(tmp_path / "away")

    assert end_closed(client, sid).error == "JournalUnavailable"

    assert client.service.store.holds(sid)


def test_journal_that_fails_for_one_session_keeps_no_other(two_workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of the journal for one session does not affect others in the same operation.

    An instance that comes back gets hundreds of closes at once.
    """
    first, second = two_workers
    unreadable, closed = first.open(), first.open()
    second.call({"type": "close_session", "session_id": closed})
    read = DirectoryJournal.read

    def fail_for_one(journal: DirectoryJournal, session_id: str, *window: Any, **options: Any) -> Any:
        if session_id == unreadable:
            raise OSError(5, "Input/output error")
        return read(journal, session_id, *window, **options)

    monkeypatch.setattr(DirectoryJournal, "read", fail_for_one)

    assert end_closed(first, unreadable, closed).error == "JournalUnavailable"

    assert first.service.store.holds(unreadable)
    assert not first.service.store.holds(closed)


@pytest.mark.parametrize("ids", ["ts-seq-a", [1], ["a"] * 1001, None])
def test_list_of_closed_sessions_is_checked(make_client: Any, ids: Any) -> None:
    body = json.dumps({"session_ids": ids}).encode()

    assert make_client().call(body, {"x-torchmoor-operation": "end-closed"}).error == "InvalidRequest"
