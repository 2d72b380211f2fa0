"""Generates the load of proxy.py: requests with wrk, streams and uploads with sockets of its own."""

import asyncio
import re
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

from benchmarks.proxy_arms import LOAD_CORE

BOTO_HEADERS = {
    "Accept": "*/*",
    "Accept-Encoding": "identity",
    "User-Agent": "Boto3/1.43.6 md/Botocore#1.43.6 ua/2.1 os/linux#6.1 md/arch#x86_64 lang/python#3.11.7 "
    "cfg/retry-mode#legacy",
    "X-Amz-Date": "20261121T093000Z",
    "Authorization": "AWS4-HMAC-SHA256 Credential=AKIAEXAMPLE/20261121/us-east-1/sagemaker/aws4_request, "
    "SignedHeaders=content-type;host;x-amz-date;x-amzn-sagemaker-session-id, "
    "Signature=5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7",
    "amz-sdk-invocation-id": "2f8c4cc1-5e0f-4ec0-9b7c-7f1a3a1f2b11",
    "amz-sdk-request": "attempt=1",
}
SCRIPT = """local sessions = {{{sessions}}}
local requests, next = {{}}, 0
init = function(args)
  for i, session in ipairs(sessions) do
    local headers = {{["Content-Type"] = "application/json"{headers}}}
    if session ~= "" then headers["X-Amzn-SageMaker-Session-Id"] = session end
    requests[i] = wrk.format("POST", "{path}", headers, [[{body}]])
  end
end
request = function()
  next = next % #requests + 1
  return requests[next]
end
"""
PAUSE = """function delay() return {pause_ms} end
"""


def wrk(name: str, port: int, script: Path, *, connections: int, seconds: int) -> int:
    """Send a script's requests in closed loops; return the number of answers. Exits if an answer is not 200.

    The time-out is long because a busy machine may suspend a proxy for seconds, which costs no processor time.
    """
    command = ["taskset", "-c", str(LOAD_CORE), "wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "20s"]
    command += ["-s", str(script)]
    done = subprocess.run(
        [*command, f"http://127.0.0.1:{port}"], capture_output=True, text=True, check=True, timeout=seconds + 30
    )
    requests = re.search(r"(\d+) requests in", done.stdout)
    if requests is None or "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise SystemExit(f"proxy: wrk reports errors of {name}:\n{done.stdout}{done.stderr}")
    return int(requests[1])


def write_script(
    path: Path, *, target: str, body: bytes, sessions: list[str], headers: dict[str, str], pause_ms: int = 0
) -> Path:
    """Write a wrk script that uses the sessions in turn; "" is a request without one. pause_ms: between two requests.

    Each connection pauses by itself.
    """
    pause = PAUSE.format(pause_ms=pause_ms) if pause_ms else ""
    path.write_text(
        pause
        + SCRIPT.format(
            sessions=", ".join(f'"{session}"' for session in sessions),
            headers="".join(f', ["{name}"] = "{value}"' for name, value in headers.items()),
            path=target,
            body=body.decode(),
        )
    )
    return path


class Streamed(NamedTuple):
    """Seconds from a stream's request to the first byte of its body, and the length of the body."""

    first_byte_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A request for a stream of a fixed number of tokens."""

    path: str
    num_tokens: int
    session: str = ""

    def render(self) -> bytes:
        """Return the bytes on the wire."""
        body = f'{{"tokens": {self.num_tokens}, "model": "llava", "stream": true}}'.encode()
        session = f"X-Amzn-SageMaker-Session-Id: {self.session}\r\n" if self.session else ""
        head = f"POST {self.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{session}"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class StreamClient(asyncio.Protocol):
    """A connection that requests one stream after the other."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self._done: asyncio.Future[Streamed] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    async def ask(self, request: StreamRequest) -> Streamed:
        """Send a request and wait until the stream has ended."""
        self._head = b""
        self._num_bytes = 0
        self._tail = b""
        self._first_at = 0.0
        self._done = asyncio.get_running_loop().create_future()
        self._sent_at = time.perf_counter()
        self.transport.write(request.render())
        return await self._done

    def data_received(self, data: bytes) -> None:
        if not self._first_at:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end or not data:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"proxy: a stream got the answer {self._head[:300]!r}")
            self._first_at = time.perf_counter()
        self._num_bytes += len(data)
        self._tail = (self._tail + data)[-7:]
        if self._tail == b"\r\n0\r\n\r\n" and self._done is not None and not self._done.done():
            self._done.set_result(Streamed(self._first_at - self._sent_at, self._num_bytes))

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("the proxy closed the connection"))


async def open_streams(port: int, number: int) -> list[StreamClient]:
    """Open this number of connections."""
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(StreamClient, "127.0.0.1", port))[1] for _ in range(number)]


async def stream_all(clients: list[StreamClient], requests: list[StreamRequest]) -> list[Streamed]:
    """Request one stream on each connection, with starts spread evenly over 20 ms."""

    async def one(number: int, client: StreamClient) -> Streamed:
        await asyncio.sleep(0.02 * number / len(clients))
        return await client.ask(requests[number % len(requests)])

    return await asyncio.gather(*(one(number, client) for number, client in enumerate(clients)))


async def first_bytes(client: StreamClient, requests: list[StreamRequest]) -> list[float]:
    """Request one stream after the other; return the seconds to the first byte of each."""
    return [(await client.ask(request)).first_byte_s for request in requests]


def upload(port: int, path: str, num_bytes: int) -> float:
    """Send a body of this size; return the seconds until the answer. Exits if it is not 200."""
    piece = bytes(1 << 20)
    with socket.create_connection(("127.0.0.1", port), timeout=120) as sock:
        began = time.perf_counter()
        sock.sendall(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
            f"Content-Length: {num_bytes}\r\n\r\n".encode()
        )
        for _ in range(num_bytes // len(piece)):
            sock.sendall(piece)
        sock.sendall(piece[: num_bytes % len(piece)])
        answer = sock.recv(65536)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"proxy: an upload got the answer {answer[:300]!r}")
        return time.perf_counter() - began
