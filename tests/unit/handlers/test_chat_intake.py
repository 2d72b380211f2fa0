"""The image intake: addresses, redirects, limits, formats."""

import base64
import contextlib
import ipaddress
import socket
import ssl
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageChops, ImageStat

from handlers.chat.images.http import HttpImages
from handlers.chat.images.image_decoding import FORMATS
from handlers.chat.images.loader import ImageLoader
from handlers.errors import (
    BadImage,
    ImageTooLarge,
    ImageUnreachable,
    ImageUrlForbidden,
    NotAnImage,
    OutOfMemory,
    UnsupportedMedia,
)
from handlers.requests.reply import PendingReply
from handlers.settings.intake import IntakeSettings
from tests.certificates import make_one_file
from tests.torchserve.drawings import encoded
from tests.waiting import wait_until
from torchmoor.wire.public_addresses import resolve

LOCAL = ("127.0.0.1", "::1")


PNG = encoded(Image.new("RGB", (4, 3), (255, 0, 0)))


class WebServer:
    """A server that sends scripted bytes for each path and records requests."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.routes: dict[str, bytes | Callable[[socket.socket], None]] = {"/a.png": answer(PNG)}
        self.requests: list[str] = []
        self.wrap: Callable[[socket.socket], socket.socket] = lambda connection: connection
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def url(self, path: str = "/a.png", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            try:
                connection = stack.enter_context(self.wrap(connection))
                request = b""
                while b"\r\n\r\n" not in request:
                    piece = connection.recv(65_536)
                    if not piece:
                        return
                    request += piece
                self.requests.append(request.decode("latin-1"))
                route = self.routes.get(request.split()[1].decode(), answer(b"", "404 Not Found"))
                if callable(route):
                    route(connection)
                else:
                    connection.sendall(route)
            except OSError:
                return

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()


def answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def redirect(where: str, status: str = "302 Found") -> bytes:
    return answer(b"", status, f"Location: {where}")


@pytest.fixture
def web() -> Iterator[WebServer]:
    server = WebServer()
    yield server
    server.stop()


def decode(loader: ImageLoader, data: bytes) -> Image.Image:
    """Return a copy of the decoded image, which outlives its share of the budget."""
    with loader.decoded(data, lambda: None) as picture:
        return picture.copy()


def read(loader: ImageLoader, reference: bytes | str) -> bytes:
    return loader.read(reference, PendingReply(lambda: None))


def load(loader: ImageLoader, reference: bytes | str) -> Image.Image:
    return decode(loader, read(loader, reference))


def intake(resolver: Callable[[str, int], list[str]] = resolve, **values: Any) -> ImageLoader:
    return ImageLoader(IntakeSettings(**{"allowed_hosts": LOCAL, **values}), resolver)


def strict(resolver: Callable[[str, int], list[str]] = resolve) -> ImageLoader:
    return intake(resolver, allowed_hosts=())


def no_resolver(host: str, port: int) -> list[str]:
    raise AssertionError(f"{host} must not be resolved")


# Addresses


@pytest.mark.parametrize(("scheme", "port"), [("http", 80), ("https", 443), ("HTTPS", 443)])
def test_an_address_without_a_port_has_its_schemes(scheme: str, port: int) -> None:
    assert HttpImages(IntakeSettings()).check(f"{scheme}://93.184.215.14/x")[1:] == ("93.184.215.14", port)


def test_allowed_address_is_fetched(web: WebServer) -> None:
    """A private address that the operator allowed is fetched, with its name in the Host header."""
    loader = intake(lambda host, port: ["127.0.0.1"], allowed_hosts=("images.internal",))

    image = load(loader, web.url(host="Images.internal"))

    assert image.size == (4, 3)
    assert f"host: images.internal:{web.port}\r\n" in web.requests[0].lower()


@pytest.mark.parametrize("allowed", ["127.0.0.1", "127.0.0.0/8", "::ffff:0:0/96", "localhost"])
def test_allowance_may_be_a_name_an_address_or_a_block(web: WebServer, allowed: str) -> None:
    """allowed_hosts accepts a name, an address or a block; one that does not match allows nothing."""
    loader = intake(lambda host, port: ["127.0.0.1"], allowed_hosts=("10.0.0.0/8", allowed))

    if allowed.startswith("::"):
        with pytest.raises(ImageUrlForbidden):
            read(loader, web.url(host="localhost"))
    else:
        assert read(loader, web.url(host="localhost")) == PNG


PRIVATE_NETWORKS = (
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
    *("192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4"),
)
PRIVATE = st.sampled_from(PRIVATE_NETWORKS).flatmap(lambda network: st.ip_addresses(v=4, network=network))


def spellings(address: ipaddress.IPv4Address) -> list[str]:
    """Return an address as hosts of URLs: plain, as one number, and the ways in which IPv6 carries it."""
    first, second = int(address) >> 16, int(address) & 0xFFFF
    return [
        *(str(address), str(int(address)), hex(int(address))),
        *(f"[{prefix}{address}]" for prefix in ("::", "::ffff:", "64:ff9b::")),
        *(f"[2002:{first:x}:{second:x}::]", f"[2001:0:{first:x}:{second:x}::]"),
    ]


PRIVATE6 = st.sampled_from(["::/127", "fc00::/7", "fe80::/10", "ff00::/8", "100::/64"]).flatmap(
    lambda network: st.ip_addresses(v=6, network=network)
)


@given(host=PRIVATE.flatmap(lambda address: st.sampled_from(spellings(address))) | PRIVATE6.map("[{}]".format))
@example(host="127.1")
@example(host="0177.0.0.1")
@example(host="169.254.169.254")
@example(host="168.63.129.16")
@example(host="[::ffff:168.63.129.16]")
@example(host="[fd00:ec2::254]")
@example(host="localhost")
def test_private_and_local_addresses_are_forbidden(host: str) -> None:
    """A private or local address is never contacted, in any spelling."""
    with pytest.raises((ImageUrlForbidden, ImageUnreachable)) as caught:
        read(strict(), f"http://{host}/a.png")

    if not (isinstance(caught.value, ImageUnreachable) and host.startswith("[")):  # a machine without IPv6
        assert isinstance(caught.value, ImageUrlForbidden)
        assert caught.value.status == 403


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "::1", "::ffff:10.0.0.1", "fe80::1%eth0", "64:ff9b::a00:1", "4000::1"]
)
def test_one_private_address_among_public_ones_forbids_the_name(address: str) -> None:
    """A name is forbidden if any of its addresses is."""
    with pytest.raises(ImageUrlForbidden):
        read(strict(lambda host, port: ["93.184.215.14", address]), "http://example.com/a.png")


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f::1", "64:ff9b::5db8:d70e", "2002:5db8:d70e::"])
def test_public_addresses_may_be_fetched(address: str) -> None:
    """Public addresses are allowed, through NAT64 and 6to4 too."""
    images = HttpImages(IntakeSettings(), lambda host, port: [address])

    target, host, port = images.check("https://example.com/a.png?q=1#part")

    literal = f"[{address}]" if ":" in address else address
    assert (target, host, port) == (f"https://{literal}:443/a.png?q=1", "example.com", 443)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "FILE:///etc/passwd",
        "ftp://example.com/a.png",
        "gopher://example.com/",
        "s3://bucket/a.png",
        "http://user@example.com/a.png",
        "http://user:secret@example.com/a.png",
        "http://example.com@127.0.0.1/a.png",
        "http:///a.png",
        "http://",
        "http:a.png",
        "http://[::1/a.png",
        "http://example.com:99999/a.png",
        "http://example.com:x/a.png",
    ],
)
def test_forbidden_forms_of_addresses(url: str) -> None:
    """Other schemes, credentials and broken URLs are refused without a DNS query."""
    with pytest.raises(ImageUrlForbidden):
        read(strict(no_resolver), url)


@pytest.mark.parametrize("reference", ["x" * 1_000_000 + ":", "http://" + "a." * 500_000 + "com/"])
def test_errors_stay_small_whatever_the_reference(reference: str) -> None:
    """An error must fit into a response, so it repeats little of the client's input."""

    def unknown(host: str, port: int) -> list[str]:
        raise socket.gaierror("unknown")

    with pytest.raises(BadImage) as caught:
        read(strict(unknown), reference)

    assert len(caught.value.message) < 500


