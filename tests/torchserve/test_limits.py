"""A worker that receives more requests than it accepts."""

import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPResponse
from http.server import ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
import requests
from botocore.config import Config

from tests.http_servers import QuietHandler, run_http
from tests.torchserve.conftest import Fleet
from tests.torchserve.drawings import draw
from tests.waiting import wait_until

pytestmark = pytest.mark.torchserve
MAX_IN_FLIGHT = 112  # handlers/configs/chat.yaml


class SlowPictures(ThreadingHTTPServer):
    """Serve no image before `gate` is open."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        self.gate = threading.Event()
        server = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                server.gate.wait(60)
                self.reply(200, draw("circle", "red"))

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture
def slow_pictures() -> Iterator[SlowPictures]:
    server = SlowPictures()
    with run_http(server):
        yield server
        server.gate.set()


def test_past_the_in_flight_limit_is_429_at_once(fleet: Fleet, slow_pictures: SlowPictures) -> None:
    """Requests beyond the limit are refused at once; the waiting ones are answered, and nothing is left behind."""
    instance = fleet.instances()[0]
    url = f"http://{instance['host']}:{instance['port']}/predictions/llava"
    picture = f"http://127.0.0.1:{slow_pictures.server_address[1]}/x.png"
    before = fleet.status(instance["name"])["sessions"]["open"]
    answers: list[requests.Response] = []
    refused = threading.Event()

    def open_session() -> None:
        answer = requests.post(url, json={"type": "start_session", "path": picture}, timeout=60)
        answers.append(answer)
        if answer.status_code == 429:
            refused.set()

    threads = [threading.Thread(target=open_session) for _ in range(MAX_IN_FLIGHT + 4)]
    for thread in threads:
        thread.start()
    assert refused.wait(30)
    assert fleet.status(instance["name"])["sessions"]["open"] == before  # the status operation is still answered
    slow_pictures.gate.set()
    for thread in threads:
        thread.join(timeout=60)

    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429}, statuses
    assert statuses[200] >= MAX_IN_FLIGHT
    over = next(answer for answer in answers if answer.status_code == 429)
    assert over.headers["X-Torchmoor-Error"] == "Overloaded"
    assert int(over.headers["Retry-After"]) >= 1
    for answer in answers:
        if answer.status_code == 200:
            requests.post(url, json={"type": "close_session", **answer.json()}, timeout=60).raise_for_status()
    assert fleet.status(instance["name"])["sessions"]["open"] == before


def test_large_image_opens_beside_a_stream(fleet: Fleet) -> None:
    """A 10 MB image is opened, and a stream at the same time has the same text as alone."""
    instance = fleet.instances()[0]
    url = f"http://{instance['host']}:{instance['port']}/predictions/llava"

    def open_session(image: bytes) -> dict[str, str]:
        headers = {"X-Amzn-SageMaker-Session-Id": "NEW_SESSION", "Content-Type": "image/bmp"}
        answer = requests.post(url, data=image, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    small = draw("square", "blue", form="BMP")
    large = draw("circle", "red", size=(1800, 1800), form="BMP")
    question = {"type": "send_text_prompt", "prompt_text": "Describe the image.", "stream": True}
    alone = requests.post(url, json={**question, **open_session(small)}, timeout=60).text
    session = open_session(small)

    opened: list[dict[str, str]] = []
    thread = threading.Thread(target=lambda: opened.append(open_session(large)))
    thread.start()
    beside = requests.post(url, json={**question, **session}, timeout=60).text
    thread.join(timeout=60)

    assert beside == alone
    red = {"type": "send_text_prompt", "prompt_text": "What color is the circle?", **opened[0]}
    assert "red" in requests.post(url, json=red, timeout=60).json()["response_text"]


BODY = json.dumps({"inputs": "A red circle is", "parameters": {"max_new_tokens": 1}}).encode()
LONG_BODY = BODY + b" " * (59 * 2**20 // 10 - len(BODY))  # 5.9 MiB; the runtime API allows 6
NUM_LONG = 80  # 236 MiB for each instance, with which a JVM of 512 MiB runs out of memory


def jvm_pids(fleet: Fleet) -> dict[str, str]:
    """Return each instance's JVM by the file that TorchServe writes at its start."""
    return {path.parent.parent.name: path.read_text() for path in fleet.run_dir.glob("*/tmp/.model_server.pid")}


def test_more_bodies_than_the_heap_holds_block_nobody_and_end_no_instance(fleet: Fleet) -> None:
    """Another client is answered at once while bodies are declared and not sent.

    When all are sent at the same time, each is answered or refused with 503; both JVMs continue to serve.
    """
    pids = jvm_pids(fleet)
    address = urlsplit(fleet.runtime)
    head = (
        f"POST /endpoints/llava/invocations HTTP/1.1\r\nHost: {address.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(LONG_BODY)}\r\n\r\n"
    ).encode()
    client = fleet.client(Config(retries={"total_max_attempts": 1}, read_timeout=90))

    def invoke(body: bytes) -> int:
        answer = client.invoke_endpoint(EndpointName="llava", ContentType="application/json", Body=body)
        return int(answer["ResponseMetadata"]["HTTPStatusCode"])

    connections = [socket.create_connection((address.hostname, address.port), timeout=90) for _ in range(NUM_LONG)]
    for connection in connections:
        connection.sendall(head + LONG_BODY[:1])

    assert invoke(LONG_BODY) == invoke(BODY) == 200

    def send_rest(connection: socket.socket) -> int:
        with connection:
            with suppress(ConnectionError):  # the proxy stops reading a dropped body after a while
                connection.sendall(LONG_BODY[1:])
            answer = HTTPResponse(connection)
            answer.begin()
            return answer.status

    with ThreadPoolExecutor(NUM_LONG) as pool:
        statuses = Counter(pool.map(send_rest, connections))

    assert set(statuses) <= {200, 503}, statuses
    assert statuses[200], statuses
    wait_until(lambda: {each["state"] for each in fleet.instances()} == {"ready"}, "both instances ready")
    assert jvm_pids(fleet) == pids
    assert invoke(BODY) == 200
