"""Benchmarks in an environment with an HTTP proxy, which cannot reach the fleets that they start."""

import subprocess
from collections.abc import Iterator

import pytest

from benchmarks.fleet import Fleet
from benchmarks.followup_arms import Client
from tests.http_servers import QuietHandler, serve_http
from tests.servers import free_ports


class Answers(QuietHandler):
    """Answers as an admin plane, and as an endpoint that opens a session."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        opened = {"X-Amzn-SageMaker-New-Session-Id": "opened; Expires=2030-01-01T00:00:00Z"}
        self.reply(200, b'{"instances": []}', opened)

    do_POST = do_GET


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """A server that stands for both planes, beside a proxy that does not answer."""
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_ports(1)[0]}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serve_http(Answers) as url, subprocess.Popen(["true"]) as process:
        yield Fleet(process, url, url)


def test_admin_plane_is_asked_directly(fleet: Fleet) -> None:
    """The admin plane, which every benchmark asks for its instances, is contacted without the proxy."""
    assert fleet.instances() == []


def test_runtime_api_is_asked_directly(fleet: Fleet) -> None:
    """boto3, which reads the environment, too, contacts the runtime API without the proxy."""
    assert Client(fleet.runtime).open(b"") == "opened"
