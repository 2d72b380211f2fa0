"""The image's HEALTHCHECK."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.http_servers import QuietHandler, serve_http
from tests.servers import free_ports
from torchmoor.container.health import main


@contextmanager
def role(path: str, status: int = 200) -> Iterator[str]:
    """Answer requests for one path; yield the port."""

    class Answer(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == path else 404)
            self.end_headers()

    with serve_http(Answer) as url:
        yield url.rpartition(":")[2]


@pytest.mark.parametrize("nothing", ["", " "])
@pytest.mark.parametrize(
    ("variable", "other", "path"),
    [
        ("SAGEMAKER_BIND_TO_PORT", "TORCHMOOR_SIDE_PORT", "/ping"),
        ("TORCHMOOR_SIDE_PORT", "SAGEMAKER_BIND_TO_PORT", "/live"),
    ],
)
def test_role_that_answers_is_healthy(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    other: str,
    path: str,
    nothing: str,
) -> None:
    """The ports are those of the variables; templates leave empty ones behind. The output has the role's status."""
    monkeypatch.setenv(other, nothing)
    with role(path) as port:
        monkeypatch.setenv(variable, f" {port}")
        assert main() == 0
        assert f"GET http://127.0.0.1:{port}{path}: 200\n" in capsys.readouterr().out
    with role(path, status=503) as port:
        monkeypatch.setenv(variable, port)
        monkeypatch.setenv(other, str(free_ports(1)[0]))
        assert main() == 1
        assert f"GET http://127.0.0.1:{port}{path}: 503\n" in capsys.readouterr().out


def test_another_server_on_the_first_port_does_not_hide_the_role(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that does not speak HTTP, at the port of a role that does not run, is not asked for."""

    class NotHttp(QuietHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(b"220 m\xe4il.example.com ESMTP\r\n")

    with serve_http(NotHttp) as url, role("/live") as port:
        monkeypatch.setenv("SAGEMAKER_BIND_TO_PORT", url.rpartition(":")[2])
        monkeypatch.setenv("TORCHMOOR_SIDE_PORT", port)
        assert main() == 0
    asked = capsys.readouterr().out.splitlines()
    assert asked[0].endswith("/ping: BadStatusLine('220 m\\xe4il.example.com ESMTP\\r\\n')")
    assert asked[1].endswith("/live: 200")


def test_role_that_does_not_listen_is_not_healthy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output has both requests with their errors."""
    ports = free_ports(2)
    for name, port in zip(("SAGEMAKER_BIND_TO_PORT", "TORCHMOOR_SIDE_PORT"), ports, strict=True):
        monkeypatch.setenv(name, str(port))

    assert main() == 1
    refused = "ConnectionRefusedError(111, 'Connection refused')"
    assert capsys.readouterr().out.splitlines() == [
        f"GET http://127.0.0.1:{ports[0]}/ping: {refused}",
        f"GET http://127.0.0.1:{ports[1]}/live: {refused}",
    ]
