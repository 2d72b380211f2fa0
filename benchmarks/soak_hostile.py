"""Clients of soak.py that try to exhaust the fleet: each kind is a thread that repeats its mischief."""

import base64
import io
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit
from uuid import uuid4

from PIL import Image

TIMEOUT_S = 30.0
HELD_S = 3.0  # how long a silent connection is kept
PAUSE_S = 2.0
LARGE_BODY = b'{"inputs": "' + b"a" * 5_900_000 + b'"}'


def pipeline(runtime: str, admin: str) -> None:
    """Send a megabyte of requests on one connection and read no answer."""
    request = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with _connect(runtime) as connection:
        connection.settimeout(HELD_S)
        connection.sendall(request * (1_000_000 // len(request)))


def send_odd_heads(runtime: str, admin: str) -> None:
    """Send heads that have never been seen: each with other connection options."""
    with _connect(runtime) as connection:
        for _ in range(20):
            options = ",".join(f"x{random.randrange(10**9)}" for _ in range(900))
            connection.sendall(f"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: {options}\r\n\r\n".encode())
            connection.recv(65536)


def send_large_bodies(runtime: str, admin: str) -> None:
    """Send eight bodies of almost 6 MB at once."""
    _at_once(8, lambda: _post(runtime, "", LARGE_BODY))


def send_forms(runtime: str, admin: str) -> None:
    """Send the longest form of empty fields that an instance is sent, and a longer one."""
    for num_fields in (95_000, 2_900_000):
        _post(runtime, "", b"a&" * num_fields, "application/x-www-form-urlencoded")


def send_large_pictures(runtime: str, admin: str) -> None:
    """Open a session with a small file that is a very large picture."""
    file = io.BytesIO()
    Image.new("RGBA", (7070, 7070)).save(file, "PNG", compress_level=9)
    image = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    _post(runtime, "NEW_SESSION", json.dumps({"type": "start_session", "image": image}).encode())


def hold_connections(runtime: str, admin: str) -> None:
    """Open connections to both planes and send nothing, or half a head."""
    held = [_connect(url) for url in (runtime, admin) for _ in range(100)]
    for connection in held[::2]:
        connection.sendall(b"GET /ping HT")
    time.sleep(HELD_S)
    for connection in held:
        connection.close()


def forget_sessions(runtime: str, admin: str) -> None:
    """Open sessions and never close them."""
    for _ in range(5):
        _post(runtime, "NEW_SESSION", b'{"requestType": "NEW_SESSION"}')


def leave_early(runtime: str, admin: str) -> None:
    """Ask for streams and leave at the first part."""

    def ask() -> None:
        body = json.dumps({"inputs": "Describe the image.", "parameters": {"max_new_tokens": 200}, "stream": True})
        with _connect(runtime) as connection:
            head = "POST /invocations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            connection.recv(1000)

    _at_once(4, ask)


KINDS: tuple[Callable[[str, str], None], ...] = (
    *(pipeline, send_odd_heads, send_large_bodies, send_forms, send_large_pictures),
    *(hold_connections, forget_sessions, leave_early),
)


class Mischief(threading.Thread):
    """Repeats one kind until `stop` is set. Refusals and broken connections are what the fleet should answer."""

    def __init__(self, kind: Callable[[str, str], None], runtime: str, admin: str, stop: threading.Event) -> None:
        super().__init__(name=kind.__name__, daemon=True)
        self._kind, self._runtime, self._admin, self._stop_event = kind, runtime, admin, stop
        self.num_runs = 0

    def run(self) -> None:
        while not self._stop_event.is_set():
            with suppress(OSError, HTTPException):
                self._kind(self._runtime, self._admin)
            self.num_runs += 1
            self._stop_event.wait(PAUSE_S)


def _connect(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_S)


def _post(runtime: str, session: str, body: bytes, content_type: str = "application/json") -> None:
    fields = {"Content-Type": content_type, "amz-sdk-invocation-id": str(uuid4())}
    if session:
        fields["X-Amzn-SageMaker-Session-Id"] = session
    connection = HTTPConnection(urlsplit(runtime).netloc, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/endpoints/llava/invocations", body, fields)
        connection.getresponse().read()
    finally:
        connection.close()


def _at_once(number: int, action: Callable[[], None]) -> None:
    def run() -> None:
        with suppress(OSError, HTTPException):
            action()

    threads = [threading.Thread(target=run, daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
