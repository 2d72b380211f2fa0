"""The operation `sessions`: operators list, close and pin a worker's sessions."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from handlers.journal.directory import DirectoryJournal
from handlers.settings.journal import JournalSettings
from tests.torchserve.drawings import data_url
from tests.unit.handlers.test_chat_service import Hold, features_bytes
from torchmoor.wire import headers as wire
from torchmoor.wire.session_row import SESSION_FIELDS

SHORT = {"parameters": {"max_new_tokens": 8}}
OPERATION = {"x-torchmoor-operation": "sessions"}


def hash_of(session_id: str) -> str:
    """Return a session's hash, as in the proxy's access log."""
    return hashlib.blake2b(session_id.encode(), digest_size=8).hexdigest()


def operate(client: Any, **body: Any) -> Any:
    return client.call(json.dumps(body).encode(), OPERATION)


def listed(client: Any, **body: Any) -> list[dict[str, Any]]:
    answer = operate(client, **body)
    assert answer.status == 200, answer.body
    return answer.json["sessions"]


def settle(client: Any) -> None:
    """Wait until the engine's thread has done all requested work."""
    client.engine.call(lambda: None).result(30)


def test_session_is_told_by_its_hash_with_what_it_holds(client: Any, clock: Any, red: Any) -> None:
    """The list contains neither the id, which is a credential, nor the conversation."""
    sid = client.open(data_url(red), ttl_s=500)
    opened_at = clock.now
    clock.advance(7)
    client.answer(sid, "what is the secret shape?", **SHORT)
    settle(client)

    answer = operate(client)

    [row] = answer.json["sessions"]
    assert (answer.json["open"], answer.json["next"]) == (1, None)
    assert row["session"] == hash_of(sid)
    assert row.keys() == {"session", *(field.name for field in SESSION_FIELDS)}
    assert (row["tier"], row["turns"], row["images"], row["waiting"]) == ("device", 1, 1, 0)
    assert (row["is_running"], row["is_pinned"]) == (False, False)
    assert (row["opened_at"], row["last_used_at"], row["expires_at"]) == (opened_at, clock.now, int(opened_at + 500))
    status = client.service.status()["memory"]
    assert row["bytes"] == status["kv_bytes"] + status["features_bytes"] + status["host_bytes"]
    assert sid.encode() not in answer.body
    assert b"secret" not in answer.body


def test_tier_is_where_the_next_turn_finds_what_it_needs(
    make_client: Any, tiny_llava: Any, red: Any, blue: Any, tmp_path: Path
) -> None:
    """The tier is that of the blocks, else the farthest of the session's images."""
    limits = {"host_bytes": 1, "features_bytes": features_bytes(tiny_llava)}
    client = make_client(session=limits, journal=DirectoryJournal(tmp_path, JournalSettings()))
    sid = client.open(data_url(red))
    assert [row["tier"] for row in listed(client)] == ["device"]

    other = client.open(data_url(blue))  # takes the memory of the first image's features
    client.call({"type": "close_session", "session_id": other})
    assert [row["tier"] for row in listed(client)] == ["journal"]

    client.answer(sid, "what is it?", **SHORT)
    settle(client)
    assert [row["tier"] for row in listed(client)] == ["device"]
    assert [row["tier"] for row in listed(make_client())] == []


def test_pages_follow_each_other(client: Any) -> None:
    """Pages list each session once, in the order of hashes, which does not change."""
    hashes = sorted(hash_of(client.open()) for _ in range(7))

    found, after = [], ""
    while after is not None:
        page = operate(client, after=after, limit=3).json
        assert len(page["sessions"]) <= 3
        found += [row["session"] for row in page["sessions"]]
        after = page["next"]

    assert found == hashes
    assert [row["session"] for row in listed(client, prefix=hashes[0][:12])] == hashes[:1]


def test_turns_are_counted_however_many_messages_they_have(client: Any) -> None:
    """Items added together count as one turn, and so does a question with the results of several calls."""
    body = {"items": [{"role": role, "content": "a"} for role in ("user", "assistant", "user", "assistant", "user")]}
    talk = client.call(body, {wire.RESOURCE: "POST conversations"}).json["id"]
    client.call(
        {"model": "llava", "input": "b", "conversation": talk, "max_output_tokens": 2},
        {wire.RESOURCE: "POST responses"},
    )

    [row] = listed(client)

    assert row["turns"] == 2


@pytest.mark.parametrize(
    "body",
    [
        {"limit": 0},
        {"limit": 1001},
        {"limit": True},
        {"after": "ts-seq-a"},
        {"prefix": 7},
        {"session": "0" * 16},
        {"action": "drop", "session": "0" * 16},
        {"action": "close"},
        {"action": "close", "session": "ts-seq-abcdefghijklmnop-7fffffff-a-k1aaaaaaaaaaaaaaaaaaaaaaaaaa"},
        {"action": "close", "session": "0" * 16, "limit": 1},
        {"action": "close", "session": "0" * 16, "in_journal": False},
        {"action": "pin", "session": "0" * 16, "in_journal": True},
    ],
)
def test_question_that_makes_no_sense_is_refused(client: Any, body: dict[str, Any]) -> None:
    """An invalid request closes nothing; an id is not a hash."""
    assert operate(client, **body).error == "InvalidRequest"


