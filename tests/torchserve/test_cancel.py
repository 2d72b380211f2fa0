"""Clients that disconnect and deadlines that pass, on real TorchServe: work ends, and its capacity is free."""

import http.client
import json
import socket
import threading
import time
from contextlib import closing
from typing import Any

import openai
import pytest
import requests

from tests.torchserve.conftest import SMALL_IN_FLIGHT, Fleet
from tests.torchserve.test_faults import slowed_worker, stopped_worker
from tests.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.torchserve

# With this seed, nearly all tokens are equally likely, and the end token comes late.
ENDLESS = {"max_new_tokens": 1500, "do_sample": True, "temperature": 1e6, "seed": 11}
JSON = {"Content-Type": "application/json"}


def turns(fleet: Fleet) -> dict[str, int]:
    return fleet.status("llava-0")["turns"]


def instance_url(fleet: Fleet) -> str:
    (instance,) = fleet.instances()
    return f"http://{instance['host']}:{instance['port']}/predictions/llava"


def call(url: str, body: Any, **headers: str) -> requests.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return requests.post(url, json=body, headers=named, timeout=60)


def open_session(fleet: Fleet) -> str:
    answer = call(fleet.runtime + "/invocations", {"requestType": "NEW_SESSION"})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["session_id"])


def question(session_id: str, *, stream: bool = False, **fields: Any) -> dict[str, Any]:
    body = {"type": "send_text_prompt", "session_id": session_id, "prompt_text": "hello", "stream": stream}
    return {**body, "parameters": ENDLESS, **fields}


class Leaver:
    """A client that sends a request through the proxy and disconnects on command."""

    def __init__(self, fleet: Fleet, body: dict[str, Any]) -> None:
        self._connection = http.client.HTTPConnection(fleet.runtime.removeprefix("http://"), timeout=60)
        self._answer: http.client.HTTPResponse | None = None
        headers = dict(JSON)
        if "session_id" in body:
            headers["X-Amzn-SageMaker-Session-Id"] = body["session_id"]
        self._connection.request("POST", "/invocations", json.dumps(body), headers)

    def read_some(self) -> None:
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200
        assert self._answer.read(3)

    def leave(self) -> None:
        if self._answer is not None:
            self._answer.close()
        self._connection.close()


def test_rows_of_clients_that_left_are_free(small: Fleet) -> None:
    """Unstreamed answers end when their clients disconnect, and the full worker accepts as many requests again."""
    sessions = [open_session(small) for _ in range(SMALL_IN_FLIGHT)]
    for _ in range(2):
        before = turns(small)
        with slowed_worker(
            small.run_dir, "llava-0"
        ):  # so that no answer ends before all have begun and are ended by their clients
            leavers = [Leaver(small, question(session)) for session in sessions]
            wait_until(lambda: turns(small)["in_progress"] == SMALL_IN_FLIGHT, "all rows taken")
            assert call(instance_url(small), question(sessions[0])).status_code == 429

            for leaver in leavers:
                leaver.leave()

        wait_until(lambda: turns(small)["in_progress"] == 0, "all rows free")
        after = turns(small)
        assert after["cancelled"] - before["cancelled"] == SMALL_IN_FLIGHT
        assert after["finished"] == before["finished"]
    for session in sessions:
        short = question(session, parameters={"max_new_tokens": 2})
        assert call(small.runtime + "/invocations", short, X_Amzn_SageMaker_Session_Id=session).status_code == 200


def test_stream_is_cancelled_by_its_closed_connection(small: Fleet) -> None:
    """A stream's turn ends when its client closes the connection."""
    before = turns(small)
    session = open_session(small)
    with slowed_worker(small.run_dir, "llava-0"):
        leaver = Leaver(small, question(session, stream=True))
        leaver.read_some()
        leaver.leave()

    wait_until(lambda: turns(small)["in_progress"] == 0, "the stream's end")
    assert turns(small)["cancelled"] == before["cancelled"] + 1


def test_openai_stream_that_is_closed_frees_its_row(small: Fleet) -> None:
    """Closing an OpenAI stream, its usual way to stop, frees the row."""
    before = turns(small)
    endless: Any = {"max_tokens": 1500, "temperature": 1e6, "seed": 11, "model": "llava"}
    messages: Any = [{"role": "user", "content": "hello"}]
    with openai.OpenAI(base_url=small.runtime + "/v1", api_key="any", timeout=60, max_retries=0) as gpt:
        with (
            slowed_worker(small.run_dir, "llava-0"),
            gpt.chat.completions.create(messages=messages, stream=True, **endless) as stream,
        ):
            next(stream)
        wait_until(lambda: turns(small)["in_progress"] == 0, "the stream's end")

    after = turns(small)
    assert (after["cancelled"], after["finished"]) == (before["cancelled"] + 1, before["finished"])