def test_urls_can_be_switched_off(web: WebServer) -> None:
    """allow_urls = false forbids every address; image data is still accepted."""
    loader = intake(allow_urls=False)

    with pytest.raises(ImageUrlForbidden):
        read(loader, web.url())
    assert load(loader, PNG).size == (4, 3)


@pytest.mark.parametrize("host", ["nowhere.invalid", "a..b", "x" * 70 + ".com", "\u4f8b\u3048..jp"])
def test_unknown_host_is_unreachable(host: str) -> None:
    """A name without an address is 502, however malformed it is."""

    def unknown(name: str, port: int) -> list[str]:
        raise socket.gaierror("unknown")

    with pytest.raises(ImageUnreachable):
        read(strict(unknown), f"http://{host}/a.png")


def test_international_names_are_asked_in_their_ascii_form(web: WebServer) -> None:
    """A name that HTTP headers cannot contain is encoded in its ASCII form."""
    asked = []

    def resolver(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    assert read(intake(resolver), web.url(host="\u4f8b\u3048.jp")) == PNG

    assert asked == ["xn--r8jz45g.jp"]
    assert "xn--r8jz45g.jp" in web.requests[0]


def test_a_fetch_has_a_user_agent_of_its_own(web: WebServer) -> None:
    """Some hosts, such as Wikimedia's, refuse the names of HTTP libraries."""
    assert read(intake(), web.url()) == PNG

    [field] = [line for line in web.requests[0].splitlines() if line.lower().startswith("user-agent:")]
    assert field.split()[1] == "torchmoor"


def test_connection_goes_to_the_judged_address(web: WebServer) -> None:
    """The connection uses the checked address without a second DNS query, which might return another."""
    answers = iter([["127.0.0.1"]])

    assert read(intake(lambda host, port: next(answers)), web.url(host="rebind.example")) == PNG


def test_environment_proxies_are_ignored(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would resolve the name again after our check, so it is not used."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    assert read(intake(), web.url()) == PNG


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_one_file(tmp_path_factory.mktemp("tls"), "images.example")


def serve_tls(web: WebServer, certificate: Path) -> list[str | None]:
    """Make the server use TLS; return the list of server names that clients request."""
    names: list[str | None] = []
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    tls.sni_callback = lambda sock, name, context: names.append(name)
    web.wrap = lambda connection: tls.wrap_socket(connection, server_side=True)
    return names


def test_tls_is_spoken_with_the_name_at_the_judged_address(
    web: WebServer, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection goes to the checked address, and the certificate must match the name."""
    names = serve_tls(web, certificate)
    monkeypatch.setattr("requests.adapters.DEFAULT_CA_BUNDLE_PATH", str(certificate))
    loader = intake(lambda host, port: ["127.0.0.1"])

    assert read(loader, f"https://images.example:{web.port}/a.png") == PNG
    with pytest.raises(ImageUnreachable, match="certificate refused"):
        read(loader, f"https://other.example:{web.port}/a.png")

    assert names == ["images.example", "other.example"]
    assert len(web.requests) == 1


def test_unknown_certificate_is_refused(web: WebServer, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates are verified, and the environment cannot add others."""
    serve_tls(web, certificate)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))

    with pytest.raises(ImageUnreachable, match="certificate refused"):
        read(intake(lambda host, port: ["127.0.0.1"]), f"https://images.example:{web.port}/a.png")

    assert web.requests == []


def test_slow_handshake_ends_at_the_total_timeout(web: WebServer) -> None:
    """A TLS handshake that arrives byte by byte ends at the total time-out."""
    web.wrap = lambda connection: drip(b"\x16\x03\x03\x40\x00")(connection) or connection

    with pytest.raises(ImageUnreachable, match="in time"):
        read(intake(total_timeout_s=0.25, read_timeout_s=5.0), web.url().replace("http", "https"))


# Redirects


def test_redirects_are_followed(web: WebServer) -> None:
    """Relative and absolute redirects are followed, and each target is checked."""
    web.routes["/one"] = redirect("/two", "301 Moved Permanently")
    web.routes["/two"] = redirect(web.url())

    assert read(intake(), web.url("/one")) == PNG
    assert len(web.requests) == 3


def test_redirect_to_a_forbidden_address_is_forbidden(web: WebServer) -> None:
    """A public host cannot redirect into the private network."""

    def resolver(host: str, port: int) -> list[str]:
        return ["127.0.0.1"] if host == "images.internal" else [host]

    loader = intake(resolver, allowed_hosts=("images.internal",))
    for where in (
        web.url(),
        "http://169.254.169.254/latest/meta-data/",
        "file:///etc/passwd",
        "http://u:p@images.internal/",
    ):
        web.routes["/out"] = redirect(where)
        with pytest.raises(ImageUrlForbidden):
            read(loader, web.url("/out", host="images.internal"))

    assert all("/out" in request for request in web.requests)


def test_name_that_moves_between_redirects_is_judged_again(web: WebServer) -> None:
    """If the name has another address at the next hop, that address is checked as well."""
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])
    web.routes["/again"] = redirect(web.url(host="moving.example"))

    with pytest.raises(ImageUrlForbidden):
        read(intake(lambda host, port: next(answers)), web.url("/again", host="moving.example"))


