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
    monkeypatch: pytest.MonkeyPatch, variable: str, other: str, path: str, nothing: str
) -> None:
    """The ports are those of the variables; templates leave empty ones behind."""
    monkeypatch.setenv(other, nothing)
    with role(path) as port:
        monkeypatch.setenv(variable, f" {port}")
        assert main() == 0
    with role(path, status=503) as port:
        monkeypatch.setenv(variable, port)
        monkeypatch.setenv(other, str(free_ports(1)[0]))
        assert main() == 1


def test_another_server_on_the_first_port_does_not_hide_the_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not speak HTTP, at the port of a role that does not run, is not asked for."""

    class NotHttp(QuietHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(b"220 mail.example.com ESMTP\r\n")

    with serve_http(NotHttp) as url, role("/live") as port:
        monkeypatch.setenv("SAGEMAKER_BIND_TO_PORT", url.rpartition(":")[2])
        monkeypatch.setenv("TORCHMOOR_SIDE_PORT", port)
        assert main() == 0


def test_role_that_does_not_listen_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, port in zip(("SAGEMAKER_BIND_TO_PORT", "TORCHMOOR_SIDE_PORT"), free_ports(2), strict=True):
        monkeypatch.setenv(name, str(port))

    assert main() == 1
