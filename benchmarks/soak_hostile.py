"""Runs the hostile clients of soak.py, which try to exhaust the fleet. Each kind is a thread that repeats its attack.

The clients run in one separate process of the lowest priority, so that they do not take the processor from the fleet
and the good clients. Their requests are generated before they start. They use another address and another token than
the good clients. Each kind attacks every PERIOD_S, or less often if an attack takes longer.
"""

import base64
import io
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit
from uuid import uuid4

from PIL import Image

from benchmarks.fleet import cpu_of

ADDRESS = "127.0.0.2"
NICE = 19
TIMEOUT_S = 30.0
HELD_S = 3.0  # duration of a silent connection
PERIOD_S = 4.0
LARGE_BODY = b'{"inputs": "' + b"a" * 5_900_000 + b'"}'
PING = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
NUM_ODD_HEADS = 20
NUM_SILENT_BODIES = 100


class Target:
    """The fleet as the hostile clients see it."""

    def __init__(self, runtime: str, admin: str, token: str) -> None:
        self.runtime, self.admin = runtime, admin
        self._token = token

    def connect(self, url: str = "") -> socket.socket:
        """Open a connection to the data plane, or to another address."""
        place = urlsplit(url or self.runtime)
        return socket.create_connection((place.hostname, place.port), TIMEOUT_S, (ADDRESS, 0))

    def head(self, num_body_bytes: int) -> bytes:
        lines = (
            *("POST /invocations HTTP/1.1", "Host: localhost", f"Authorization: Bearer {self._token}"),
            *("Content-Type: application/json", f"Content-Length: {num_body_bytes}", "", ""),
        )
        return "\r\n".join(lines).encode()

    def post(self, body: bytes, session: str = "", content_type: str = "application/json") -> None:
        fields = {
            "Content-Type": content_type,
            "Authorization": f"Bearer {self._token}",
            "amz-sdk-invocation-id": str(uuid4()),
        }
        if session:
            fields["X-Amzn-SageMaker-Session-Id"] = session
        connection = HTTPConnection(urlsplit(self.runtime).netloc, timeout=TIMEOUT_S, source_address=(ADDRESS, 0))
        try:
            connection.request("POST", "/endpoints/llava/invocations", body, fields)
            connection.getresponse().read()
        finally:
            connection.close()


def pipeline(target: Target) -> None:
    """Send a megabyte of requests on one connection and read no answer."""
    with target.connect() as connection:
        connection.settimeout(HELD_S)
        connection.sendall(PING * (1_000_000 // len(PING)))


def send_odd_heads(target: Target) -> None:
    """Send heads whose connection options are rarely repeated."""
    with target.connect() as connection:
        for head in random.sample(_odd_heads(), NUM_ODD_HEADS):
            connection.sendall(head)
            connection.recv(65536)


@cache
def _odd_heads() -> list[bytes]:
    """Return 16 MB of heads, twice as many as the proxy caches."""
    numbers = [iter(range(first, first + 900)) for first in range(10**8, 10**8 + 1_500_000, 1000)]
    options = (",".join(f"x{number}" for number in each) for each in numbers)
    return [f"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: {each}\r\n\r\n".encode() for each in options]


def send_large_bodies(target: Target) -> None:
    """Send eight bodies of almost 6 MB at once."""
    _at_once(8, lambda: target.post(LARGE_BODY))


def hold_bodies(target: Target) -> None:
    """Declare the longest bodies and send none of them."""
    _hold([target.connect() for _ in range(NUM_SILENT_BODIES)], target.head(64 << 20) + b"{")


def send_forms(target: Target) -> None:
    """Send the longest form of empty fields that the proxy forwards, and a longer one."""
    for num_fields in (95_000, 2_900_000):
        target.post(b"a&" * num_fields, content_type="application/x-www-form-urlencoded")


def send_large_images(target: Target) -> None:
    """Open a session with a small file that decodes to a very large image."""
    target.post(_opening_with_large_image(), "NEW_SESSION")


@cache
def _opening_with_large_image() -> bytes:
    file = io.BytesIO()
    Image.new("RGBA", (7070, 7070)).save(file, "PNG", compress_level=9)
    image = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return json.dumps({"type": "start_session", "image": image}).encode()


def hold_connections(target: Target) -> None:
    """Open connections to both planes; send half a head on some and nothing on the others."""
    held = [target.connect(url) for url in (target.runtime, target.admin) for _ in range(100)]
    _hold(held[::2], b"GET /ping HT")
    for connection in held[1::2]:
        connection.close()


def forget_sessions(target: Target) -> None:
    """Open sessions and never close them."""
    for _ in range(5):
        target.post(b'{"requestType": "NEW_SESSION"}', "NEW_SESSION")


def leave_early(target: Target) -> None:
    """Request streams and disconnect after the first part."""

    def ask() -> None:
        body = json.dumps({"inputs": "Describe the image.", "parameters": {"max_new_tokens": 200}, "stream": True})
        with target.connect() as connection:
            connection.sendall(target.head(len(body)) + body.encode())
            connection.recv(1000)

    _at_once(4, ask)


KINDS: tuple[Callable[[Target], None], ...] = (
    *(pipeline, send_odd_heads, send_large_bodies, hold_bodies, send_forms, send_large_images),
    *(hold_connections, forget_sessions, leave_early),
)


class HostileClients:
    """The process of the hostile clients, which runs until `stop`. kinds: names; empty: all."""

    def __init__(self, runtime: str, admin: str, token: str, kinds: Sequence[str] = ()) -> None:
        command = (sys.executable, "-m", "benchmarks.soak_hostile", runtime, admin, token, *kinds)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # until their requests are generated

    def cpu_s(self) -> float:
        """Return the processor time of the clients so far."""
        return cpu_of([self._process.pid])

    def stop(self) -> dict[str, int]:
        """End the process; return the number of attacks of each kind."""
        found: dict[str, int] = json.loads(self._process.communicate(timeout=2 * TIMEOUT_S)[0])
        return found


def main(arguments: Sequence[str]) -> None:
    """Run until the standard input ends."""
    os.nice(NICE)
    runtime, admin, token, *names = arguments
    target, stop = Target(runtime, admin, token), threading.Event()
    _odd_heads()
    _opening_with_large_image()
    print("ready", flush=True)
    num_runs = {kind.__name__: 0 for kind in KINDS if not names or kind.__name__ in names}

    def repeat(kind: Callable[[Target], None]) -> None:
        while not stop.is_set():
            next_at = time.monotonic() + PERIOD_S
            with suppress(OSError, HTTPException):  # the fleet is expected to refuse requests and close connections
                kind(target)
            num_runs[kind.__name__] += 1
            stop.wait(max(0.0, next_at - time.monotonic()))

    for kind in KINDS:
        if kind.__name__ in num_runs:
            threading.Thread(target=repeat, args=(kind,), daemon=True).start()
    sys.stdin.read()
    stop.set()
    print(json.dumps(num_runs), flush=True)
    os._exit(0)  # without waiting for requests that are still running


def _hold(connections: Sequence[socket.socket], data: bytes) -> None:
    for connection in connections:
        connection.sendall(data)
    time.sleep(HELD_S)
    for connection in connections:
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


if __name__ == "__main__":
    main(sys.argv[1:])
