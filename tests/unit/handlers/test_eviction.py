"""Eviction: a full worker with a journal evicts idle sessions and continues them at their next request."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from handlers.errors import HandlerError
from handlers.journal.journal import Journal
from handlers.journal.url import open_journal
from handlers.requests.incoming import Caller
from handlers.requests.reply import PendingReply
from handlers.settings.journal import JournalSettings
from tests.servers import BUCKET
from tests.torchserve.drawings import data_url
from tests.unit.handlers.conftest import Exchange, make_incoming
from tests.waiting import DEADLINE_S

SHORT = {"parameters": {"max_new_tokens": 12}}
KINDS = (
    "directory",
    pytest.param("valkey", marks=pytest.mark.redis),
    pytest.param("s3", marks=pytest.mark.s3),
)


@pytest.fixture(params=KINDS)
def journal(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    """Return an empty journal."""
    if request.param == "directory":
        url = tmp_path.as_uri()
    elif request.param == "valkey":
        url = request.getfixturevalue("redis_server").url
    else:
        request.getfixturevalue("s3_server").use_in(monkeypatch)
        url = f"s3://{BUCKET}/{uuid4().hex}"
    journal = open_journal(JournalSettings(url=url), tombstone_s=3600)
    assert journal is not None
    return journal


def test_a_full_worker_evicts_forgotten_sessions_and_answers_them_again(
    make_client: Any, journal: Any, red: Any
) -> None:
    """A worker for two sessions keeps six conversations: each continues under its id, and its receipt says how."""
    client = make_client(journal=journal, session={"max_sessions": 2})
    sids = [client.open(data_url(red)) for _ in range(6)]
    asked = [client.ask(sid, "what is it?", **SHORT).wait() for sid in sids]
    again = [client.ask(sid, "and its color?", **SHORT).wait() for sid in reversed(sids)]

    assert [answer.status for answer in (*asked, *again)] == [200] * 12
    assert {answer.json["response_text"] for answer in asked} == {asked[0].json["response_text"]}
    assert {answer.json["response_text"] for answer in again} == {again[0].json["response_text"]}
    assert asked[0].headers["x-torchmoor-rebuilt-events"] == "1"
    assert again[-1].headers["x-torchmoor-rebuilt-events"] == "2"
    sessions = client.service.status()["sessions"]
    assert (sessions["open"], sessions["opened"]) == (2, 6)
    assert sessions["evicted"] == sessions["adopted"] + 4
    listed = client.call({}, {"x-torchmoor-operation": "sessions"}).json
    assert (listed["open"], listed["evicted"]) == (2, sessions["evicted"])


class LateReply(PendingReply):
    """A reply whose worker thread continues, after it has begun the answer, only when the test lets it."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self.may_continue = threading.Event()

    def on_cancel(self, action: Callable[[HandlerError], None]) -> None:
        super().on_cancel(action)
        if threading.current_thread().name.startswith("intake"):
            assert self.may_continue.wait(DEADLINE_S)


@pytest.mark.parametrize("kind", ["question", "response", "conversation"])
def test_a_session_is_evicted_as_soon_as_its_client_has_the_answer(make_client: Any, journal: Any, kind: str) -> None:
    """The session does not count as busy while the thread that began its answer still runs."""
    client = make_client(journal=journal, session={"max_sessions": 1})
    body: dict[str, Any] = {"model": "m", "input": "what?", "max_output_tokens": 4}
    headers = {"x-torchmoor-resource": "POST responses"}
    if kind == "question":
        sid = client.open()
        body, headers = {"type": "send_text_prompt", "session_id": sid, "prompt_text": "what?", **SHORT}, {}
        other = client.open()
    elif kind == "response":
        body["previous_response_id"] = client.call(body, headers).json["id"]
        other = client.open()
        client.answer(other, "what?", **SHORT)
    else:
        body["conversation"] = client.call({}, {"x-torchmoor-resource": "POST conversations"}).json["id"]
        other = client.open()
    late = Exchange()
    late.reply = LateReply(late.reply.wake)

    client.service.start(make_incoming(headers, body), late.reply)
    first = late.wait()
    second = client.ask(other, "what?", **SHORT).wait()
    late.reply.may_continue.set()

    assert (first.status, second.status) == (200, 200), (first.body, second.body)


def test_an_evicted_session_is_closed_without_being_adopted(make_client: Any, journal: Any, red: Any) -> None:
    """The close needs only the journal, and the session stays closed."""
    client = make_client(journal=journal, session={"max_sessions": 1})
    sid = client.open(data_url(red))
    client.open()

    assert client.call({"type": "close_session", "session_id": sid}).status == 200

    assert client.service.status()["sessions"]["adopted"] == 0
    assert client.ask(sid, "what?").wait().error == "SessionClosed"


