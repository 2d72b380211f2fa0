"""Responses in the background: a request that comes twice, and clients that follow when the session ends."""

import json
import re
import threading
from contextlib import closing
from typing import Any

import pytest
from PIL import Image

from handlers.chat.feed import AnswerFeed
from tests.torchserve.drawings import encoded
from tests.unit.handlers.test_chat_cancel import PATIENT, SilentServer
from tests.unit.handlers.test_chat_service import Hold
from torchmoor.wire import background
from torchmoor.wire import headers as wire

WRITE = {
    "type": "function",
    "name": "write",
    "parameters": {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 60, "maxLength": 80}},
        "required": ["text"],
        "additionalProperties": False,
    },
}
RETRIED = {wire.RESOURCE: "POST responses", wire.INVOCATION_ID: "one-id"}


def events_of(stream: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: {")]


def test_a_retry_during_the_fetch_of_an_image_queues_nothing_more(make_client: Any, red: Image.Image) -> None:
    """The request and its retry have the same response, which was queued once and has the image once."""
    data = encoded(red)
    client = make_client(intake={**PATIENT, "fetch_threads": 4})
    with closing(SilentServer()) as server:
        image = {"type": "input_image", "image_url": server.url}
        body = {"model": "llava", "background": True, "input": [{"role": "user", "content": [image]}]}
        sent = [client.send(body, RETRIED) for _ in range(2)]
        connections = [server.accept() for _ in sent]
        for connection in connections:
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
                connection.recv(1)

    first, second = (each.wait().json for each in sent)

    assert first == second
    assert first["status"] == "queued"
    items = client.call({}, {wire.RESOURCE: f"GET responses/{first['id']}/input_items"}).json["data"]
    assert [part["type"] for item in items for part in item["content"]] == ["input_image"]
    (session,) = client.service.store.snapshot()
    assert len(session.pending_images) == 1


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_retry_of_an_answered_response_needs_no_queue(make_client: Any, is_streamed: bool) -> None:
    """A streamed retry gets the whole stream without the header that has the proxy queue the response.

    Only the queue has a response generated, so an answered one was queued already. The object is that of the first
    answer, as OpenAI's clients poll it, and names the response, which the queue knows.
    """
    client = make_client()
    body = {"model": "llava", "background": True, "input": "hello", "max_output_tokens": 4, "stream": is_streamed}
    first = client.send(body, RETRIED)
    first.wait_until(lambda each: b"resp_" in each.body)
    [response_id] = set(re.findall(rb"resp_[\w-]+", first.body))
    assert client.call({}, {wire.RESOURCE: background.run_resource(response_id.decode())}).status == 200

    again = client.call(body, RETRIED)

    assert set(re.findall(rb"resp_[\w-]+", again.body)) == {response_id}
    assert again.headers.get(wire.BACKGROUND) == (None if is_streamed else response_id.decode())
    if is_streamed:
        assert events_of(again.body) == events_of(first.wait().body)
    assert len(client.service.store.snapshot()) == 1


def test_a_reason_that_is_not_unicode_is_refused(make_client: Any) -> None:
    """The response stays open to a later end, and its stream too."""
    client = make_client()
    body = {"model": "llava", "background": True, "input": "hello"}
    response_id = client.call(body, {wire.RESOURCE: "POST responses"}).json["id"]
    following = client.send({}, {wire.RESOURCE: f"GET responses/{response_id}?stream=true"})
    ending = {wire.RESOURCE: background.end_resource(response_id)}

    refused = client.call({"status": "failed", "message": "half a pair: \ud83d"}, ending)
    ended = client.call({"status": "failed", "message": "too long"}, ending)

    assert (refused.status, refused.json["error"]["param"]) == (400, "message")
    assert (ended.status, ended.json["error"]["message"]) == (200, "too long")
    assert events_of(following.wait().body)[-1]["type"] == "response.failed"


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("ContextTooLong", "invalid_prompt"),
        ("InvalidRequest", "invalid_prompt"),
        ("TurnTimedOut", "server_error"),
        ("", "server_error"),
        (None, "server_error"),
        ([], "server_error"),
    ],
)
def test_a_failed_response_says_whether_its_request_is_the_reason(make_client: Any, code: Any, shown: str) -> None:
    """Clients that see `server_error` may try again."""
    client = make_client()
    body = {"model": "llava", "background": True, "input": "hello"}
    response_id = client.call(body, {wire.RESOURCE: "POST responses"}).json["id"]
    ending = {"status": "failed", "message": "why", **({} if code is None else {"code": code})}

    client.call(ending, {wire.RESOURCE: background.end_resource(response_id)})

    ended = client.call({}, {wire.RESOURCE: f"GET responses/{response_id}"}).json
    assert (ended["status"], ended["error"]) == ("failed", {"code": shown, "message": "why"})


def test_another_attempt_has_the_same_ids_of_calls(make_client: Any, endless_llava: Any, clock: Any) -> None:
    """Another attempt uses the same call ids, because a client that follows sends results under the first ids."""
    client = make_client(endless_llava)
    body = {"model": "llava", "background": True, "input": "hello", "max_output_tokens": 150}
    body |= {"tools": [WRITE], "tool_choice": "required", "parallel_tool_calls": False}
    response_id = client.call(body, {wire.RESOURCE: "POST responses"}).json["id"]
    following = client.send({}, {wire.RESOURCE: f"GET responses/{response_id}?stream=true"})
    run = {wire.RESOURCE: background.run_resource(response_id)}
    hold = Hold(endless_llava, num_steps=50)
    first = client.send({}, run)
    hold.wait()
    following.wait_until(lambda each: b'"call_id"' in each.body)
    first.reply.cancel()
    hold.release()
    clock.advance(1)

    assert client.call({}, run).status == 200

    (call,) = client.call({}, {wire.RESOURCE: f"GET responses/{response_id}"}).json["output"]
    assert call["type"] == "function_call"
    assert set(re.findall(rb'"call_id": ?"([^"]+)"', following.wait().body)) == {call["call_id"].encode()}


