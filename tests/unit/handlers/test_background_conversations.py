"""Responses in the background in a conversation: they reserve an entry, and their turns are added once or never."""

import json
from typing import Any

import pytest

from handlers.chat.sessions.recorder import SessionRecorder
from handlers.chat.turns.placed_images import PlacedImages
from handlers.chat.turns.turn import Turn
from handlers.journal.directory import DirectoryJournal
from tests.unit.handlers.test_chat_service import Hold, data_url
from tests.waiting import wait_until
from torchmoor.wire import background, operations
from torchmoor.wire import headers as wire
from torchmoor.wire.response_ids import read_conversation_id, read_response_id

BODY: dict[str, Any] = {"model": "llava", "max_output_tokens": 8}
CHANGED = "the conversation has changed since this response began; ask again"


class Talk:
    """A conversation, as clients and the proxy's queue use it. client: of the worker that gets the next request."""

    def __init__(self, client: Any, text: str = "") -> None:
        self.client = client
        self.id = text or client.call({}, {wire.RESOURCE: "POST conversations"}).json["id"]

    def on(self, client: Any) -> "Talk":
        return Talk(client, self.id)

    def send(self, resource: str, body: Any = None, **headers: str) -> Any:
        return self.client.send(body or {}, {wire.RESOURCE: resource, **headers})

    def get(self, path: str) -> Any:
        return self.send(f"GET {path}").wait().json

    def queue(self, said: Any, invocation_id: str = "", **options: Any) -> str:
        body = {**BODY, "background": True, "conversation": self.id, "input": said, **options}
        named = {wire.INVOCATION_ID: invocation_id} if invocation_id else {}
        answer = self.send("POST responses", body, **named).wait()
        assert (answer.status, answer.json["status"]) == (200, "queued"), answer.body
        assert wire.NEW_SESSION_ID not in answer.headers
        assert answer.headers[wire.BACKGROUND] == answer.json["id"]
        assert answer.json["conversation"] == {"id": self.id}
        return str(answer.json["id"])

    def run(self, response_id: str) -> Any:
        """Send the request with which the queue runs a response."""
        return self.send(background.run_resource(response_id))

    def ask(self, said: Any, invocation_id: str = "") -> Any:
        named = {wire.INVOCATION_ID: invocation_id} if invocation_id else {}
        return self.send("POST responses", {**BODY, "conversation": self.id, "input": said}, **named)

    def end(self, response_id: str) -> None:
        body = {background.STATUS: background.FAILED, background.MESSAGE: "too long"}
        assert self.send(background.end_resource(response_id), body).wait().status == 200

    def state(self, response_id: str) -> str:
        return str(self.get(f"responses/{response_id}")["status"])

    def items(self) -> list[dict[str, Any]]:
        return self.get(f"conversations/{self.id}/items?order=asc&limit=100")["data"]

    def said(self) -> list[str]:
        """Return the texts of the user's items."""
        return [item["content"][0]["text"] for item in self.items() if item["role"] == "user"]


def about(picture: Any) -> list[dict[str, Any]]:
    """Return an input with a text and an image."""
    shown = {"type": "input_image", "image_url": data_url(picture)}
    return [{"role": "user", "content": [{"type": "input_text", "text": "what?"}, shown]}]


def turns_in(journal: DirectoryJournal, talk: Talk) -> list[str]:
    place = read_conversation_id(talk.id)
    return [event.entry for event in journal.read(place.session_id) if event.kind == "turn"]


def test_the_turn_is_added_once_however_often_the_queue_asks(make_client: Any, journal: DirectoryJournal) -> None:
    """Repeated requests of the queue, also at another worker, add the turn once and get a waiting request's answer."""
    talk, direct = Talk(make_client(instance="llava-0", journal=journal)), Talk(make_client())
    response_id = talk.queue("hello")
    assert (talk.state(response_id), talk.items()) == ("queued", [])

    first, second = talk.run(response_id), talk.run(response_id)
    elsewhere = talk.on(make_client(instance="llava-1", journal=journal))
    ended = [first.wait(), second.wait(), talk.run(response_id).wait(), elsewhere.run(response_id).wait()]

    assert [each.status for each in ended] == [200] * 4
    assert turns_in(journal, talk) == ["1"]
    shown, expected = talk.get(f"responses/{response_id}"), direct.ask("hello").wait().json
    assert shown["output"][0]["content"] == expected["output"][0]["content"]
    assert talk.items() == elsewhere.items()
    assert [item["id"] for item in talk.items()[1:]] == [item["id"] for item in shown["output"]]
    assert elsewhere.get(f"responses/{response_id}") == shown