def test_redirect_loop_ends(web: WebServer) -> None:
    """max_redirects limits the hops."""
    web.routes["/loop"] = redirect("/loop")

    with pytest.raises(ImageUnreachable, match="redirects"):
        read(intake(max_redirects=2), web.url("/loop"))

    assert len(web.requests) == 3


@pytest.mark.parametrize("where", ["http://[", "", "//", "http://[::1]:x/"])
def test_broken_redirects_are_refused(web: WebServer, where: str) -> None:
    """A Location that is not an address is reported as the image's failure."""
    web.routes["/broken"] = redirect(where)

    with pytest.raises(BadImage):
        read(intake(), web.url("/broken"))


# Responses


@pytest.mark.parametrize(
    "status", ["404 Not Found", "500 Oops", "204 No Content", "206 Partial Content", "304 Not Modified"]
)
def test_other_statuses_are_unreachable(web: WebServer, status: str) -> None:
    """Any status except 200 is unreachable."""
    web.routes["/a.png"] = answer(PNG if status[0] == "5" else b"", status)

    with pytest.raises(ImageUnreachable, match=status[:3]):
        read(intake(), web.url())


def test_declared_size_is_judged_before_the_body(web: WebServer) -> None:
    """A Content-Length beyond the limit is refused without reading the body."""
    web.routes["/big"] = b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n"

    with pytest.raises(ImageTooLarge):
        read(intake(max_bytes=1000), web.url("/big"))


