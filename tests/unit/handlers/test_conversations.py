"""OpenAI's conversations that change while an answer runs in them."""

from typing import Any

import pytest

from handlers.chat.sessions import recorder
from handlers.chat.sessions.session import Session
from tests.unit.handlers.test_background_conversations import BODY, Talk
from tests.unit.handlers.test_chat_service import Hold, data_url
from torchmoor.wire import headers as wire


def test_an_answer_that_items_overtake_names_their_request(make_client: Any, endless_llava: Any) -> None:
    """The answer conflicts, and its error blames another request, because no other instance has answered."""
    talk = Talk(make_client(endless_llava))
    hold = Hold(endless_llava)
    running = talk.ask("one")
    hold.wait()
    added = talk.send(f"POST conversations/{talk.id}/items", {"items": [{"role": "user", "content": "two"}]}).wait()
    hold.release()

    answer = running.wait()

    assert (added.status, answer.status, answer.error) == (200, 409, "TurnConflict")
    assert answer.json["error"]["message"] == "another request has changed the conversation meanwhile; send this again"
    assert talk.said() == ["two"]


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_conversation_that_is_deleted_while_an_answer_runs_is_not_found(
    make_client: Any, endless_llava: Any, is_streaming: bool
) -> None:
    """The answer's client gets the error that every later request gets, and no word of a session."""
    talk = Talk(make_client(endless_llava))
    body = {**BODY, "conversation": talk.id, "input": "one", "max_output_tokens": 100, "stream": is_streaming}
    hold = Hold(endless_llava, num_steps=10)
    running = talk.send("POST responses", body)
    hold.wait()
    if is_streaming:
        running.wait_until(lambda each: b"delta" in each.body)
    assert talk.send(f"DELETE conversations/{talk.id}").wait().status == 200
    hold.release()

    answer = running.wait()

    assert f"Conversation with id '{talk.id}' not found." in answer.body.decode()
    assert b"session" not in answer.body
    if not is_streaming:
        assert (answer.status, answer.json["error"]["code"]) == (404, "not_found")
    assert talk.send(f"GET conversations/{talk.id}").wait().status == 404
    assert wire.CLOSED_SESSION_ID not in answer.headers


def test_a_response_that_is_deleted_while_another_follows_it_is_not_found(
    make_client: Any, red: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follow-up that is not stored repeats the response's image; if that is gone, so is the response."""
    client = make_client()
    image = {"type": "input_image", "image_url": data_url(red)}
    body = {**BODY, "input": [{"role": "user", "content": [image]}], "max_output_tokens": 2}
    first = client.call(body, {wire.RESOURCE: "POST responses"}).json["id"]
    read = recorder.entries_of

    def delete_first(session: Session, num_entries: int) -> Any:
        client.service.store.close(session)
        return read(session, num_entries)

    monkeypatch.setattr(recorder, "entries_of", delete_first)
    follow_up = {**BODY, "input": "and?", "previous_response_id": first, "store": False}
    answer = client.call(follow_up, {wire.RESOURCE: "POST responses"})

    assert (answer.status, answer.json["error"]["param"]) == (404, "previous_response_id")
