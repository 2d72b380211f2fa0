"""Clients of this machine, in an environment with an HTTP proxy, as in many companies."""

import asyncio
import json
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import ClassVar

import boto3
import pytest
from botocore.credentials import ReadOnlyCredentials

from tests.http_servers import QuietHandler, serve_http
from tests.servers import free_ports
from tests.waiting import wait_until
from torchmoor.bench.client import ConversationPlan
from torchmoor.bench.load import LoadSettings
from torchmoor.bench.run import run as bench
from torchmoor.cli.waiting_notice import EndpointWatch
from torchmoor.clients.admin import AdminClient
from torchmoor.clients.local import is_local
from torchmoor.clients.runtime import make_client
from torchmoor.clients.signing import Login, Signer


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


def test_a_user_without_credentials_needs_no_proxy(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A dead proxy, through which boto3 asks EC2's metadata for credentials, does not matter."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))

    client = make_client(endpoint_url=url)

    assert client.invoke_endpoint(EndpointName="llava", Body=b"")["Body"].read() == b"{}"
    assert Signer(Login()).sign("GET", url, {"a": "b"}) == {"a": "b"}


def test_admin_client_asks_a_local_plane_itself(url: str) -> None:
    """The admin client contacts a local plane directly, so that `torchmoor instances` reaches `torchmoor up`."""
    assert AdminClient(url).get("/instances") == {}


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ("http://localhost:8080", True),
        ("http://[::1]:8080", True),
        ("https://127.0.1.1", True),
        ("http://0.0.0.0:8080", True),
        ("http://[::]:8080", True),
        ("https://example.com", False),
        ("http://10.0.0.1", False),
        ("http://[::1", False),
        ("", False),
    ],
)
def test_only_addresses_of_this_machine_are_local(other: str, found: bool) -> None:
    """Only addresses of this machine are used without the proxy."""
    assert is_local(other) is found


class Forwards(QuietHandler):
    """An HTTP proxy that answers in place of the endpoints."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.asked.append(self.path)
        choice = {"message": {"content": "red"}, "finish_reason": "stop"}
        self.reply(200, json.dumps({"choices": [choice], "ProductionVariants": []}).encode())

    do_POST = do_GET


def test_bench_reaches_a_distant_endpoint_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torchmoor bench` uses the proxy of the environment, as boto3 and so `torchmoor ask` do."""
    target, settings = "http://llava.example:8080", LoadSettings(users=1, num_requests=1)
    plan = ConversationPlan(
        url=target, endpoint="llava", questions=["What?"], is_stateless=True, is_streamed=False, num_turns=1
    )
    with serve_http(Forwards) as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        Forwards.asked.clear()
        found = asyncio.run(bench(plan, settings, Login(token="t" * 16), 30.0, lambda line: None))

    assert found["errors"] == {}
    assert Forwards.asked == [f"{target}/endpoints/llava", f"{target}/endpoints/llava/invocations"]


def test_a_late_answer_is_explained_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint's status, too, is reached through the proxy of the environment."""
    with serve_http(Forwards) as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        Forwards.asked.clear()
        watch = EndpointWatch("http://llava.example", "llava", Signer(Login(token="t")), print, patience_s=0.01)
        with watch.waiting():
            wait_until(lambda: bool(Forwards.asked), "the status is asked for")

    assert Forwards.asked[0] == "http://llava.example/endpoints/llava"


def test_credentials_of_a_role_are_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each signature has the credentials of its time, since those of a role last an hour."""
    keys = count()

    class Renewed:
        def get_frozen_credentials(self) -> ReadOnlyCredentials:
            return ReadOnlyCredentials(f"KEY{next(keys)}", "secret", None)

    monkeypatch.setattr(boto3.Session, "get_credentials", lambda session: Renewed())
    signer = Signer(Login())

    signed = [signer.sign("GET", "http://llava.example", {})["Authorization"] for _ in range(2)]

    assert ["KEY0/" in signed[0], "KEY1/" in signed[1]] == [True, True]