@pytest.mark.parametrize("framing", ["Connection: close\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n"])
def test_size_is_judged_while_the_body_arrives(web: WebServer, framing: str) -> None:
    """Reading a body without a declared length stops at the limit."""

    def endless(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n" + framing.encode())
        piece = b"x" * 4096
        while True:
            connection.sendall(b"1000\r\n" + piece + b"\r\n" if "chunked" in framing else piece)

    web.routes["/endless"] = endless

    with pytest.raises(ImageTooLarge):
        read(intake(max_bytes=100_000), web.url("/endless"))


def test_compressed_bomb_is_cut_at_the_limit(web: WebServer) -> None:
    body = zlib.compress(bytes(50_000_000))
    web.routes["/bomb"] = answer(body, "200 OK", "Content-Encoding: deflate")

    with pytest.raises(ImageTooLarge):
        read(intake(max_bytes=100_000), web.url("/bomb"))


def test_an_image_may_have_as_many_bytes_as_are_allowed(web: WebServer) -> None:
    """An image of exactly the allowed size is accepted; one byte more is refused, with or without a declared length."""
    text = base64.b64encode(bytes(1000)).decode()
    assert read(intake(max_bytes=1000), text) == bytes(1000)
    with pytest.raises(ImageTooLarge):
        read(intake(max_bytes=999), text)
    for head in (b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"):
        web.routes["/whole"] = lambda connection, head=head: connection.sendall(head + bytes(1000))

        assert read(intake(max_bytes=1000), web.url("/whole")) == bytes(1000)
        with pytest.raises(ImageTooLarge, match="more than 999"):
            read(intake(max_bytes=999), web.url("/whole"))


def drip(head: bytes) -> Callable[[socket.socket], None]:
    """Send the first bytes and then one byte at a time until the peer disconnects."""

    def serve(connection: socket.socket) -> None:
        connection.sendall(head)
        connection.settimeout(0.05)
        while True:
            connection.sendall(b"x")
            try:
                if not connection.recv(1):
                    return
            except TimeoutError:
                continue

    return serve


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n",
        b"HTTP/1.1 200 OK\r\nX-Slow: ",
        b"HTTP/1.1 ",
    ],
)
def test_slow_answer_ends_at_the_total_timeout(web: WebServer, head: bytes) -> None:
    """Single bytes at any point of the response do not extend a fetch beyond total_timeout_s."""
    web.routes["/slow"] = drip(head)

    with pytest.raises(ImageUnreachable, match="in time"):
        read(intake(total_timeout_s=0.25, read_timeout_s=5.0), web.url("/slow"))