def test_turns_are_in_the_order_in_which_they_begin(make_client: Any, endless_llava: Any) -> None:
    """Turns are added in the order in which they begin; one that arrives during another waits for it."""
    talk = Talk(make_client(endless_llava))
    before = talk.queue("one")
    late = talk.queue("three")
    hold = Hold(endless_llava)
    running = talk.run(before)
    hold.wait()
    waiting = talk.ask("two")
    assert (talk.state(before), talk.state(late)) == ("in_progress", "queued")
    hold.release()
    assert (running.wait().status, waiting.wait().status, talk.run(late).wait().status) == (200, 200, 200)

    assert talk.said() == ["one", "two", "three"]
    assert waiting.json["usage"]["input_tokens"] < talk.get(f"responses/{late}")["usage"]["input_tokens"]
    assert [read_response_id(each).number for each in (before, late, waiting.json["id"])] == [1, 2, 3]
    branch = talk.send("POST responses", {**BODY, "input": "and", "previous_response_id": waiting.json["id"]}).wait()
    direct = Talk(talk.client)
    for text in ("one", "two"):
        direct.ask(text).wait()
    assert branch.json["usage"]["input_tokens"] == direct.ask("and").wait().json["usage"]["input_tokens"]


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_what_ends_without_an_answer_adds_nothing(make_client: Any, red: Any, *, is_cancelled: bool) -> None:
    """Neither input nor images; the conversation goes on, and the response shows why it ended."""
    talk, direct = Talk(make_client()), Talk(make_client())
    picture = {"type": "input_image", "image_url": data_url(red)}
    response_id = talk.queue([{"role": "user", "content": [{"type": "input_text", "text": "what?"}, picture]}])
    if is_cancelled:
        assert talk.send(f"POST responses/{response_id}/cancel").wait().json["status"] == "cancelled"
    else:
        talk.end(response_id)

    ended = talk.run(response_id).wait()

    assert (ended.status, ended.error) == (409, "ResponseCancelled")
    assert talk.state(response_id) == ("cancelled" if is_cancelled else "failed")
    assert talk.ask("hello").wait().json["usage"] == direct.ask("hello").wait().json["usage"]
    assert talk.said() == ["hello"]
    (session,) = talk.client.service.store.snapshot()
    assert (session.pending_images, session.images) == ([], [])


def test_an_image_waits_for_its_own_question(make_client: Any, journal: DirectoryJournal, red: Any) -> None:
    """Only the response's own turn gets its image, also at a worker that takes the conversation over."""
    first = make_client(instance="llava-0", journal=journal)
    talk, direct = Talk(first), Talk(make_client())
    asked = about(red)
    response_id = talk.queue(asked)
    between = talk.ask("hello").wait().json
    assert between["usage"] == direct.ask("hello").wait().json["usage"]
    talk = talk.on(make_client(instance="llava-1", journal=journal))
    again = talk.ask("hello").wait().json
    assert again["usage"]["input_tokens"] == direct.ask("hello").wait().json["usage"]["input_tokens"]

    assert talk.run(response_id).wait().status == 200

    seen = talk.get(f"responses/{response_id}")["usage"]["input_tokens"]
    assert seen == direct.ask(asked).wait().json["usage"]["input_tokens"]
    (session,) = talk.client.service.store.snapshot()
    assert (len(session.pending_images), len(session.images)) == (0, 1)


