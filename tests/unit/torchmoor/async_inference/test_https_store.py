"""Inputs by https: presigned URLs of a real S3 server behind TLS, and hosts that must not be asked."""

import asyncio
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.certificates import make_one_file
from tests.servers import BUCKET, S3Server
from tests.unit.torchmoor.async_inference.objects import MIB, closing, read_all
from tests.unit.torchmoor.async_inference.rig import until
from tests.unit.torchmoor.stream_server import Serve, stream_server
from tests.waiting import PROGRAM_S
from torchmoor.async_inference.objects.https_store import HttpsStore
from torchmoor.async_inference.objects.object_store import (
    LocationRefused,
    ObjectDenied,
    ObjectMetadata,
    ObjectMissing,
    ObjectTooLarge,
    ObjectUnavailable,
)
from torchmoor.async_inference.objects.outbound import NameLookups, Outbound
from torchmoor.async_inference.objects.s3_store import S3Store
from torchmoor.async_inference.objects.scheme_store import SchemeStore
from torchmoor.config.objects import ObjectSettings

NAME = "bucket.s3.example"
LOOPBACK = ("127.0.0.0/8",)


@dataclass
class Names:
    """A resolver with scripted addresses that records look-ups."""

    addresses: list[str] = field(default_factory=lambda: ["127.0.0.1"])
    asked: list[str] = field(default_factory=list)
    is_silent: bool = False

    async def resolve(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        if self.is_silent:
            await asyncio.Event().wait()
        if not self.addresses:
            raise OSError("no such name")
        return self.addresses


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_one_file(tmp_path_factory.mktemp("tls"), NAME)


def opened(
    certificate: Path, monkeypatch: pytest.MonkeyPatch, names: Names | None = None, **settings: Any
) -> AbstractAsyncContextManager[HttpsStore]:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    values: dict[str, Any] = {"https_hosts": (NAME,), "private_networks": LOOPBACK, **settings}
    return closing(HttpsStore(ObjectSettings(**values), (names or Names()).resolve))


@asynccontextmanager
async def tls_server(certificate: Path, serve: Serve) -> AsyncIterator[int]:
    """Run a TLS server with this certificate; yield its port. At the end its clients must have gone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()

    async with stream_server(handle, ssl=context) as port:
        yield port


@asynccontextmanager
async def answering(certificate: Path, answer: bytes) -> AsyncIterator[int]:
    """Run a server that answers every request alike and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()

    async with tls_server(certificate, serve) as port:
        yield port


@pytest.mark.s3
async def test_a_presigned_url_is_an_input(
    certificate: Path, monkeypatch: pytest.MonkeyPatch, s3_server: S3Server, tmp_path: Path
) -> None:
    """A presigned URL is fetched from the checked address byte for byte; a forged one is denied."""
    key = f"objects/{tmp_path.name}/a b+c"
    data = bytes(range(256)) * (3 * MIB // 256)
    s3_server.use_in(monkeypatch)

    async with closing(S3Store(ObjectSettings())) as objects:
        await objects.put(f"s3://{BUCKET}/{key}", data, ObjectMetadata("image/x-test"))

    names = Names()

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while piece := await source.read(1 << 16):
            sink.write(piece)
            await sink.drain()
        sink.close()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", s3_server.port)
        try:
            await asyncio.gather(pump(reader, upstream_writer), pump(upstream_reader, writer))
        finally:
            upstream_writer.close()

    def presign(port: int) -> str:
        values = s3_server.environment
        client = boto3.client(
            "s3",
            endpoint_url=f"https://{NAME}:{port}",
            region_name="us-east-1",
            aws_access_key_id=values["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=values["AWS_SECRET_ACCESS_KEY"],
            config=boto3.session.Config(s3={"addressing_style": "path"}, signature_version="s3v4"),
        )
        return str(client.generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": key}))

    async with tls_server(certificate, pass_on) as port, opened(certificate, monkeypatch, names) as store:
        url = presign(port)
        async with await store.open(url) as download:
            assert download.metadata.content_type == "image/x-test"
        assert await read_all(store, url) == data
        with pytest.raises(ObjectDenied) as told:
            await store.open(url.replace("X-Amz-Signature=", "X-Amz-Signature=0"))
        assert "Signature" not in str(told.value)
    assert set(names.asked) == {NAME}


@pytest.mark.parametrize(
    "url",
    [
        "https://other.example/x",
        "https://s3.example/x",  # *. requires a label in front
        "https://evil-s3.example/x",
        f"http://{NAME}/x",
        f"https://user:secret@{NAME}/x",
        f"https://{NAME}@other.example/x",
        "https:///x",
        f"https://{NAME}:99999/x",
        f"https://{NAME}/a\nb",
        f"https://{'a' * 64}.s3.example/x",  # no name has so long a part, or an empty one
        "https://a..s3.example/x",
        "https://.s3.example/x",
    ],
)
def test_hosts_that_are_not_listed_are_refused(url: str) -> None:
    """A host that is not listed is refused before its name is looked up."""
    store = HttpsStore(ObjectSettings(https_hosts=("*.s3.example",)))

    store.check_input(f"https://{NAME}/x?X-Amz-Signature=1")
    with pytest.raises(LocationRefused):
        store.check_input(url)


def test_nothing_is_listed_unless_an_operator_does() -> None:
    """By default https inputs are refused, and https results always are."""
    store = HttpsStore(ObjectSettings())

    with pytest.raises(LocationRefused, match=r"objects\.https_hosts"):
        store.check_input("https://bucket.s3.amazonaws.com/x")
    with pytest.raises(LocationRefused, match="results"):
        SchemeStore(ObjectSettings()).check_output("https://bucket.s3.amazonaws.com/x")


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "10.1.2.3",
            "100.64.0.1",
            "169.254.169.254",
            "224.0.0.1",
            "255.255.255.255",
            "0.0.0.0",
            "168.63.129.16",
        ),
        *(
            "::1",
            "fd00::1",
            "fe80::1%eth0",
            "ff0e::1",
            "::ffff:10.0.0.1",
            "64:ff9b::a00:1",
            "2002:a00:1::",
            "2001::1",
            "4000::1",
        ),
    ],
)
async def test_a_listed_name_that_leads_inside_is_refused(
    certificate: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """A listed name with at least one private address is refused, because its owner decides what it resolves to."""
    async with opened(certificate, monkeypatch, Names(["93.184.215.14", address]), private_networks=()) as store:
        with pytest.raises(LocationRefused, match="private or local"):
            await store.open(f"https://{NAME}/x")


def test_public_addresses_are_allowed_over_https_alone() -> None:
    """Public addresses are allowed over https only, as text or as a name, also inside IPv6 addresses."""
    outbound = Outbound(private_networks=(), connect_timeout_s=1, read_timeout_s=1, max_connections=1)
    public = ["93.184.215.14", "2606:2800:21f::1", "64:ff9b::5db8:d70e", "2002:5db8:d70e::"]

    outbound.check_addresses("https", "example.com", public)

    assert outbound.check("https://93.184.215.14:8443/x").port == 8443
    assert outbound.check("https://example.com/x").hostname == "example.com"
    for user in ("user@", "user:secret@", ":secret@"):
        with pytest.raises(LocationRefused, match="a user name or a password"):
            outbound.check(f"https://{user}example.com/x")
    for address in public:
        with pytest.raises(LocationRefused, match="not https"):
            outbound.check_addresses("http", "example.com", [address])


def test_a_listed_address_that_is_private_is_refused() -> None:
    """A private address is refused without a look-up, even if it is listed."""
    store = HttpsStore(ObjectSettings(https_hosts=("127.0.0.1", "[::1]")))

    for url in ("https://127.0.0.1/x", "https://[::1]/x"):
        with pytest.raises(LocationRefused, match="private or local"):
            store.check_input(url)


def head(status: str, *lines: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "Connection: close", "", ""]).encode()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (head("404 Not Found", "Content-Length: 0"), ObjectMissing),
        (head("403 Forbidden", "Content-Length: 0"), ObjectDenied),
        (head("302 Found", "Location: https://169.254.169.254/", "Content-Length: 0"), ObjectDenied),
        (head("503 Slow Down", "Content-Length: 0"), ObjectUnavailable),
        (head("200 OK", "Transfer-Encoding: chunked") + b"1\r\nx\r\n0\r\n\r\n", LocationRefused),
        (head("200 OK", "Content-Length: 3", "Content-Encoding: gzip") + b"abc", LocationRefused),
        (head("200 OK", "Content-Length: 5") + b"abc", ObjectUnavailable),
        (head("200 OK", f"Content-Length: {MIB + 1}"), ObjectTooLarge),
        (b"nonsense\r\n\r\n", ObjectUnavailable),
        (b"", ObjectUnavailable),
    ],
)
async def test_answers_that_are_no_whole_object(
    certificate: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes, error: type[Exception]
) -> None:
    """Each incomplete answer has its own kind of error.

    A redirect is not followed, since its target was not checked.
    """
    async with answering(certificate, answer) as port, opened(certificate, monkeypatch, max_input_bytes=MIB) as store:
        with pytest.raises(error):
            await read_all(store, f"https://{NAME}:{port}/x")


