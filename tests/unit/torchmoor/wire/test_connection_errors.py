"""Reasons of failed connections, from real clients whose TLS server has an invalid certificate."""

import logging
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import aiohttp
import pytest
import requests
from botocore.config import Config

from handlers.journal.redis_connection import RedisConnection
from handlers.journal.redis_connection import connect as connect_redis
from handlers.journal.s3_objects import S3Objects
from handlers.journal.s3_objects import connect as connect_s3
from handlers.settings.journal import JournalSettings
from torchmoor.async_inference.objects import s3_client
from torchmoor.async_inference.objects.object_store import ObjectUnavailable
from torchmoor.clients.errors import EndpointUnreachable
from torchmoor.clients.runtime import make_client, readable_errors
from torchmoor.config.listen import ListenSettings
from torchmoor.config.objects import ObjectSettings
from torchmoor.doctor.finding import FleetPlan, Level
from torchmoor.doctor.fleet import check_fleet, check_ports
from torchmoor.doctor.services import check_store
from torchmoor.run.log import start_log
from torchmoor.wire.connection_errors import failure_reason
from torchmoor.wire.store_urls import JOURNAL_SCHEMES, RedisAddress

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
Serve = Callable[..., int]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Return a function that starts a TLS server and returns its port. All clients know its authority."""
    authority, key = tmp_path / "authority.pem", tmp_path / "authority.key"
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", key, "-out", authority, "-subj", "/CN=authority")
    for name in ("SSL_CERT_FILE", "AWS_CA_BUNDLE"):
        monkeypatch.setenv(name, str(authority))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "any")
    listeners: list[socket.socket] = []

    def start(names: str, *, days: int) -> int:
        request, own_key, names_file = tmp_path / "request.pem", tmp_path / "server.key", tmp_path / "names"
        certificate = tmp_path / "server.pem"
        names_file.write_text(f"subjectAltName={names}\n")
        openssl("req", *new_key, "-keyout", own_key, "-out", request, "-subj", "/CN=server")
        signed_by = ("-CA", authority, "-CAkey", key, "-CAcreateserial")
        signed = ("-req", "-in", request, *signed_by, "-days", days, "-extfile", names_file, "-out", certificate)
        openssl("x509", *signed)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate, own_key)
        listeners.append(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=shake_hands, args=(listeners[-1], tls), daemon=True).start()
        port: int = listeners[-1].getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"https://127.0.0.1:{port}")
        return port

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def shake_hands(listener: socket.socket, tls: ssl.SSLContext) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with suppress(OSError), closing(connection), tls.wrap_socket(connection, server_side=True) as secure:
                secure.recv(1)


def failure(action: Callable[[], object]) -> str:
    with pytest.raises((OSError, ObjectUnavailable)) as caught:
        action()
    return str(caught.value)


def failures(port: int) -> list[str]:
    """Return the errors of both journals and of the store of results."""
    address = RedisAddress(host="127.0.0.1", port=port, db=0, username=None, password=None, tls=True)
    limits = JournalSettings()

    def find_head() -> None:
        with s3_client.translated("s3://bucket/key"):
            s3_client.find_head(s3_client.make_client(ObjectSettings(max_attempts=1)), "s3://bucket/key")

    return [
        failure(lambda: RedisConnection(connect_redis(address, limits)).run("return 1", [])),
        failure(lambda: S3Objects(connect_s3(limits), "bucket").get("key", 1)),
        failure(find_head),
    ]


def test_an_expired_certificate_is_named(serve: Serve) -> None:
    for message in failures(serve("IP:127.0.0.1", days=-1)):
        assert message.endswith("cannot be reached (certificate refused: certificate has expired)")


def test_a_certificate_of_another_host_is_named(serve: Serve) -> None:
    for message in failures(serve("DNS:redis.example.com", days=1)):
        assert "(certificate refused: " in message
        assert "127.0.0.1" in message


def test_the_log_has_only_the_errors_of_attempts(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """urllib3's warnings about refused certificates, one per attempt, are not logged."""
    of_connections = logging.getLogger("urllib3.connection")
    level = of_connections.level
    try:
        start_log(logging.WARNING)
        failures(serve("DNS:redis.example.com", days=1))
    finally:
        of_connections.setLevel(level)

    assert caplog.messages == []