def test_close_ends_a_running_turn_as_the_clients_own_close_does(make_client: Any, endless_llava: Any) -> None:
    """The running turn gets SessionClosed, its resources are free, and the next question gets the same error."""
    client, hold = make_client(endless_llava), Hold(endless_llava, num_steps=3)
    sid = client.open()
    turn = client.ask(sid, "and on and on", stream=True, headers={"accept": "text/event-stream"})
    turn.wait_until(lambda exchange: bool(exchange.pieces))
    assert [row["is_running"] for row in listed(client)] == [True]

    answer = operate(client, action="close", session=hash_of(sid))
    hold.release()

    assert answer.status == 200
    assert b"this session was closed" in turn.wait().body
    settle(client)
    assert client.ask(sid, "and now?").wait().error == "SessionClosed"
    assert operate(client, action="close", session=hash_of(sid)).error == "SessionUnknown"
    assert client.service.status()["memory"]["kv_bytes"] == 0


def test_closed_session_is_not_brought_back_elsewhere(make_client: Any, red: Any, tmp_path: Path) -> None:
    """The session is also closed in the journal, so that the next instance does not continue it."""
    journal = DirectoryJournal(tmp_path, JournalSettings())
    first, second = make_client(instance="one", journal=journal), make_client(instance="two", journal=journal)
    sid = first.open(data_url(red))
    first.answer(sid, "what is it?", **SHORT)

    assert operate(first, action="close", session=hash_of(sid)).status == 200

    assert second.ask(sid, "and now?").wait().error == "SessionClosed"
    assert not list(tmp_path.rglob("*.png"))


def test_evicted_session_is_closed_through_any_worker(make_client: Any, tmp_path: Path) -> None:
    """Its journal is deleted, and its client learns that it was closed. Without a journal there is no such session."""
    journal = DirectoryJournal(tmp_path, JournalSettings())
    first = make_client(instance="one", journal=journal, session={"max_sessions": 1})
    second = make_client(instance="two", journal=journal)
    sid = first.open()
    other = first.open()
    assert operate(first, action="close", session=hash_of(sid)).error == "SessionUnknown"

    answer = operate(second, action="close", session=hash_of(sid), in_journal=True)

    assert (answer.status, answer.json) == (200, {"session": hash_of(sid)})
    assert first.ask(sid, "and now?").wait().error == "SessionClosed"
    assert operate(second, action="close", session=hash_of(sid), in_journal=True).error == "SessionUnknown"
    assert operate(second, action="close", session="0" * 16, in_journal=True).error == "SessionUnknown"
    assert operate(make_client(), action="close", session=hash_of(other), in_journal=True).error == "SessionUnknown"
    assert operate(first, action="close", session=hash_of(other), in_journal=True).status == 200
    assert listed(first) == []


def test_pinned_session_keeps_its_blocks_while_others_lose_theirs(make_client: Any) -> None:
    """Pinned sessions keep their blocks until unpinned, and can then be evicted."""
    client = make_client(session={"kv_bytes": 512 << 10})
    pool = client.pool
    kept, other = client.open(), client.open()
    for sid in (kept, other):
        client.answer(sid, "hello " * 40, **SHORT)
    settle(client)
    assert operate(client, action="pin", session=hash_of(kept)).json["is_pinned"] is True

    def held() -> dict[str, int]:
        return {session.id.text: session.cache.length for session in client.service.store.snapshot()}

    num_kept = held()[kept]
    pool.release(pool.take(pool.capacity - pool.num_used + 1, None))
    assert held() == {kept: num_kept, other: 0}
    client.answer(kept, "and?", **SHORT)
    settle(client)
    assert held()[kept] > num_kept

    assert operate(client, action="unpin", session=hash_of(kept)).json["is_pinned"] is False
    pool.release(pool.take(pool.capacity - pool.num_used + 1, None))
    assert held() == {kept: 0, other: 0}


def test_pinned_sessions_leave_room_for_others(make_client: Any) -> None:
    """Pinning beyond a part of the cache is refused; a session that grows beyond it loses its pin."""
    client = make_client(session={"kv_bytes": 512 << 10, "max_pinned_fraction": 0.2})
    small, large = client.open(), client.open()
    client.answer(small, "hi", **SHORT)
    client.answer(large, "hello " * 60, **SHORT)
    settle(client)

    assert operate(client, action="pin", session=hash_of(large)).error == "OutOfMemory"
    assert operate(client, action="pin", session=hash_of(small)).status == 200
    client.answer(small, "hello " * 60, **SHORT)
    settle(client)

    assert not any(row["is_pinned"] for row in listed(client))


def test_pinned_session_that_ends_holds_nothing(make_client: Any, clock: Any) -> None:
    """A pinned session that expires or is closed releases everything."""
    client = make_client()
    sids = [client.open(ttl_s=60) for _ in range(2)]
    for sid in sids:
        client.answer(sid, "hello there", **SHORT)
        settle(client)
        assert operate(client, action="pin", session=hash_of(sid)).status == 200

    assert operate(client, action="close", session=hash_of(sids[0])).status == 200
    clock.advance(61)
    client.service.store.expire()

    assert client.service.status()["memory"]["kv_bytes"] == 0
