"""GET /v1/files: a caller's own files, in pages, with a journal and without."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handlers.chat.sessions.recorder import SessionRecorder
from handlers.chat.sessions.session import Session
from handlers.journal.directory import DirectoryJournal
from handlers.models.llava import LlavaModel
from handlers.settings.journal import JournalSettings
from tests.unit.handlers.conftest import Client, FakeClock, ServiceFactory
from tests.unit.handlers.test_resource_bounds import png
from torchmoor.wire import headers as wire


def ask(client: Client, resource: str, caller: str = "alice", body: Any = None) -> Any:
    return client.call(body, {wire.RESOURCE: resource, wire.PRINCIPAL: caller})


def keep(client: Client, clock: FakeClock, caller: str = "alice", purpose: bytes = b"vision") -> str:
    answer = ask(client, "POST files", caller, {"file": png("red"), "purpose": purpose})
    assert answer.status == 200, answer.body
    clock.advance(1)
    return str(answer.json["id"])


def pages(client: Client, query: str) -> Iterator[list[str]]:
    """Yield the ids of each page, as OpenAI's client reads them."""
    after, has_more = "", True
    while has_more:
        page = ask(client, f"GET files?{query}{after}").json
        ids = [file["id"] for file in page["data"]]
        assert (page["object"], page["first_id"], page["last_id"]) == ("list", ids[0], ids[-1])
        yield ids
        after, has_more = f"&after={ids[-1]}", page["has_more"]


@pytest.fixture(params=["journal", "memory"])
def client(
    request: pytest.FixtureRequest, make_client: ServiceFactory, demo_llava: LlavaModel, tmp_path: Path
) -> Client:
    has_journal = request.param == "journal"
    return make_client(demo_llava, journal=DirectoryJournal(tmp_path, JournalSettings()) if has_journal else None)


def upload(client: Client, **fields: Any) -> Any:
    lifetime = {f"expires_after[{name}]": value for name, value in fields.items()}
    return ask(client, "POST files", body={"file": png("red"), "purpose": b"vision", **lifetime})


def test_a_file_that_is_deleted_while_it_is_read_is_unknown(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client learns that there is no such file, as if it had asked a moment later."""
    made = upload(client).json
    read = SessionRecorder.read_image

    def close_and_read(recorder: SessionRecorder, session: Session, *args: Any) -> bytes:
        client.service.store.close(session)
        return read(recorder, session, *args)

    monkeypatch.setattr(SessionRecorder, "read_image", close_and_read)

    assert ask(client, f"GET files/{made['id']}/content").status == 404


def test_a_file_lives_as_long_as_its_upload_asks(make_client: ServiceFactory, clock: FakeClock) -> None:
    """expires_after sets the file's time to live, up to what operators allow; expires_at is when the file ends."""
    client = make_client(session={"ttl_s": 7200, "max_ttl_s": 8000})

    for seconds, allowed in ((b"3600", 3600), (b"2592000", 8000)):
        made = upload(client, anchor=b"created_at", seconds=seconds).json
        assert made["expires_at"] - made["created_at"] == allowed
        assert ask(client, f"GET files/{made['id']}").json == made
        clock.advance(allowed - 1)
        assert ask(client, f"GET files/{made['id']}").status == 200
        clock.advance(1)
        assert ask(client, f"GET files/{made['id']}").status == 404
    made = upload(client).json
    assert made["expires_at"] - made["created_at"] == 7200


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"seconds": b"3600"}, "anchor"),
        ({"anchor": b"last_active_at", "seconds": b"3600"}, "anchor"),
        ({"anchor": b"created_at"}, "seconds"),
        ({"anchor": b"created_at", "seconds": b"3599"}, "seconds"),
        ({"anchor": b"created_at", "seconds": b"2592001"}, "seconds"),
        ({"anchor": b"created_at", "seconds": b"1e4"}, "seconds"),
        ({"anchor": b"created_at", "seconds": b'{"a": 1}'}, "seconds"),  # whatever its Content-Type, a part is bytes
    ],
    ids=str,
)
def test_a_wrong_time_to_live_is_refused(make_client: ServiceFactory, fields: dict[str, Any], field: str) -> None:
    answer = upload(make_client(), **fields)

    assert (answer.status, answer.json["error"]["param"]) == (400, f"expires_after[{field}]")


def test_pages_have_each_file_once_and_in_order(client: Client, clock: FakeClock) -> None:
    """Each file is on one page, newest first unless order is asc; the last page is marked as such."""
    ids = [keep(client, clock) for _ in range(5)]

    assert list(pages(client, "limit=2&order=asc")) == [ids[:2], ids[2:4], ids[4:]]
    assert list(pages(client, "limit=5")) == [ids[::-1]]
    assert list(pages(client, "limit=10000")) == [ids[::-1]]
    assert ask(client, f"GET files/{ids[0]}").json in ask(client, "GET files").json["data"]


def test_files_of_one_second_are_in_the_order_of_their_uploads(client: Client, clock: FakeClock) -> None:
    """A script uploads several files within a second."""
    ids = []
    for _ in range(8):
        answer = ask(client, "POST files", body={"file": png("red"), "purpose": b"vision"})
        ids.append(answer.json["id"])
        clock.advance(0.01)

    assert list(pages(client, "limit=3&order=asc")) == [ids[:3], ids[3:6], ids[6:]]
    assert list(pages(client, "limit=8")) == [ids[::-1]]


