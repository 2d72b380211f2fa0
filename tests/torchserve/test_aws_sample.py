"""The request sequence of AWS's own LLaVA sample, sent with boto3 like its notebook, and the failures of each step."""

import json
import re
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.torchserve.conftest import Fleet
from tests.waiting import wait_until

pytestmark = pytest.mark.torchserve


class Notebook:
    """Send a payload, and read only the answer's body and the session's header."""

    def __init__(self, fleet: Fleet) -> None:
        self.client = fleet.client()

    def invoke(self, payload: dict[str, Any], session_id: str | None = None) -> Any:
        arguments = {} if session_id is None else {"SessionId": session_id}
        answer = self.client.invoke_endpoint(
            EndpointName="llava", Body=json.dumps(payload), ContentType="application/json", **arguments
        )
        return json.loads(answer["Body"].read().decode("utf-8"))

    def start(self, path: str, **more: Any) -> str:
        answer = self.invoke({"type": "start_session", "path": path, **more}, "NEW_SESSION")
        assert list(answer) == ["session_id"]
        return str(answer["session_id"])

    def ask(self, session_id: str, text: str) -> str:
        payload = {"type": "send_text_prompt", "session_id": session_id, "prompt_text": text}
        answer = self.invoke(payload, session_id)
        assert list(answer) == ["response_text"]
        return str(answer["response_text"])

    def close(self, session_id: str) -> Any:
        return self.invoke({"type": "close_session", "session_id": session_id}, session_id)

    def refusal(self, payload: dict[str, Any], session_id: str | None = None) -> str:
        """Return an error's code and message."""
        with pytest.raises(ClientError) as caught:
            self.invoke(payload, session_id)
        return f"{caught.value.response['Error']['Code']}: {caught.value.response['Error']['Message']}"


@pytest.fixture
def notebook(fleet: Fleet) -> Notebook:
    return Notebook(fleet)


def test_notebook_runs_from_start_to_close(notebook: Notebook, picture_server: str) -> None:
    """The id from the body serves as the session's in header and body; the image is sent once, as an address."""
    session_id = notebook.start(f"{picture_server}/circle.png")

    assert session_id.startswith("ts-seq-")
    assert notebook.ask(session_id, "What color is the circle?") == "The circle is red."
    assert "circle" in notebook.ask(session_id, "What shape is this?")
    assert notebook.close(session_id) == {"success": True}


def test_session_is_found_by_the_id_in_the_body_alone(notebook: Notebook, picture_server: str) -> None:
    """Without sticky routing, any instance takes the session over by the id in the body."""
    session_id = notebook.start(f"{picture_server}/circle.png")
    payload = {"type": "send_text_prompt", "session_id": session_id, "prompt_text": "What color is the circle?"}

    answers = [notebook.invoke(payload)["response_text"] for _ in range(4)]

    assert all("red" in answer for answer in answers)
    assert notebook.invoke({"type": "close_session", "session_id": session_id}) == {"success": True}


def test_every_failing_step_has_its_own_message(notebook: Notebook, picture_server: str) -> None:
    """Closed, expired and unknown sessions and forbidden addresses have different messages, unlike in the sample."""
    circle = f"{picture_server}/circle.png"
    closed, expired, live = notebook.start(circle), notebook.start(circle, ttl_s=1), notebook.start(circle)
    notebook.close(closed)
    wait_until(lambda: not can_be_asked(notebook, expired), "the session's end")
    forged = live[:-1] + ("b" if live[-1] == "a" else "a")
    ask = {"type": "send_text_prompt", "prompt_text": "What color is the circle?"}

    def start(path: str) -> dict[str, str]:
        return {"type": "start_session", "path": path}

    for payload, session_id, error in (
        ({**ask, "session_id": closed}, closed, "ValidationError: this session was closed; open a new one"),
        ({"type": "close_session"}, closed, "ValidationError: this session was closed; open a new one"),
        ({**ask, "session_id": expired}, expired, "ValidationError: this session has expired; open a new one"),
        ({**ask, "session_id": forged}, forged, "ValidationError: The session id is not valid"),
        ({**ask, "session_id": closed}, live, "ValidationError: the session id in the header and the one in the body"),
        (ask, None, "ModelError: .*there is no session id: give 'session_id'"),
        ({"type": "send_text_prompt"}, live, "ModelError: .*'prompt_text' must be a text"),
        ({**ask, "type": "send_prompt"}, live, "ModelError: .*'type' must be one of start_session"),
        (start(f"{picture_server}/gone.png"), "NEW_SESSION", "ModelError: .*answered with status 404"),
        (start(f"{picture_server}/text.png"), "NEW_SESSION", "ModelError: .*not an image of a known format"),
        (start("http://169.254.169.254/"), "NEW_SESSION", "ModelError: .*leads to a private or local network"),
        (start(circle), live, "ModelError: .*a session is opened without an id"),
    ):
        told = notebook.refusal(payload, session_id)
        assert re.match(error, told), told
    assert "red" in notebook.ask(live, "What color is the circle?")
    notebook.close(live)


def can_be_asked(notebook: Notebook, session_id: str) -> bool:
    try:
        notebook.ask(session_id, "What color is the circle?")
    except ClientError:
        return False
    return True