def test_a_turn_about_the_same_image_has_its_own(make_client: Any, journal: DirectoryJournal, red: Any) -> None:
    """A worker that takes the conversation over gives the response its image, although a turn has the same one."""
    talk = Talk(make_client(instance="llava-0", journal=journal))
    response_id = talk.queue(about(red))
    assert talk.ask(about(red)).wait().status == 200
    talk = talk.on(make_client(instance="llava-1", journal=journal))

    assert talk.ask("hello").wait().status == 200
    assert talk.run(response_id).wait().status == 200

    (session,) = talk.client.service.store.snapshot()
    assert (len(session.pending_images), len(session.images)) == (0, 2)


def test_a_turn_that_another_worker_answers_leaves_a_response_its_image(
    make_client: Any, endless_llava: Any, journal: DirectoryJournal, red: Any
) -> None:
    """If another worker answers a turn, the response keeps its own image, even if both sent the same one."""
    talk = Talk(make_client(endless_llava, instance="llava-0", journal=journal))
    elsewhere = talk.on(make_client(instance="llava-1", journal=journal))
    response_id = talk.queue(about(red))
    hold = Hold(endless_llava)
    asked = talk.ask(about(red), "one-id")
    hold.wait()
    assert elsewhere.ask(about(red), "one-id").wait().status == 200
    hold.release()

    assert asked.wait().status == 200

    (session,) = talk.client.service.store.snapshot()
    assert (len(session.pending_images), len(session.images)) == (1, 1)
    assert talk.run(response_id).wait().status == 200
    assert (len(session.pending_images), len(session.images)) == (0, 2)


def test_a_cancel_stops_its_own_turn_and_no_other(make_client: Any, endless_llava: Any) -> None:
    """A cancelled response ends before its answer is recorded; the turn of another request goes on."""
    talk = Talk(make_client(endless_llava))
    response_id = talk.queue("one")
    hold = Hold(endless_llava)
    asked = talk.ask("two")
    hold.wait()
    waiting = talk.run(response_id)

    cancelled = talk.send(f"POST responses/{response_id}/cancel").wait().json

    assert (cancelled["status"], waiting.wait().error) == ("cancelled", "ResponseCancelled")
    hold.release()
    assert (asked.wait().status, talk.said()) == (200, ["two"])


def test_a_cancel_stops_all_attempts(make_client: Any, endless_llava: Any) -> None:
    """The one that generates the answer does not go on to its end because another one has come."""
    talk = Talk(make_client(endless_llava))
    response_id = talk.queue("one", max_output_tokens=1500)
    hold = Hold(endless_llava)
    attempts = [talk.run(response_id) for _ in range(2)]
    hold.wait()
    wait_until(lambda: talk.client.service.store.count_waiting() == 1, "the second attempt waits")
    assert talk.state(response_id) == "in_progress"

    cancelled = talk.send(f"POST responses/{response_id}/cancel").wait().json
    hold.release()

    assert cancelled["status"] == "cancelled"
    assert [each.wait().error for each in attempts] == ["ResponseCancelled"] * 2
    assert endless_llava.num_steps < 100