def test_a_caller_sees_no_other_ones_files(client: Client, clock: FakeClock) -> None:
    own, others = keep(client, clock), keep(client, clock, "bob")

    assert [own] == [file["id"] for file in ask(client, "GET files").json["data"]]
    assert [others] == [file["id"] for file in ask(client, "GET files", "bob").json["data"]]
    assert ask(client, "GET files", "carol").json["data"] == []


def test_what_has_ended_is_not_listed(client: Client, clock: FakeClock) -> None:
    """Deleted and expired files are not listed; a page may continue after a file that was deleted meanwhile."""
    ids = [keep(client, clock) for _ in range(3)]
    assert ask(client, f"DELETE files/{ids[1]}").status == 200

    assert list(pages(client, "")) == [[ids[2], ids[0]]]
    assert [ids[0]] == [file["id"] for file in ask(client, f"GET files?after={ids[1]}").json["data"]]
    clock.advance(3600 - 2)
    assert list(pages(client, "")) == [[ids[2]]]


def test_a_purpose_selects_files(client: Client, clock: FakeClock) -> None:
    ids = [keep(client, clock, purpose=purpose) for purpose in (b"vision", b"user_data", b"vision")]

    assert list(pages(client, "purpose=vision&limit=1&order=asc")) == [[ids[0]], [ids[2]]]
    assert list(pages(client, "purpose=user_data")) == [[ids[1]]]
    assert ask(client, "GET files?purpose=batch").json["data"] == []


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("c.png", "c.png"),
        ("Gr%C3%B6%C3%9Fe%20%E6%97%A5.png", "Größe 日.png"),
        ("..%2Fup%5Cc.png", "c.png"),
        ("a%0D%0Ab%00%ff.png", "ab.png"),
        ("x" * 300, "x" * 255),
        ("%20", "picture"),
        ("", "picture"),
        (None, "picture"),
    ],
)
def test_a_file_has_the_name_that_was_uploaded(client: Client, given: str | None, shown: str) -> None:
    """The name, which the proxy sends percent-encoded, is shown as a plain file name without a path."""
    headers = {wire.RESOURCE: "POST files", **({} if given is None else {wire.FORM_FILENAME: given})}
    made = client.call({"file": png("red"), "purpose": b"vision"}, headers)

    assert made.json["filename"] == shown
    assert client.call(None, {wire.RESOURCE: f"GET files/{made.json['id']}"}).json == made.json
    assert client.call(None, {wire.RESOURCE: "GET files"}).json["data"] == [made.json]


def test_a_wrong_purpose_is_refused_with_those_that_are_accepted(client: Client) -> None:
    answer = ask(client, "POST files", body={"file": png("red"), "purpose": b"batch"})

    assert (answer.status, answer.json["error"]["param"]) == (400, "purpose")
    assert "vision or user_data" in answer.json["error"]["message"]


@pytest.mark.parametrize("query", ["limit=0", "limit=10001", "limit=x", "order=up", "after=x", "after=file-x"])
def test_bad_queries_are_refused_by_name(client: Client, query: str) -> None:
    answer = ask(client, f"GET files?{query}")

    assert (answer.status, answer.json["error"]["param"]) == (400, query.partition("=")[0])


def test_another_worker_lists_what_the_journal_has(
    make_client: ServiceFactory, clock: FakeClock, tmp_path: Path
) -> None:
    """Another worker lists the journal's files without reading them, and skips entries of other programs."""
    first, second = (make_client(journal=DirectoryJournal(tmp_path, JournalSettings())) for _ in range(2))
    ids = [keep(first, clock), keep(first, clock)]
    [folder] = (tmp_path / "listed").iterdir()
    [entry, _] = folder.iterdir()
    (folder / entry.name.replace("-local-", "-other-")).touch()
    (folder / "x").touch()

    assert list(pages(second, "")) == [ids[::-1]]
    assert second.service.store.session_ids() == []
    first_events = sorted(tmp_path.glob("ts-seq-*/00000000"))
    first_events[0].write_bytes(b"{}")
    assert len(ask(second, "GET files").json["data"]) == 1


def test_a_question_in_a_files_session_leaves_the_file(client: Client, clock: FakeClock) -> None:
    """The answer to an upload names its session; a question in this session does not change the file."""
    file_id = keep(client, clock)
    content = ask(client, f"GET files/{file_id}/content").body
    session_id = "ts-seq-" + file_id.removeprefix("file-")
    asked = client.ask(session_id, "What color is it?", headers={wire.PRINCIPAL: "alice"}).wait()
    assert (asked.status, "red" in asked.json["response_text"]) == (200, True)

    picture = {"type": "input_image", "file_id": file_id}
    body = {"model": "llava", "input": [{"role": "user", "content": [picture]}], "max_output_tokens": 2}
    answers = [ask(client, f"GET files/{file_id}/content"), ask(client, "POST responses", body=body)]

    assert [each.status for each in answers] == [200, 200]
    assert answers[0].body == content
