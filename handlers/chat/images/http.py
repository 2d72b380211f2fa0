"""Fetches images from http(s) addresses, and decides which may be fetched.

A host is resolved once and each of its addresses is checked; the connection goes to a checked address, also after a
redirect.
"""

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError

from handlers.chat.images.schemes import HTTP
from handlers.errors import ImageTooLarge, ImageUnreachable, ImageUrlForbidden, Overloaded
from handlers.requests.reply import PendingReply
from handlers.settings.intake import IntakeSettings
from torchmoor.wire.connection_errors import failure_reason
from torchmoor.wire.public_addresses import destination, is_public, resolve

# Some hosts, such as Wikimedia's, refuse the names of HTTP libraries.
USER_AGENT = "torchmoor (image of a request to a vision-language model)"
Resolver = Callable[[str, int], list[str]]


class _Deadline:
    """Cuts the connections of one fetch when its time is over.

    A socket's time-out starts again with every byte, so a slow sender could keep a fetch open for hours. A name server
    may take longer, too, and nothing can interrupt that. on_stuck: called if the time is over meanwhile.
    """

    def __init__(self, seconds: float, on_stuck: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._ends_at = time.monotonic() + seconds
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._on_stuck = on_stuck
        self._is_stuck = False
        self.is_over = False

    def __enter__(self) -> "_Deadline":
        self._timer.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._timer.cancel()
        with self._lock:
            for sock in self._sockets:
                sock.close()
            self._sockets.clear()

    @property
    def left_s(self) -> float:
        """Return the time that is left; always above 0, as a socket's time-out must be."""
        return max(0.001, self._ends_at - time.monotonic())

    @contextlib.contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Let the block take as long as it takes. Raises ImageUnreachable before or after it if the time is over."""
        self._is_stuck = True  # before the check, so that `_end` reports a block that begins at the deadline
        try:
            self._check()
            yield
        finally:
            self._is_stuck = False
        self._check()

    def _check(self) -> None:
        if self.is_over:
            raise _late()

    def _end(self) -> None:
        self.cut()
        if self._is_stuck:
            self._on_stuck()

    def watch(self, sock: socket.socket) -> None:
        """Close this socket at the deadline.

        Keeps a duplicate, because TLS detaches the original; a shutdown ends both.
        """
        with self._lock:
            self._sockets.append(sock.dup())
            is_late = self.is_over
        if is_late:
            self.cut()

    def cut(self) -> None:
        """End the fetch now. Any thread."""
        with self._lock:
            self.is_over = True
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


class _PinnedAdapter(HTTPAdapter):
    """Verifies TLS against the host name, although the URL contains the checked address."""

    def __init__(self, host: str, deadline: _Deadline) -> None:
        self._host = host
        self._deadline = deadline
        super().__init__(max_retries=0)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": self._http_pool, "https": self._https_pool}

    def _http_pool(self, *args: Any, **kwargs: Any) -> HTTPConnectionPool:
        return self._watched(HTTPConnectionPool(*args, **kwargs))

    def _https_pool(self, *args: Any, **kwargs: Any) -> HTTPConnectionPool:
        names = {"server_hostname": self._host, "assert_hostname": self._host}
        return self._watched(HTTPSConnectionPool(*args, **{**kwargs, **names}))

    def _watched(self, pool: HTTPConnectionPool) -> HTTPConnectionPool:
        deadline = self._deadline

        class Connection(pool.ConnectionCls):  # type: ignore[name-defined,misc]
            def _new_conn(self) -> socket.socket:
                sock: socket.socket = super()._new_conn()
                deadline.watch(sock)
                return sock

        pool.ConnectionCls = Connection
        return pool


class HttpImages:
    """Fetches images within limits. Safe to call from several threads."""

    def __init__(
        self, settings: IntakeSettings, resolver: Resolver = resolve, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._resolver = resolver
        self._clock = clock
        self._allowed_names = {host.lower() for host in settings.allowed_hosts if not _is_network(host)}
        self._allowed_networks = [
            ipaddress.ip_network(host, strict=False) for host in settings.allowed_hosts if _is_network(host)
        ]

    def read(self, url: str, reply: PendingReply) -> bytes:
        """Fetch an image of at most `max_bytes`. If the reply is cancelled, the fetch ends."""
        if not self._settings.allow_urls:
            raise ImageUrlForbidden("this worker does not fetch images; send the image itself")
        with _Deadline(self._find_time(reply), lambda: reply.cancel(_late())) as deadline:
            reply.on_cancel(lambda reason: deadline.cut())
            for _ in range(self._settings.max_redirects + 1):
                answer = self._fetch_once(url, deadline)
                if isinstance(answer, bytes):
                    return answer
                try:
                    url = urljoin(url, answer)
                except ValueError as exc:
                    raise ImageUnreachable("the image's address redirects to an invalid URL") from exc
        raise ImageUnreachable(f"the image's address redirects more than {self._settings.max_redirects} times")

    def _find_time(self, reply: PendingReply) -> float:
        """Return how many seconds a fetch may take.

        Raises Overloaded if the request has waited too long for a thread.
        """
        left_s = reply.fetches_end_at - self._clock()
        if left_s <= 0:
            raise Overloaded("too many images are being fetched; try again later")
        return min(left_s, self._settings.total_timeout_s)

    def _fetch_once(self, url: str, deadline: _Deadline) -> bytes | str:
        """Return the body, or the address of a redirect."""
        with deadline.uninterrupted():
            target, host, port = self.check(url)
        # A connection can be cut only once it is there.
        timeout = (min(self._settings.connect_timeout_s, deadline.left_s), self._settings.read_timeout_s)
        default_port = 443 if url.lower().startswith("https") else 80
        name = f"[{host}]" if ":" in host else host
        host_field = name if port == default_port else f"{name}:{port}"
        headers = {"Host": host_field, "Accept": "image/*", "User-Agent": USER_AGENT}
        try:
            with requests.Session() as session:
                session.trust_env = False  # a proxy from the environment would resolve the name again
                session.mount("http://", _PinnedAdapter(host, deadline))
                session.mount("https://", _PinnedAdapter(host, deadline))
                with session.get(
                    target, headers=headers, timeout=timeout, stream=True, allow_redirects=False
                ) as response:
                    if response.is_redirect:
                        return response.headers["Location"]
                    if response.status_code != 200:
                        raise ImageUnreachable(f"the image's address answered with status {response.status_code}")
                    return self._read_body(response, deadline)
        except requests.exceptions.Timeout as exc:
            raise ImageUnreachable("the image's address did not answer in time") from exc
        except (requests.exceptions.RequestException, HTTPError, ValueError) as exc:  # ValueError: a broken Location
            if deadline.is_over:
                raise _late() from exc
            raise ImageUnreachable(f"the image's address cannot be reached ({failure_reason(exc)})") from exc

    def _read_body(self, response: requests.Response, deadline: _Deadline) -> bytes:
        limit = self._settings.max_bytes
        declared = response.headers.get("Content-Length", "")
        if declared.isdigit() and int(declared) > limit:
            raise ImageTooLarge(f"the image has {declared} bytes, more than {limit}")
        data = bytearray()
        for piece in response.iter_content(65_536):
            data += piece
            if len(data) > limit:
                raise ImageTooLarge(f"the image has more than {limit} bytes")
        if deadline.is_over:  # a body without a declared length ends quietly when it is cut
            raise _late()
        return bytes(data)

    def check(self, url: str) -> tuple[str, str, int]:
        """Check a URL: its scheme, its host and the host's addresses, and that it has no password.

        Return the URL with a checked address instead of the host, the host, and the port.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as exc:
            raise ImageUrlForbidden("the image's address is not a valid URL") from exc
        if parts.scheme.lower() not in HTTP or not host:
            raise ImageUrlForbidden("an image address must be http or https and name a host")
        if parts.username is not None or parts.password is not None:
            raise ImageUrlForbidden("an image address must not carry a user name or password")
        port = port or (443 if parts.scheme.lower() == "https" else 80)
        try:
            host = host if ":" in host else host.encode("idna").decode()
            addresses = self._resolver(host, port)
        except (OSError, UnicodeError) as exc:
            raise ImageUnreachable(f"the host {host[:255]!r} of the image's address is not known") from exc
        if not addresses:
            raise ImageUnreachable(f"the host {host} of the image's address has no address")
        for address in addresses:
            if not self._may_fetch(host, address):
                raise ImageUrlForbidden(
                    f"the image's address leads to a private or local network ({host}); "
                    "an operator can allow it with torchmoor up --allow-image-host or handler.intake.allowed_hosts"
                )
        literal = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
        target = parts._replace(netloc=f"{literal}:{port}", fragment="").geturl()
        return target, host, port

    def _may_fetch(self, host: str, address: str) -> bool:
        if host.lower() in self._allowed_names:
            return True
        ip = destination(address)
        return is_public(ip) or any(ip in network for network in self._allowed_networks)


def _late() -> ImageUnreachable:
    return ImageUnreachable("the image did not arrive in time")


def _is_network(host: str) -> bool:
    try:
        ipaddress.ip_network(host, strict=False)
    except ValueError:
        return False
    return True
