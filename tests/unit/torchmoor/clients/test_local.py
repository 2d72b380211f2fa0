"""Clients of this machine, in an environment with an HTTP proxy, as in many companies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.http_servers import QuietHandler, serve_http
from tests.servers import free_ports
from torchmoor.clients.admin import AdminClient
from torchmoor.clients.local import is_local
from torchmoor.clients.runtime import make_client


class Answers(QuietHandler):
    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.reply(200, b"{}")

    do_POST = do_GET


@pytest.fixture
def url() -> Iterator[str]:
    with serve_http(Answers) as served:
        yield served


@pytest.fixture(autouse=True)
def proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configure a proxy that does not answer."""
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_ports(1)[0]}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_boto3_asks_a_local_endpoint_itself(url: str) -> None:
    """boto3 contacts a local endpoint directly, so that `torchmoor ask` and the clients reach `torchmoor up`."""
    client = make_client(endpoint_url=url, keys={"aws_access_key_id": "a", "aws_secret_access_key": "b"})

    assert client.invoke_endpoint(EndpointName="llava", Body=b"")["Body"].read() == b"{}"


def test_admin_client_asks_a_local_plane_itself(url: str) -> None:
    """The admin client contacts a local plane directly, so that `torchmoor instances` reaches `torchmoor up`."""
    assert AdminClient(url).get("/instances") == {}


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ("http://localhost:8080", True),
        ("http://[::1]:8080", True),
        ("https://127.0.1.1", True),
        ("https://example.com", False),
        ("http://10.0.0.1", False),
        ("http://[::1", False),
        ("", False),
    ],
)
def test_only_addresses_of_this_machine_are_local(other: str, found: bool) -> None:
    """Only addresses of this machine are used without the proxy."""
    assert is_local(other) is found
