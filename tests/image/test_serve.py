"""The role `serve`, used over HTTP as SageMaker does: without root, on a read-only file system, from a tar.gz."""

import http.client
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import requests

from tests.podman import ROOT, Container, Podman
from tests.torchserve.drawings import data_url, draw
from tests.waiting import wait_until
from torchmoor.cli.model_archive import package
from torchmoor.fleet.ports import find_free_ports

pytestmark = [pytest.mark.image, pytest.mark.slow, pytest.mark.timeout(1800)]
SESSION = "X-Amzn-SageMaker-Session-Id"
GRACE_S = 30  # between SageMaker's SIGTERM and its SIGKILL
LOW, HIGH = 30_000, 30_400  # a safe range below the ephemeral ports and above those of other tests
LONG = {"inputs": "Once", "stream": True}
LONG_PARAMETERS = {"max_new_tokens": 1200, "do_sample": True, "temperature": 1e6, "seed": 6}


@dataclass
class Served:
    """A container and its address."""

    container: Container
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def invoke(self, body: dict[str, Any], session: str | None = None) -> requests.Response:
        headers = {} if session is None else {SESSION: session}
        return requests.post(f"{self.url}/invocations", json=body, headers=headers, timeout=120)

    @contextmanager
    def stream(self, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        """Return a response of which only the head was read."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)) as connection:
            connection.request("POST", "/invocations", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200
            yield answer

    def pings(self) -> tuple[int, bytes] | None:
        """Return the status and body of a ping; None if the connection is refused."""
        with suppress(requests.ConnectionError):
            answer = requests.get(f"{self.url}/ping", timeout=30)
            return answer.status_code, answer.content
        return None


@pytest.fixture(scope="module")
def served(podman: Podman, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Run the container as strict platforms do: user 10001, no capabilities, only /tmp writable."""
    folder = tmp_path_factory.mktemp("serve")
    model = folder / "model"
    model.mkdir()
    package(ROOT / "models" / "tiny-llava", model / "model.tar.gz")
    [port] = find_free_ports(1)
    with podman.start(
        image,
        "serve",
        log=folder / "serve.log",
        options=("--read-only", "--cap-drop=all", "--user=10001", "--tmpfs=/tmp", "--memory=3g"),
        environment={"SAGEMAKER_BIND_TO_PORT": str(port), "SAGEMAKER_SAFE_PORT_RANGE": f"{LOW}-{HIGH}"},
        mounts={model: "/opt/ml/model"},
    ) as container:
        yield Served(container, port)


def test_ping_is_answered_before_the_model_is_there_and_says_so(served: Served) -> None:
    """A ping is answered within SageMaker's 2 s while the model still loads."""

    def first_ping() -> tuple[int, bytes] | None:
        assert served.container.process.poll() is None, served.container.log[-4000:]
        return served.pings()

    wait_until(first_ping, "the container listens")
    assert served.pings() == (503, b"")
    served.container.wait_until_ok(f"{served.url}/ping")
    assert served.pings() == (200, b"")


def test_a_session_by_headers(served: Served) -> None:
    """A session is opened, used and closed by an endpoint's headers; response headers carry the session."""
    opened = served.invoke({"type": "start_session", "path": data_url(draw("circle", "red"))}, "NEW_SESSION")
    session, _, expires = opened.headers[SESSION].partition("; Expires=")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", expires)
    assert opened.json() == {"session_id": session}

    question = {"type": "send_text_prompt", "prompt_text": "What color is the circle?"}
    assert served.invoke(question, session).json() == {"response_text": "The circle is red."}

    closed = served.invoke({"type": "close_session"}, session)
    assert closed.headers["X-Amzn-SageMaker-Closed-Session-Id"] == session
    assert served.invoke(question, session).status_code == 410


def test_a_streamed_answer_comes_in_chunks(served: Served) -> None:
    """An answer is streamed in HTTP chunks, which become SageMaker's PayloadParts, and pings are answered meanwhile."""
    with served.stream({**LONG, "parameters": LONG_PARAMETERS}) as answer:
        assert answer.headers["Transfer-Encoding"] == "chunked"
        pieces = [answer.read1()]
        assert served.pings() == (200, b"")
        while piece := answer.read1():
            pieces.append(piece)

    assert len(pieces) > 2
    assert b'"finish_reason"' in b"".join(pieces)


def test_metrics_are_on_the_same_port(served: Served) -> None:
    """One port serves the metrics of the proxy and of the instance's handler."""
    page = requests.get(f"{served.url}/metrics", timeout=60).text

    assert 'Invocations_total{endpoint="chat"' in page
    assert "torchmoor_sessions_open{" in page


def test_the_runtime_api_is_there_too(served: Served) -> None:
    """The runtime API serves the checkpoint's endpoint under the name chat."""
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 4}}
    answer = requests.post(f"{served.url}/endpoints/chat/invocations", json=body, timeout=120)

    assert answer.status_code == 200
    assert answer.headers["x-Amzn-Invoked-Production-Variant"] == "AllTraffic"


def test_only_the_safe_ports_are_taken(served: Served) -> None:
    """The container listens on the safe ports only; SageMaker reserves others."""
    pids = {int(pid) for pid in processes_of(served.container)}
    listening = ports_of(pids)

    assert served.port in listening
    assert listening - {served.port} <= set(range(LOW, HIGH + 1))


def test_a_killed_torchserve_comes_back(served: Served) -> None:
    """After TorchServe is killed, the ping fails until it is restarted; the journal keeps its sessions."""
    opened = served.invoke({"type": "start_session", "path": data_url(draw("square", "blue"))}, "NEW_SESSION")
    session = opened.json()["session_id"]
    [java] = [pid for pid, name in processes_of(served.container).items() if name == "java"]

    os.kill(java, signal.SIGKILL)

    wait_until(lambda: served.pings() == (503, b""), "the ping reports no ready instance")
    served.container.wait_until_ok(f"{served.url}/ping")
    question = {"type": "send_text_prompt", "session_id": session, "prompt_text": "What color is the square?"}
    assert served.invoke(question, session).json() == {"response_text": "The square is blue."}


def test_sigterm_lets_answers_end_and_the_exit_status_is_0(served: Served) -> None:
    """After SIGTERM, new requests are refused, streams complete, and the container exits with 0 before SIGKILL."""
    pid = served.container.pid
    with served.stream({**LONG, "parameters": LONG_PARAMETERS}) as answer:
        began = answer.read1()

        os.kill(pid, signal.SIGTERM)

        wait_until(lambda: served.pings() is None, "the port is closed")
        assert b'"finish_reason"' in began + answer.read()
    assert served.container.wait(GRACE_S) == 0, served.container.log[-4000:]


def processes_of(container: Container) -> dict[int, str]:
    """Return the names of the container's processes by their ids on the host."""
    first = psutil.Process(container.pid)
    return {each.pid: each.name() for each in (first, *first.children(recursive=True))}


def ports_of(pids: set[int]) -> set[int]:
    """Return the TCP ports that these processes listen on."""
    found = psutil.net_connections("tcp")
    return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN and each.pid in pids}