def test_a_certificate_of_an_unknown_authority_is_named(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    port = serve("IP:127.0.0.1", days=1)
    for name in ("SSL_CERT_FILE", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name)

    for message in failures(port):
        assert message.endswith("(certificate refused: unable to get local issuer certificate)")


def test_a_server_without_tls_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"-ERR not TLS\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ssl.SSLError) as caught, socket.create_connection(("127.0.0.1", port)) as plain:
            ssl.create_default_context().wrap_socket(plain, server_hostname="localhost")

    assert failure_reason(caught.value) == "TLS failed: WRONG_VERSION_NUMBER"


async def test_a_failed_connection_is_named_without_its_address() -> None:
    """The reason omits the address, which clients must not learn from a failed request."""
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError) as caught:
            await session.get("http://127.0.0.1:9/")

    assert failure_reason(caught.value) == "Connection refused"


def test_a_name_without_an_address_is_named() -> None:
    """The error says whether the name is unknown or name servers do not answer."""
    with pytest.raises(socket.gaierror) as refused:
        socket.getaddrinfo("no.such.host.invalid", 80)
    with pytest.raises(requests.ConnectionError) as caught:
        requests.get("http://no.such.host.invalid/")

    assert failure_reason(caught.value) == refused.value.strerror


def test_a_client_of_an_endpoint_learns_how_to_name_an_authority(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For an unknown authority, the error says how to configure it instead of asking whether the proxy runs."""
    url = f"https://127.0.0.1:{serve('IP:127.0.0.1', days=1)}"

    def ask() -> str:
        config = Config(retries={"total_max_attempts": 1})
        with pytest.raises(EndpointUnreachable) as caught, readable_errors(" (is it running?)"):
            make_client(endpoint_url=url, config=config).invoke_endpoint(EndpointName="llava", Body=b"{}")
        return str(caught.value)

    advice = " (AWS_CA_BUNDLE names the certificate of a private authority)"
    place = f"no TLS connection to {url}/endpoints/llava/invocations: "
    monkeypatch.delenv("AWS_CA_BUNDLE")
    assert ask() == f"{place}certificate refused: unable to get local issuer certificate{advice}"
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "missing"))
    assert ask() == f"{place}No such file or directory{advice}"


def test_the_doctor_does_not_take_an_untrusted_fleet_for_another_program(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the admin plane's certificate is refused, the finding names the variable, and the port is the fleet's own."""
    port = serve("IP:127.0.0.1", days=1)
    url = f"https://127.0.0.1:{port}"
    monkeypatch.delenv("SSL_CERT_FILE")
    plan = FleetPlan(
        endpoints=("llava",),
        num_instances=0,
        model_store=Path(),
        run_dir=Path(),
        journal="",
        listen=ListenSettings(port=0, admin_port=port),
        url="http://127.0.0.1:9",
        admin_url=url,
    )

    [ports], [fleet] = check_ports(plan), check_fleet(plan)

    assert (ports.level, fleet.level) == (Level.OK, Level.PROBLEM)
    assert fleet.found.startswith(f"no TLS connection to the admin plane at {url}: certificate refused: unable to get")
    assert "SSL_CERT_FILE" in fleet.remedy


def test_the_doctor_says_how_to_mend_a_certificate(serve: Serve) -> None:
    port = serve("IP:127.0.0.1", days=-1)

    for url, variable in ((f"rediss://127.0.0.1:{port}/0", "SSL_CERT_FILE"), ("s3://bucket/x", "AWS_CA_BUNDLE")):
        [finding] = check_store("journal", url, JOURNAL_SCHEMES)

        assert finding.level is Level.PROBLEM
        assert finding.found == f"{url}: certificate refused: certificate has expired"
        assert variable in finding.remedy