@pytest.mark.timeout(60)
def test_a_connection_attempt_ends_at_the_total_timeout() -> None:
    """A connection may take longer than the whole fetch by the settings."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # more than its queue holds, so that further attempts get no answer
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())

        with pytest.raises(ImageUnreachable, match="in time"):
            read(intake(total_timeout_s=0.25, connect_timeout_s=3600.0), f"http://127.0.0.1:{full.getsockname()[1]}/")


def test_a_name_server_that_does_not_answer_ends_at_the_total_timeout(web: WebServer) -> None:
    """The client gets its error in time, although the look-up cannot be ended; its result is not used."""
    may_answer = threading.Event()

    def resolve_late(host: str, port: int) -> list[str]:
        assert may_answer.wait(60)
        return ["127.0.0.1"]

    reply = PendingReply(lambda: None)
    loader = intake(resolve_late, total_timeout_s=0.05)

    def read_for_reply() -> bytes:
        try:
            return loader.read(web.url(host="slow.example"), reply)
        except ImageUnreachable as error:  # perhaps before the look-up, on a slow machine
            reply.fail(error)
            raise

    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read_for_reply)
        wait_until(reply.has_news, "the client has its error")
        said = reply.take(1 << 20)
        may_answer.set()
        with pytest.raises(ImageUnreachable, match="in time"):
            reading.result(60)

    assert said.status == ImageUnreachable.status
    assert b"the image did not arrive in time" in said.body
    assert not web.requests


def test_no_name_is_looked_up_after_the_end(web: WebServer) -> None:
    """A look-up that began after the deadline would keep its client waiting, because nothing reports it."""
    names: list[str] = []
    reply = PendingReply(lambda: None)
    reply.cancel()

    with pytest.raises(ImageUnreachable, match="in time"):
        intake(lambda host, port: names.append(host) or ["127.0.0.1"]).read(web.url(host="late.example"), reply)

    assert not names


def test_silence_ends_at_the_read_timeout(web: WebServer) -> None:
    """A silent peer is disconnected at the read time-out."""
    web.routes["/mute"] = lambda connection: connection.recv(1)

    with pytest.raises(ImageUnreachable, match="in time"):
        read(intake(read_timeout_s=0.1), web.url("/mute"))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000,
    ],
)
def test_broken_answers_are_unreachable(web: WebServer, raw: bytes) -> None:
    """Every malformed response is reported as unreachable."""
    web.routes["/bad"] = raw

    with pytest.raises(ImageUnreachable):
        read(intake(), web.url("/bad"))


def test_refused_connection_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    with pytest.raises(ImageUnreachable):
        read(intake(), f"http://127.0.0.1:{port}/")


# Text forms


def test_data_urls_and_base64() -> None:
    """Data URL, percent-encoded data URL and base64 with white space give the same image."""
    text = base64.b64encode(PNG).decode()
    percent = "".join(f"%{byte:02x}" for byte in PNG)

    forms = [
        f"data:image/png;base64,{text}",
        f"DATA:;BASE64,{text}",
        f"data:image/png,{percent}",
        text,
        f"  {text[:20]}\n{text[20:]}\n",
    ]

    assert [read(intake(no_resolver), form) for form in forms] == [PNG] * len(forms)


@pytest.mark.parametrize(
    "text", ["!!!", "abc", "data:image/png;base64,%%%", "data:image/png", "a" * 101, "\u00e9", "C:\\a.png"]
)
def test_broken_text_is_no_image(text: str) -> None:
    """Text that is not a reference of any kind is not an image."""
    with pytest.raises(BadImage):
        read(intake(no_resolver), text)


def test_white_space_in_base64_costs_no_memory() -> None:
    """Decoding base64 does not create an object for each piece between blanks."""
    text = base64.b64encode(bytes(75_000)).decode()
    spaced = " ".join(text[i : i + 2] for i in range(0, len(text), 2))
    tracemalloc.start()

    data = read(intake(no_resolver), f"data:;base64,{spaced}")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert data == bytes(75_000)
    assert peak < 6 * len(spaced)


def test_a_machine_without_memory_does_not_blame_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running out of memory is not reported as a broken image, because the same bytes can be decoded later."""

    def fail(*arguments: object) -> Image.Image:
        raise MemoryError

    monkeypatch.setattr(Image, "new", fail)

    with pytest.raises(OutOfMemory):
        decode(intake(no_resolver), PNG)


@pytest.mark.parametrize("form", ["{}", "data:;base64,{}"])
def test_text_beyond_the_limit_is_too_large(form: str) -> None:
    """The limit on the encoded image applies to every form."""
    text = base64.b64encode(bytes(1001)).decode()

    with pytest.raises(ImageTooLarge):
        read(intake(max_bytes=1000), form.format(text))
    with pytest.raises(ImageTooLarge):
        read(intake(max_bytes=1000), form.format(text * 100))
    with pytest.raises(ImageTooLarge):
        read(intake(max_bytes=1000), bytes(1001))