def test_a_cancel_before_its_turn_waits_ends_it_too(
    make_client: Any, endless_llava: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response that is cancelled before its turn is queued does not wait for the turn before it."""
    talk = Talk(make_client(endless_llava))
    response_id = talk.queue("one")
    hold = Hold(endless_llava)
    asked = talk.ask("two")
    hold.wait()
    start = Turn.start

    def start_late(turn: Turn) -> None:
        talk.send(f"POST responses/{response_id}/cancel").wait()
        start(turn)

    monkeypatch.setattr(Turn, "start", start_late)
    assert talk.run(response_id).wait().error == "ResponseCancelled"
    hold.release()
    assert (asked.wait().status, talk.said()) == (200, ["two"])


def test_a_cancel_before_its_image_is_used_ends_it(make_client: Any, red: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image stays as long as the turn needs it, although the conversation has forgotten it."""
    talk = Talk(make_client())
    response_id = talk.queue(about(red))
    pin = PlacedImages.pin

    def pin_late(*args: Any) -> Any:
        talk.send(f"POST responses/{response_id}/cancel").wait()
        return pin(*args)

    monkeypatch.setattr(PlacedImages, "pin", pin_late)

    assert talk.run(response_id).wait().error == "ResponseCancelled"
    assert talk.state(response_id) == "cancelled"
    (session,) = talk.client.service.store.snapshot()
    assert (session.pending_images, session.images) == ([], [])
    assert len(talk.client.service.images) == 0


def test_a_conversation_that_is_deleted_while_its_image_is_read_is_not_known(
    make_client: Any, journal: DirectoryJournal, red: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker has read that the conversation has the image, but not yet the image itself."""
    talk = Talk(make_client(instance="llava-0", journal=journal))
    assert talk.ask(about(red)).wait().status == 200
    elsewhere = talk.on(make_client(instance="llava-1", journal=journal))
    get_image = journal.get_image

    def get_late(session_id: str, image: str) -> bytes:
        assert talk.send(f"DELETE conversations/{talk.id}").wait().status == 200
        return get_image(session_id, image)

    monkeypatch.setattr(journal, "get_image", get_late)
    asked = elsewhere.ask("hello").wait()

    assert (asked.status, asked.json["error"]["code"]) == (404, "not_found")
    assert elsewhere.client.service.counters.get("journal_failures") == 0


@pytest.mark.parametrize("has_queued", [True, False])
def test_items_that_come_as_an_operator_closes_their_conversation_are_refused(
    make_client: Any, red: Any, monkeypatch: pytest.MonkeyPatch, *, has_queued: bool
) -> None:
    """Without a journal, too, where the close frees the images that they bring, and those of other requests."""
    talk = Talk(make_client())
    (session,) = talk.client.service.store.snapshot()
    close = {operations.ACTION: operations.CLOSE, operations.SESSION: session.hash}
    if has_queued:
        talk.queue(about(red))
    add = SessionRecorder.add

    def add_late(*args: Any) -> None:
        assert talk.client.call(close, {wire.OPERATION: operations.SESSIONS}).status == 200
        add(*args)

    monkeypatch.setattr(SessionRecorder, "add", add_late)
    added = talk.send(f"POST conversations/{talk.id}/items", {"items": about(red)}).wait()

    assert (added.status, added.json["error"]["code"]) == (404, "not_found")
    assert len(talk.client.service.images) == 0


def test_a_cancel_at_another_worker_wins_over_an_answer(
    make_client: Any, endless_llava: Any, journal: DirectoryJournal
) -> None:
    """A response that is cancelled at another worker is cancelled, although its answer completes later."""
    talk = Talk(make_client(endless_llava, instance="llava-0", journal=journal))
    elsewhere = talk.on(make_client(instance="llava-1", journal=journal))
    response_id = talk.queue("one")
    hold = Hold(endless_llava)
    running = talk.run(response_id)
    hold.wait()

    assert elsewhere.send(f"POST responses/{response_id}/cancel").wait().json["status"] == "cancelled"
    hold.release()

    assert running.wait().error == "ResponseCancelled"
    assert (turns_in(journal, talk), talk.state(response_id)) == ([], "cancelled")


@pytest.mark.parametrize("is_changed", [True, False])
def test_a_worker_that_is_lost_leaves_the_conversation_free(
    make_client: Any, endless_llava: Any, journal: DirectoryJournal, *, is_changed: bool
) -> None:
    """The next attempt gives the same answer, or fails as a turn would if another turn was recorded meanwhile."""
    lost = Talk(make_client(endless_llava, instance="llava-0", journal=journal))
    talk = lost.on(make_client(instance="llava-1", journal=journal))
    response_id = lost.queue("one")
    hold = Hold(endless_llava)
    running = lost.run(response_id)
    hold.wait()

    if is_changed:
        assert talk.ask("two").wait().status == 200
    retried = talk.run(response_id).wait()
    hold.release()
    late = running.wait()

    if is_changed:
        assert (retried.error, json.loads(retried.body)["error"]["message"]) == ("TurnConflict", CHANGED)
        assert (late.error, talk.said()) == ("TurnConflict", ["two"])
        talk.end(response_id)
        assert (talk.state(response_id), talk.ask("three").wait().status) == ("failed", 200)
    else:
        assert (retried.status, late.status) == (200, 200)
    assert len(turns_in(journal, talk)) == (2 if is_changed else 1)


def test_a_retry_queues_nothing_more(make_client: Any, journal: DirectoryJournal) -> None:
    """A retry queues nothing at any worker; another request with the same text makes another response."""
    talk = Talk(make_client(instance="llava-0", journal=journal))
    elsewhere = talk.on(make_client(instance="llava-1", journal=journal))

    first = talk.queue("hello", "one-id")

    assert elsewhere.queue("hello", "one-id") == first
    assert len({first, talk.queue("hello", "another"), talk.queue("hello"), talk.queue("hello")}) == 4


@pytest.mark.parametrize("resource", ["responses", "conversations/{}/items"])
def test_a_retry_that_two_workers_record_at_once_is_one_request(
    make_client: Any, journal: DirectoryJournal, monkeypatch: pytest.MonkeyPatch, resource: str
) -> None:
    """If two workers record a retry at once, the second one gives the first one's answer."""
    talk = Talk(make_client(instance="llava-0", journal=journal))
    elsewhere = talk.on(make_client(instance="llava-1", journal=journal))
    body: dict[str, Any] = {"items": [{"role": "user", "content": "hello"}]}
    if resource == "responses":
        body = {**BODY, "background": True, "conversation": talk.id, "input": "hello"}
    append, answers = journal.append, []

    def send(by: Talk) -> None:
        answers.append(by.send(f"POST {resource}".format(talk.id), body, **{wire.INVOCATION_ID: "one-id"}).wait())

    def append_second(*args: Any) -> None:
        monkeypatch.setattr(journal, "append", append)
        send(elsewhere)
        append(*args)

    monkeypatch.setattr(journal, "append", append_second)
    send(talk)

    assert [answer.status for answer in answers] == [200, 200]
    assert answers[0].json == answers[1].json


def test_a_deleted_response_leaves_its_conversation(make_client: Any) -> None:
    """A response that its client deletes, or that the queue refuses, leaves its conversation.

    An answered one stays a turn.
    """
    talk = Talk(make_client())
    deleted, refused, answered = talk.queue("one"), talk.queue("two"), talk.queue("three")
    assert talk.run(answered).wait().status == 200
    (session,) = talk.client.service.store.snapshot()
    close = {operations.ACTION: operations.CLOSE, operations.SESSION: session.hash, operations.ENTRY: 2}

    assert talk.client.call(close, {"x-torchmoor-operation": operations.SESSIONS}).status == 200
    for response_id in (deleted, answered):
        assert talk.send(f"DELETE responses/{response_id}").wait().json["deleted"]

    for response_id in (deleted, refused, answered):
        assert talk.send(f"GET responses/{response_id}").wait().status == 404
        assert talk.run(response_id).wait().status == 404
    assert talk.said() == ["three"]
    wrong = {**close, operations.ACTION: operations.PIN}
    assert talk.client.call(wrong, {"x-torchmoor-operation": operations.SESSIONS}).error == "InvalidRequest"


def test_clients_follow_their_own_response(make_client: Any) -> None:
    """A stream has the events of one response, with the ids that the conversation shows."""
    talk = Talk(make_client())
    body = {**BODY, "background": True, "conversation": talk.id, "stream": True}
    streams = [talk.send("POST responses", {**body, "input": text}) for text in ("one", "two")]
    for each in streams:
        each.wait_until(lambda stream: b"response.queued" in stream.body)

    for each in streams[::-1]:
        assert talk.run(each.headers[wire.BACKGROUND]).wait().status == 200

    for each in streams:
        events = [json.loads(line[6:]) for line in each.wait().body.splitlines() if line.startswith(b"data: {")]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        last = events[-1]["response"]
        assert last == talk.get(f"responses/{each.headers[wire.BACKGROUND]}")
        assert {item["id"] for item in last["output"]} <= {item["id"] for item in talk.items()}
    assert talk.said() == ["two", "one"]