async def test_a_host_that_falls_silent_costs_the_time_out(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that stops sending, also within an object, causes a time-out."""

    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head("200 OK", "Content-Length: 5") + b"abc")
        await reader.read()
        await reader.read()

    async with tls_server(certificate, stall) as port, opened(certificate, monkeypatch, read_timeout_s=0.5) as store:
        with pytest.raises(ObjectUnavailable, match="broke off"):
            await read_all(store, f"https://{NAME}:{port}/x")


@pytest.mark.parametrize("names", [Names([]), Names(is_silent=True)], ids=["unknown", "silent"])
async def test_a_name_that_is_not_known_is_a_reason_to_try_later(
    certificate: Path, monkeypatch: pytest.MonkeyPatch, names: Names
) -> None:
    """A name that cannot be resolved is a retryable error, because name servers fail or do not answer."""
    async with opened(certificate, monkeypatch, names, connect_timeout_s=0.3) as store:
        with pytest.raises(ObjectUnavailable):
            await store.open(f"https://{NAME}/x")


async def test_a_certificate_of_another_name_is_refused(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ok = answering(certificate, head("200 OK", "Content-Length: 0"))
    async with ok as port, opened(certificate, monkeypatch, https_hosts=("wrong.example",)) as store:
        with pytest.raises(ObjectUnavailable, match="certificate refused"):
            await store.open(f"https://wrong.example:{port}/x")


async def test_a_request_goes_to_the_checked_address_with_its_path_as_it_is(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request ignores proxies of the environment, and keeps the path's escapes, which its signature covers."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    lines: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append((await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0])
        writer.write(head("200 OK", "Content-Length: 1") + b"x")
        await writer.drain()

    async with tls_server(certificate, serve) as port, opened(certificate, monkeypatch) as store:
        assert await read_all(store, f"https://{NAME}:{port}/a%7eb%2Fc?x=%7e") == b"x"

    assert lines == [b"GET /a%7eb%2Fc?x=%7e HTTP/1.1"]


async def test_names_are_resolved_to_each_of_their_addresses_once() -> None:
    found = await NameLookups(1).resolve("localhost", 443)

    assert {"127.0.0.1", "::1"} >= set(found)
    assert len(found) == len(set(found)) > 0


async def test_look_ups_wait_for_a_free_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up whose caller has left keeps its thread until it ends, as nothing can interrupt it."""
    asked: list[str] = []
    may_answer = threading.Event()

    def look_up(host: str, *arguments: object, **more: object) -> list[Any]:
        asked.append(host)
        may_answer.wait()
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    lookups = NameLookups(1)
    first = asyncio.create_task(lookups.resolve("first.example", 443))
    await until(lambda: asked == ["first.example"], "the name server is asked")
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.create_task(lookups.resolve("second.example", 443))
    for _ in range(3):
        await asyncio.sleep(0)
    assert asked == ["first.example"]

    may_answer.set()

    with pytest.raises(OSError, match="not known"):
        await second
    assert (first.cancelled(), asked) == (True, ["first.example", "second.example"])


def test_a_process_ends_while_a_look_up_runs() -> None:
    """A name server that does not answer holds up no stop of the proxy."""
    code = (
        "import asyncio, socket, threading\n"
        "from torchmoor.async_inference.objects.outbound import Outbound\n"
        "socket.getaddrinfo = lambda *arguments, **more: threading.Event().wait()\n"
        "async def main():\n"
        "    limits = {'connect_timeout_s': 0.01, 'read_timeout_s': 1.0, 'max_connections': 1}\n"
        "    outbound = Outbound(private_networks=(), **limits)\n"
        "    try:\n"
        "        await outbound.request('GET', 'https://name.example/')\n"
        "    except TimeoutError:\n"
        "        print('timed out')\n"
        "    await outbound.close()\n"
        "asyncio.run(main())\n"
    )

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PROGRAM_S)

    assert (ended.returncode, ended.stdout) == (0, "timed out\n"), ended.stderr
