"""The example of a model in one file bounds what it keeps."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from examples import notebook_handler
from examples.notebook_handler import NotebookHandler


class Context:
    """The part of TorchServe's context that the handler uses, for one request."""

    def __init__(self, session: str) -> None:
        self.status = 200
        self._headers = {"X-Amzn-SageMaker-Session-Id": session}

    def get_all_request_header(self, number: int) -> dict[str, str]:
        return self._headers

    def set_response_content_type(self, number: int, text: str) -> None: ...

    def set_response_header(self, number: int, name: str, text: str) -> None: ...

    def set_response_status(self, code: int, phrase: str, number: int) -> None:
        self.status = code


class Notebook:
    """The handler with a method to send requests."""

    def __init__(self) -> None:
        self._handler = NotebookHandler()
        self._handler.initialize(None)

    def ask(self, session: str, **request: Any) -> tuple[int, Any]:
        context = Context(session)
        [answer] = self._handler.handle([{"body": json.dumps(request).encode()}], context)
        return context.status, json.loads(answer)

    def open(self) -> tuple[int, str]:
        status, answer = self.ask("NEW_SESSION", type="start_session")
        return status, answer.get("session_id", "")


def test_sessions_that_nobody_closed_make_room_when_they_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expired sessions free their capacity although clients never close them."""
    monkeypatch.setattr(notebook_handler, "MAX_SESSIONS", 2)
    now = 1000.0
    monkeypatch.setattr(notebook_handler, "time", SimpleNamespace(time=lambda: now))
    notebook = Notebook()
    assert [notebook.open()[0] for _ in range(3)] == [200, 200, 503]

    now += notebook_handler.TTL_S + 1

    status, session = notebook.open()
    assert status == 200
    assert notebook.ask(session, type="add", note="the kettle is blue") == (200, {"notes": 1})


def test_a_missing_field_is_named() -> None:
    """A request of another API, such as one of `torchmoor ask`, gets an error that says what it lacks."""
    status, answer = Notebook().ask("NEW_SESSION", requestType="NEW_SESSION")

    assert status == 400
    assert answer["error"]["message"] == "the field 'type' is missing"


def test_a_sessions_notes_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The notes of a session are limited in size, so that one client cannot use all the memory."""
    monkeypatch.setattr(notebook_handler, "MAX_NOTES", 1)
    notebook = Notebook()
    _, session = notebook.open()

    assert notebook.ask(session, type="add", note="one")[0] == 200
    assert notebook.ask(session, type="add", note="two")[0] == 400