def test_a_question_to_an_evicted_session_that_is_sent_again_gets_its_answer(
    make_client: Any, journal: Any, red: Any
) -> None:
    """The recorded answer outlives the eviction."""
    client = make_client(journal=journal, session={"max_sessions": 1})
    sid = client.open(data_url(red))
    headers = {"amz-sdk-invocation-id": "0b3a"}
    once = client.ask(sid, "what is it?", headers=headers, **SHORT).wait()
    client.open()

    again = client.ask(sid, "what is it?", headers=headers, **SHORT).wait()

    assert again.json == once.json
    assert again.headers["x-torchmoor-cache-tier"] == "answer"


def test_images_for_an_evicted_session_are_added(make_client: Any, journal: Any, red: Any, blue: Any) -> None:
    """The session is adopted, the image joins it, and the next question sees both."""
    client = make_client(journal=journal, session={"max_sessions": 1})
    sid = client.open(data_url(red))
    client.open()

    added = client.call({"type": "add_images", "session_id": sid, "image": data_url(blue)})

    assert added.json == {"success": True, "images": 1}
    assert len(client.service.store.get(sid, Caller()).pending_images) == 2


@pytest.mark.parametrize(
    "journal",
    [
        "directory",
        pytest.param("valkey", marks=[pytest.mark.redis, pytest.mark.slow]),
        pytest.param("s3", marks=[pytest.mark.s3, pytest.mark.slow]),
    ],
    indirect=True,
)
def test_sessions_are_evicted_while_their_next_turns_arrive(make_client: Any, journal: Any) -> None:
    """Many threads share a worker for three sessions: every question is answered, in the order of its session."""
    client = make_client(journal=journal, session={"max_sessions": 3})
    sids = [client.open() for _ in range(9)]

    def ask(sid: str, text: str) -> Any:
        while (answer := client.ask(sid, text, **SHORT).wait()).error == "Overloaded":
            time.sleep(0.01)  # all three sessions were busy at that moment
        return answer

    def talk(sid: str) -> list[Any]:
        return [ask(sid, f"question {number}") for number in range(4)]

    with ThreadPoolExecutor(9) as clients:
        answers = list(clients.map(talk, sids))

    assert {answer.status for each in answers for answer in each} == {200}
    for sid, each in zip(sids, answers, strict=True):
        recorded = [event for event in journal.read(sid) if event.kind == "turn"]
        assert [event.question for event in recorded] == [f"question {number}" for number in range(4)]
        assert [event.answer for event in recorded] == [answer.json["response_text"] for answer in each]


def test_a_clock_that_jumps_forward_for_a_while_ends_no_session(make_client: Any, journal: Any, clock: Any) -> None:
    """A worker with a wrong clock forgets a session as if it had expired, and continues it once the clock is right."""
    client = make_client(journal=journal)
    sid = client.open()
    client.answer(sid, "what?", **SHORT)
    clock.advance(5000)
    assert client.ask(sid, "and now?", **SHORT).wait().error == "SessionExpired"
    client.service.store.expire()
    clock.advance(-5000)

    answer = client.ask(sid, "and now?", **SHORT).wait()

    assert (answer.status, answer.headers["x-torchmoor-rebuilt-events"]) == (200, "2")


def test_a_session_that_comes_back_finds_its_features(make_client: Any, journal: Any, red: Any, blue: Any) -> None:
    """Eviction keeps an image's features until their memory is needed, so that adoption does not compute them again."""
    client = make_client(journal=journal, session={"max_sessions": 1})
    sid = client.open(data_url(red))
    client.open(data_url(blue))
    encoded = client.service.status()["images"]["encoded"]

    answer = client.ask(sid, "what is it?", **SHORT).wait()

    assert answer.headers["x-torchmoor-rebuilt-events"] == "1"
    assert client.service.status()["images"]["encoded"] == encoded == 2


def test_another_instance_adopts_an_evicted_session(make_client: Any, journal: Journal, red: Any) -> None:
    """The conversation continues there and, after a further eviction, here."""
    first, second = (
        make_client(instance=name, journal=journal, session={"max_sessions": 1}) for name in ("llava-0", "llava-1")
    )
    sid = first.open(data_url(red))
    first.answer(sid, "what is it?", **SHORT)
    first.open()

    there = second.ask(sid, "and its color?", **SHORT).wait()
    back = first.ask(sid, "are you sure?", **SHORT).wait()

    assert (there.status, there.headers["x-torchmoor-rebuilt-events"]) == (200, "2")
    assert (back.status, back.headers["x-torchmoor-rebuilt-events"]) == (200, "3")
    assert [event.kind for event in journal.read(sid)] == ["open", "turn", "turn", "turn"]