def test_question_that_waits_for_its_turn_is_cancelled_there(small: Fleet) -> None:
    """A question that waits behind a running one is cancelled when its client disconnects."""
    before, session = turns(small), open_session(small)
    with slowed_worker(small.run_dir, "llava-0"):
        first = Leaver(small, question(session))
        wait_until(lambda: turns(small)["running"] == 1, "the first turn")
        second = Leaver(small, question(session))
        wait_until(lambda: turns(small)["waiting"] == 1, "the second turn")

        second.leave()

        wait_until(lambda: turns(small)["cancelled"] == before["cancelled"] + 1, "the second turn's end")
        assert turns(small)["running"] == 1
        first.leave()
    wait_until(lambda: turns(small)["in_progress"] == 0, "the first turn's end")


@pytest.mark.parametrize("kind", ["start_session", "send_text_prompt"])
def test_fetch_of_an_image_ends_with_its_client(small: Fleet, kind: str) -> None:
    """Fetching an image ends when its client disconnects, although the server never answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        silent.settimeout(DEADLINE_S)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.png"
        is_opening = kind == "start_session"
        body = {"type": kind, "path": url} if is_opening else question(open_session(small), images=[url])
        leaver = Leaver(small, body)
        connection, _ = silent.accept()

        leaver.leave()

        with connection:
            connection.settimeout(DEADLINE_S)
            while connection.recv(65_536):
                pass
    open_session(small)
    wait_until(lambda: turns(small)["in_progress"] == 0, "the turn's end")


def test_caller_of_a_bare_torchserve_cancels_by_its_own_id(small: Fleet) -> None:
    """Without the proxy, a cancelled request is answered 499 at once, and an unknown id is not an error."""
    url, session, answers = instance_url(small), open_session(small), []
    asking = threading.Thread(
        target=lambda: answers.append(call(url, question(session), X_Torchmoor_Request_Id="7f3a", **endpoint()))
    )
    with slowed_worker(small.run_dir, "llava-0"):
        asking.start()
        wait_until(lambda: turns(small)["running"] == 1, "the turn")

        first = call(url, {"request_ids": ["7f3a", "unknown"]}, X_Torchmoor_Operation="cancel")
    asking.join(DEADLINE_S)
    second = call(url, {"request_ids": ["7f3a"]}, X_Torchmoor_Operation="cancel")

    assert (first.status_code, first.json()) == (200, {"cancelled": 1})
    assert (second.status_code, second.json()) == (200, {"cancelled": 0})
    (answer,) = answers
    assert (answer.status_code, answer.headers["X-Torchmoor-Error"]) == (499, "ClientGone")
    wait_until(lambda: turns(small)["in_progress"] == 0, "the turn's end")


def endpoint() -> dict[str, str]:
    """Return the endpoint; a session belongs to the endpoint that opened it."""
    return {"X_Torchmoor_Endpoint": "llava"}


def test_deadline_of_the_request_ends_its_turn(small: Fleet) -> None:
    """A deadline that passes before any output gives 504; the turn counts as timed out."""
    before, session = turns(small), open_session(small)

    answer = call(instance_url(small), question(session), X_Torchmoor_Timeout_Ms="100", **endpoint())

    assert (answer.status_code, answer.headers["X-Torchmoor-Error"]) == (504, "TurnTimedOut")
    wait_until(lambda: turns(small)["in_progress"] == 0, "the turn's end")
    assert turns(small)["timed_out"] == before["timed_out"] + 1


def test_deadline_of_the_request_ends_its_stream(small: Fleet) -> None:
    """After output, a deadline gives the stream's own form of an error; the worker is stopped until it has passed.

    On a machine too busy to begin the answer before the deadline, the deadline is doubled.
    """
    before, session, num_timed_out = turns(small), open_session(small), 1
    for seconds in (1, 2, 4, 8, 16, 32):
        headers = {"X-Torchmoor-Timeout-Ms": str(1000 * seconds), "X-Torchmoor-Endpoint": "llava"}
        with requests.post(
            instance_url(small), json=question(session, stream=True), headers=headers, stream=True, timeout=60
        ) as answer:
            pieces = answer.iter_content(None)
            received = next(pieces)
            if answer.status_code == 200:
                with stopped_worker(small.run_dir, "llava-0"):
                    time.sleep(seconds)
                received += b"".join(pieces)
                break
            assert (answer.status_code, answer.headers["X-Torchmoor-Error"]) == (504, "TurnTimedOut")
            num_timed_out += 1

    text, _, error = received.partition(b"\x1e")
    assert answer.status_code == 200
    assert text
    assert json.loads(error)["error"]["code"] == "TurnTimedOut"
    wait_until(lambda: turns(small)["in_progress"] == 0, "the turn's end")
    assert turns(small)["timed_out"] == before["timed_out"] + num_timed_out
