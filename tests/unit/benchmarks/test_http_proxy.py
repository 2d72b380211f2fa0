"""Benchmarks in an environment with an HTTP proxy, which cannot reach the fleets that they start."""

import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from benchmarks.fleet import Fleet
from benchmarks.followup_arms import Client
from tests.servers import free_ports


class Answers(BaseHTTPRequestHandler):
    """Answers as an admin plane, and as an endpoint that opens a session."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("X-Amzn-SageMaker-New-Session-Id", "opened; Expires=2030-01-01T00:00:00Z")
        self.send_header("Content-Length", "17")
        self.end_headers()
        self.wfile.write(b'{"instances": []}')

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """A server that stands for both planes, beside a proxy that does not answer."""
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_ports(1)[0]}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with HTTPServer(("127.0.0.1", 0), Answers) as server, subprocess.Popen(["true"]) as process:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        yield Fleet(process, url, url)
        server.shutdown()
        thread.join()


def test_admin_plane_is_asked_directly(fleet: Fleet) -> None:
    """The admin plane, which every benchmark asks for its instances, is contacted without the proxy."""
    assert fleet.instances() == []


def test_runtime_api_is_asked_directly(fleet: Fleet) -> None:
    """boto3, which reads the environment, too, contacts the runtime API without the proxy."""
    assert Client(fleet.runtime).open(b"") == "opened"