# Images

RED, BLUE = (254, 0, 0), (0, 0, 254)


def near(pixel: Any, wanted: tuple[int, int, int]) -> bool:
    return all(abs(a - b) < 12 for a, b in zip(pixel, wanted, strict=True))


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_is_decoded(form: str) -> None:
    """Every accepted format gives RGB of the image's own size."""
    image = decode(intake(), encoded(Image.new("RGB", (16, 8), RED), form))

    assert image.mode == "RGB"
    assert image.size == (16, 8)
    assert near(image.getpixel((5, 5)), RED)


def test_other_formats_are_refused() -> None:
    """The decoders of other formats are never reached."""
    for form in ("PPM", "ICO", "PCX", "EPS", "PDF", "TGA"):
        with pytest.raises(NotAnImage):
            decode(intake(), encoded(Image.new("RGB", (16, 16)), form))


def test_palette_grey_and_bilevel_become_rgb() -> None:
    """Other modes are converted to RGB."""
    red = Image.new("RGB", (4, 4), RED)

    assert near(decode(intake(), encoded(red.convert("P"))).getpixel((0, 0)), RED)
    assert decode(intake(), encoded(Image.new("L", (4, 4), 77))).getpixel((0, 0)) == (77, 77, 77)
    assert decode(intake(), encoded(Image.new("1", (4, 4), 1))).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("alphas", [(0,), (255,), (1,), (0, 128, 255)])
def test_every_transparency_is_composed_as_pillow_does(alphas: tuple[int, ...]) -> None:
    """Every kind of transparency is composed as Pillow does; wholly transparent and opaque images take a shortcut."""
    picture = Image.new("RGBA", (30, 4))
    picture.putdata([(8 * i % 256, i, 255 - i, alphas[i % len(alphas)]) for i in range(120)])
    expected = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")

    assert decode(intake(), encoded(picture)).tobytes() == expected.tobytes()


def test_transparency_lies_on_white() -> None:
    """RGBA, grey with alpha and a transparent palette entry are composed on white."""
    clear = (255, 255, 255)
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([255, 0, 0, 0, 0, 255])

    assert decode(intake(), encoded(Image.new("RGBA", (4, 4), (255, 0, 0, 0)))).getpixel((0, 0)) == clear
    assert near(
        decode(intake(), encoded(Image.new("RGBA", (4, 4), (255, 0, 0, 128)))).getpixel((0, 0)), (255, 127, 127)
    )
    assert decode(intake(), encoded(Image.new("LA", (4, 4), (0, 0)))).getpixel((0, 0)) == clear
    assert decode(intake(), encoded(palette, transparency=0)).getpixel((0, 0)) == clear
    assert decode(intake(), encoded(palette, "GIF", transparency=0)).getpixel((0, 0)) == clear


def test_exif_rotation_is_applied() -> None:
    """A rotated photo is turned upright."""
    image = Image.new("RGB", (32, 16), BLUE)
    image.paste(RED, (0, 0, 16, 16))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn 90 degrees clockwise

    upright = decode(intake(), encoded(image, "JPEG", exif=exif, quality=95))

    assert upright.size == (16, 32)
    assert near(upright.getpixel((8, 4)), RED)
    assert near(upright.getpixel((8, 28)), BLUE)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_a_damaged_exif_is_ignored(form: str) -> None:
    """A damaged EXIF block does not prevent the decoding of an intact image."""
    found = decode(intake(), encoded(Image.new("RGB", (8, 8), RED), form, exif=b"Exif\0\0garbage"))

    assert near(found.getpixel((4, 4)), RED)


