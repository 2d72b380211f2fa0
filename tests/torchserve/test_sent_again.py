"""Retries by boto3 on real TorchServe: no request is executed twice.

A server between boto3 and the proxy forwards a request, waits for its answer, and then fails it once.
"""

import http.client
import json
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import boto3
import pytest
from botocore.config import Config

from tests.http_servers import QuietHandler, run_http
from tests.torchserve.conftest import Fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_sessions import open_session

pytestmark = pytest.mark.torchserve
OPERATIONS = ("invoke_endpoint", "invoke_endpoint_with_response_stream")


class Failing(ThreadingHTTPServer):
    """failures: responses that replace the next answers; 0 closes the connection. seen: invocation ids, in order."""

    daemon_threads = True

    def __init__(self, fleet: Fleet) -> None:
        self.failures: list[int] = []
        self.seen: list[str] = []
        server, address = self, fleet.runtime.removeprefix("http://")

        class Handler(QuietHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                server.seen.append(self.headers["amz-sdk-invocation-id"])
                body = self.rfile.read(int(self.headers["Content-Length"]))
                upstream = http.client.HTTPConnection(address, timeout=90)
                upstream.request("POST", self.path, body, dict(self.headers.items()))
                answer = upstream.getresponse()
                data = answer.read()
                upstream.close()
                if not server.failures:
                    self.send_response(answer.status)
                    for name, value in answer.getheaders():
                        if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                            self.send_header(name, value)
                elif status := server.failures.pop(0):
                    data = b'{"Message": "not your fault"}'
                    self.send_response(status)
                else:
                    self.close_connection = True
                    return
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        super().__init__(("127.0.0.1", 0), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: a client may close its connection."""

    def client(self) -> Any:
        """Return boto3's own client with its own retry rules."""
        return boto3.client(
            "sagemaker-runtime",
            endpoint_url=f"http://127.0.0.1:{self.server_address[1]}",
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
            config=Config(read_timeout=90),
        )


@pytest.fixture
def failing(fleet: Fleet) -> Iterator[Failing]:
    server = Failing(fleet)
    with run_http(server):
        yield server


def open_sessions(fleet: Fleet) -> set[str]:
    return {session for instance in fleet.instances() for session in fleet.status(instance["name"])["session_ids"]}


def read(answer: Any) -> bytes:
    body = answer["Body"]
    return body.read() if hasattr(body, "read") else b"".join(event["PayloadPart"]["Bytes"] for event in body)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_opening_that_boto3_sends_again_opens_one_session(fleet: Fleet, failing: Failing, operation: str) -> None:
    """After a lost connection and a 503 or 500, retries open one session, whichever instance each attempt reaches."""
    before = open_sessions(fleet)
    failing.failures = [0, 503 if operation == OPERATIONS[0] else 500]

    opened = getattr(failing.client(), operation)(
        EndpointName="llava", SessionId="NEW_SESSION", ContentType="image/png", Body=draw("circle", "red")
    )

    header = opened["ResponseMetadata"]["HTTPHeaders"]["x-amzn-sagemaker-new-session-id"]
    session = json.loads(read(opened))["session_id"]
    assert header.startswith(f"{session}; Expires=")
    assert len(failing.seen) == 3
    assert len(set(failing.seen)) == 1
    assert open_sessions(fleet) - before == {session}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_question_that_boto3_sends_again_is_answered_once(fleet: Fleet, failing: Failing, operation: str) -> None:
    """The retry gets the recorded answer, and the conversation is as long as one without a failure."""
    client = failing.client()
    body = {"type": "send_text_prompt", "prompt_text": "What color is the circle?"}
    tiers, lengths = [], []
    for failures in ([], [500]):
        chat = open_session(client, image=data_url(draw("circle", "red")))
        arguments = {"EndpointName": "llava", "SessionId": chat.id, "ContentType": "application/json"}
        failing.failures = failures

        answer = getattr(client, operation)(
            Body=json.dumps({**body, "stream": operation != OPERATIONS[0]}), **arguments
        )

        assert "The circle is red." in read(answer).decode()
        after = chat.invoke(body)
        chat.close()
        headers = [each["ResponseMetadata"]["HTTPHeaders"] for each in (answer, after)]
        tiers.append(headers[0]["x-torchmoor-cache-tier"])
        lengths.append(headers[1]["x-torchmoor-context-tokens"])

    assert (tiers[0] != "answer", tiers[1]) == (True, "answer")
    assert lengths[0] == lengths[1]
