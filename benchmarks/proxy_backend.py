"""Serves as the backend of the proxies in proxy.py, with little work per request, so that the proxy is the bottleneck.

    python -m benchmarks.proxy_backend PORT[,PORT...]

A request whose body begins with {"tokens": N is answered with N events, 20 ms apart, the first at once; one of more
than a megabyte with its number of bytes; any other with {"ok":true}.
"""

import asyncio
import re
import sys
from typing import cast

import uvloop

GAP_S = 0.02
EVENT = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" token"}]}\n\n'
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
TOKENS = re.compile(rb'\{"tokens": (\d+)')
KEPT_BYTES = 1 << 20


class Connection(asyncio.Protocol):
    """One connection, which serves one request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.head = b""
        self.body = b""
        self.num_left = 0  # bytes of the body; 0 until a head has arrived
        self.num_bytes = 0
        self.num_tokens = 0

    def connection_lost(self, error: Exception | None) -> None:
        self.num_tokens = 0

    def data_received(self, data: bytes) -> None:
        if self.num_left == 0:
            self.head += data
            head, end, data = self.head.partition(b"\r\n\r\n")
            if not end:
                return
            self.head = b""
            length = LENGTH.search(head)
            self.body = b""
            if length is None and b"chunked" in head.lower():
                raise SystemExit("proxy_backend: a proxy sent a request without Content-Length")
            self.num_left = self.num_bytes = 0 if length is None else int(length[1])
        self.num_left -= len(data)
        if self.num_bytes <= KEPT_BYTES:
            self.body += data
        if self.num_left <= 0:
            self.num_left = 0
            self.answer()

    def answer(self) -> None:
        tokens = TOKENS.match(self.body)
        if tokens is not None:
            self.transport.write(STREAM)
            self.num_tokens = int(tokens[1])
            self.send_token()
            return
        body = b'{"bytes":%d}' % self.num_bytes if self.num_bytes > KEPT_BYTES else b'{"ok":true}'
        self.transport.write(ANSWER % (len(body), body))

    def send_token(self) -> None:
        if self.num_tokens <= 0 or self.transport.is_closing():
            return
        self.num_tokens -= 1
        if self.num_tokens:
            self.transport.write(CHUNK)
            asyncio.get_running_loop().call_later(GAP_S, self.send_token)
        else:
            self.transport.write(CHUNK + b"0\r\n\r\n")


async def main() -> None:
    loop = asyncio.get_running_loop()
    for port in sys.argv[1].split(","):
        await loop.create_server(Connection, "127.0.0.1", int(port), backlog=1024)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