def shapes(size: tuple[int, int]) -> Image.Image:
    """Return a photo-like drawing with soft colors, a hard edge, and no symmetry."""
    image = Image.linear_gradient("L").resize(size).convert("RGB")
    image.paste(RED, (0, 0, size[0] // 3, size[1] // 4))
    image.paste(BLUE, (size[0] // 2, size[1] // 2, size[0], size[1] * 3 // 4))
    return image


def reduced(data: bytes, side: int | None, **values: Any) -> Image.Image:
    with intake(**values).decoded(data, lambda: None, side) as image:
        return image.copy()


@pytest.mark.parametrize("form", [*FORMATS, "RGBA", "P", "L"])
@pytest.mark.parametrize("size", [(1210, 803), (803, 1210), (400, 4000)])
def test_a_photo_is_reduced_to_no_less_than_twice_the_models_size(form: str, size: tuple[int, int]) -> None:
    """The preprocessor's result hardly differs from that of the whole photo, for every format, mode and shape."""
    photo = shapes(size)
    data = encoded(photo, form) if form in FORMATS else encoded(photo.convert(form))

    found = reduced(data, 100)

    assert found.mode == "RGB"
    assert 200 <= min(found.size) < 400
    assert abs(found.width / found.height - size[0] / size[1]) < 0.02
    scaled = [each.resize((100, 100), Image.Resampling.BICUBIC) for each in (found, decode(intake(), data))]
    difference = ImageStat.Stat(ImageChops.difference(*scaled))
    assert max(difference.mean) < 2
    assert ImageStat.Stat(scaled[0]).stddev[0] > 40  # it has content


@pytest.mark.parametrize("form", FORMATS)
def test_an_image_below_four_times_the_models_size_keeps_each_pixel(form: str) -> None:
    """Only larger images are reduced; models get all others as in transformers."""
    data = encoded(shapes((500, 399)), form)

    assert reduced(data, 100).tobytes() == decode(intake(), data).tobytes()


def test_a_reduced_photo_is_turned_upright() -> None:
    """A reduced photo is turned by the orientation that cameras store beside the pixels."""
    exif = Image.Exif()
    exif[0x0112] = 6  # turn 90 degrees clockwise
    for form in ("JPEG", "PNG", "WEBP"):
        upright = reduced(encoded(shapes((1200, 800)), form, exif=exif), 50)

        assert upright.width < upright.height
        assert near(upright.getpixel((upright.width - 3, 3)), RED)


def test_a_reduced_photo_takes_less_memory() -> None:
    """A reduced photo takes the share of its decoded pixels, and a JPEG is decoded at a smaller scale."""
    photo = shapes((1200, 800))
    pixels = 1200 * 800
    with pytest.raises(ImageTooLarge, match="bytes of memory"):
        reduced(encoded(photo), None, decoding_bytes=pixels * 5)

    assert reduced(encoded(photo), 50, decoding_bytes=pixels * 5).size == (150, 100)
    assert reduced(encoded(photo, "JPEG"), 50, decoding_bytes=pixels // 4).size == (150, 100)
    for form, options, needed in (("JPEG", {"progressive": True}, 6), ("WEBP", {}, 18), ("TIFF", {}, 8)):
        data = encoded(photo, form, **options)  # decoders that keep copies of all pixels, or their coefficients
        with pytest.raises(ImageTooLarge, match="bytes of memory"):
            reduced(data, 50, decoding_bytes=pixels * needed - 1)
        assert reduced(data, 50, decoding_bytes=pixels * (needed + 1)).size == (150, 100)
    with pytest.raises(ImageTooLarge, match="1200 x 800 pixels"):  # of the photo as it was sent
        reduced(encoded(photo, "JPEG"), 50, max_pixels=pixels - 1)


def test_animation_gives_its_first_frame() -> None:
    """The first frame of a GIF or WebP is used."""
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, BLUE)]

    for form in ("GIF", "WEBP"):
        data = encoded(frames[0], form, save_all=True, append_images=frames[1:], duration=10, loop=0)
        assert near(decode(intake(), data).getpixel((4, 4)), RED)


def test_cmyk_jpeg_becomes_rgb() -> None:
    image = decode(intake(), encoded(Image.new("RGB", (8, 8), RED).convert("CMYK"), "JPEG", quality=95))

    assert near(image.getpixel((4, 4)), RED)


@pytest.mark.parametrize(("form", "mode"), [("PNG", "I;16"), ("TIFF", "I;16"), ("TIFF", "I")])
def test_deep_greys_are_scaled(form: str, mode: str) -> None:
    """16-bit greys keep their brightness instead of being clipped to white."""
    image = Image.new(mode, (2, 1))
    image.putpixel((0, 0), 65_535)
    image.putpixel((1, 0), 32_768)

    decoded = decode(intake(), encoded(image, form))

    assert decoded.getpixel((0, 0)) == (255, 255, 255)
    assert near(decoded.getpixel((1, 0)), (128, 128, 128))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("kept", [0.3, 0.6, 0.9])
def test_truncated_images_are_broken(form: str, kept: float) -> None:
    data = encoded(Image.effect_noise((64, 64), 90).convert("RGB"), form)

    with pytest.raises(NotAnImage):
        decode(intake(), data[: int(len(data) * kept)])


def test_empty_and_text_bytes_are_no_image() -> None:
    """Empty bytes and text give 415 and a message without the bytes."""
    for data in (b"", b"hello", b"<svg></svg>", b"\x89PNG\r\n\x1a\n"):
        with pytest.raises(NotAnImage) as caught:
            load(intake(), data)
        assert caught.value.status == 415


def test_videos_and_sounds_are_refused_as_such() -> None:
    """A data URL with a video or audio type is refused with a clear error."""
    for kind in ("video/mp4", "AUDIO/wav"):
        with pytest.raises(UnsupportedMedia, match="is not supported"):
            read(intake(), f"data:{kind};base64,AAAA")


def png_header(width: int, height: int) -> bytes:
    chunk = b"IHDR" + width.to_bytes(4) + height.to_bytes(4) + b"\x08\x02\x00\x00\x00"
    idat = b"IDAT" + zlib.compress(b"\x00" * 100)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (len(c) - 4).to_bytes(4) + c + zlib.crc32(c).to_bytes(4) for c in (chunk, idat, b"IEND")
    )


@pytest.mark.parametrize(("width", "height"), [(10_000, 10_001), (60_000, 60_000), (1 << 30, 1 << 30)])
def test_decompression_bombs_are_refused_by_their_header(width: int, height: int) -> None:
    """A small file that claims a huge image is refused without decoding."""
    with pytest.raises(ImageTooLarge) as caught:
        decode(intake(), png_header(width, height))

    assert caught.value.status == 413


def test_pixels_are_limited() -> None:
    """An image with one pixel more than max_pixels is refused."""
    assert load(intake(max_pixels=12), PNG).size == (4, 3)
    with pytest.raises(ImageTooLarge):
        load(intake(max_pixels=11), PNG)


def test_a_higher_limit_is_not_cut_off_by_pillows_own() -> None:
    """Pillow alone refuses more than 179 million pixels; only max_pixels decides, by the size in the header."""
    data = png_header(20_000, 20_000)

    with pytest.raises(ImageTooLarge, match="20000 x 20000 pixels, more than 399999999"):
        decode(intake(max_pixels=399_999_999), data)
    with pytest.raises(NotAnImage):  # past the limit, and found to have no pixels
        decode(intake(max_pixels=400_000_000, decoding_bytes=1 << 40), data)


def test_threads_of_pixels_are_refused() -> None:
    """A preprocessor that scales by the shorter side would enlarge a one-pixel line to gigabytes."""
    assert decode(intake(), encoded(Image.new("RGB", (100, 1)))).size == (100, 1)
    for size in ((101, 1), (1, 60_000)):
        with pytest.raises(ImageTooLarge):
            decode(intake(), encoded(Image.new("RGB", size)))


SEEDS = [encoded(Image.new("RGB", (9, 7), RED), form) for form in FORMATS] + [
    encoded(Image.new("P", (9, 7), 1)),
    encoded(Image.new("RGBA", (9, 7), (1, 2, 3, 4)), "WEBP"),
]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_mutated_images_give_an_image_or_a_bad_image_error(data: st.DataObject) -> None:
    """The decoder raises no exception outside the BadImage family, whatever the bytes."""
    raw = bytearray(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))]

    try:
        image = reduced(bytes(raw), data.draw(st.sampled_from([None, 1])), max_pixels=1_000_000)
    except BadImage:
        return
    assert image.mode == "RGB"


@settings(max_examples=200, deadline=None)
@given(reference=st.binary(max_size=200) | st.text(max_size=100) | st.text(max_size=60).map("data:{}".format))
def test_any_reference_gives_an_image_or_a_bad_image_error(reference: bytes | str) -> None:
    """The intake raises no exception outside the BadImage family, whatever the reference."""

    def unknown(host: str, port: int) -> list[str]:
        raise socket.gaierror("unknown")

    with pytest.raises(BadImage):
        load(strict(unknown), reference)


@settings(max_examples=200, deadline=None)
@given(rest=st.text(max_size=40), address=st.ip_addresses().map(str) | st.sampled_from(["not an address", ""]))
def test_any_url_is_judged(rest: str, address: str) -> None:
    """The check raises no exception outside the BadImage family, and never accepts a private address."""
    images = HttpImages(IntakeSettings(), lambda host, port: [address] if "." in address or ":" in address else [])
    try:
        target, *_ = images.check("http://" + rest)
    except BadImage:
        return
    assert address in target