def test_an_attempt_that_waits_for_another_leaves_its_stream_whole(
    make_client: Any, endless_llava: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds the answer recorded, and both attempts succeed, although it begins before the first one's last event."""
    client = make_client(endless_llava)
    body = {"model": "llava", "background": True, "input": "hello", "max_output_tokens": 8}
    response_id = client.call(body, {wire.RESOURCE: "POST responses"}).json["id"]
    following = client.send({}, {wire.RESOURCE: f"GET responses/{response_id}?stream=true"})
    run = {wire.RESOURCE: background.run_resource(response_id), wire.INVOCATION_ID: "one-id"}
    hold, has_begun, has_ended = Hold(endless_llava), threading.Event(), threading.Event()
    begin, end = AnswerFeed.begin, AnswerFeed.end

    def begin_early(feed: AnswerFeed, *args: Any) -> None:
        begin(feed, *args)
        has_begun.set()
        assert has_ended.wait(30)

    def end_late(feed: AnswerFeed, *args: Any) -> None:
        monkeypatch.setattr(AnswerFeed, "end", end)
        assert has_begun.wait(30)
        end(feed, *args)
        has_ended.set()

    attempts = [client.send({}, run) for _ in range(2)]
    hold.wait()
    monkeypatch.setattr(AnswerFeed, "begin", begin_early)
    monkeypatch.setattr(AnswerFeed, "end", end_late)
    hold.release()

    assert [each.wait().status for each in attempts] == [200, 200]
    shown = client.call({}, {wire.RESOURCE: f"GET responses/{response_id}"}).json
    events = events_of(following.wait().body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (events[-1]["type"], events[-1]["response"]) == ("response.incomplete", shown)


def test_a_token_of_an_earlier_attempt_that_is_read_late_counts_once(
    make_client: Any, endless_llava: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that reads it for a client passes it on when the next attempt has begun."""
    client = make_client(endless_llava)
    body = {"model": "llava", "background": True, "input": "hello", "max_output_tokens": 8}
    queued, undisturbed = (client.call(body, {wire.RESOURCE: "POST responses"}).json["id"] for _ in range(2))
    following = client.send({}, {wire.RESOURCE: f"GET responses/{queued}?stream=true"})
    hold = Hold(endless_llava, num_steps=3)
    is_reading, may_add = threading.Event(), threading.Event()
    begin, add = AnswerFeed.begin, AnswerFeed.add

    def begin_noted(feed: AnswerFeed, *args: Any) -> None:
        begin(feed, *args)
        may_add.set()

    def add_late(feed: AnswerFeed, *args: Any) -> None:
        monkeypatch.setattr(AnswerFeed, "add", add)
        is_reading.set()
        assert may_add.wait(30)
        add(feed, *args)

    first = client.send({}, {wire.RESOURCE: background.run_resource(queued)})
    hold.wait()
    monkeypatch.setattr(AnswerFeed, "begin", begin_noted)
    monkeypatch.setattr(AnswerFeed, "add", add_late)
    reading = threading.Thread(target=following.read)
    reading.start()
    assert is_reading.wait(30)
    first.reply.cancel()
    second = client.send({}, {wire.RESOURCE: background.run_resource(queued)})
    hold.release()

    assert (second.wait().status, following.wait().status) == (200, 200)
    reading.join()
    assert client.call({}, {wire.RESOURCE: background.run_resource(undisturbed)}).status == 200
    texts = [
        client.call({}, {wire.RESOURCE: f"GET responses/{each}"}).json["output"][0]["content"][0]["text"]
        for each in (queued, undisturbed)
    ]
    assert texts[0] == texts[1]


def expire(client: Any, clock: Any, response_id: str) -> None:
    clock.advance(10 * 24 * 3600)
    client.service.store.expire()


def delete(client: Any, clock: Any, response_id: str) -> None:
    assert client.call({}, {wire.RESOURCE: f"DELETE responses/{response_id}"}).status == 200


@pytest.mark.parametrize("end", [expire, delete])
def test_a_client_that_follows_learns_of_the_end_of_the_session(make_client: Any, clock: Any, end: Any) -> None:
    """A client that follows gets an error as soon as the session ends, not at its deadline."""
    client = make_client()
    body = {"model": "llava", "background": True, "input": "hello"}
    response_id = client.call(body, {wire.RESOURCE: "POST responses"}).json["id"]
    following = client.send({}, {wire.RESOURCE: f"GET responses/{response_id}?stream=true"})
    following.wait_until(lambda each: b"response.queued" in each.body)

    end(client, clock, response_id)

    assert b"this response was deleted or has expired" in following.wait().body


def test_texts_of_what_is_queued_are_bounded(make_client: Any) -> None:
    """The texts of queued responses count while the session holds them, however the responses end."""
    client = make_client(session={"max_history_chars": 5_000, "max_total_history_chars": 5_000})
    body = {"model": "llava", "background": True, "input": "x" * 2_000}

    answers = [client.call(body, {wire.RESOURCE: "POST responses"}) for _ in range(2)]
    longer = client.call({**body, "input": "x" * 5_000}, {wire.RESOURCE: "POST responses"})

    assert [(each.status, each.error) for each in (*answers, longer)] == [
        (200, None),
        (429, "Overloaded"),
        (400, "ContextTooLong"),
    ]
    assert len(client.service.store) == 1
