"""Serves as the sink of soak.py, which refuses every request at once, so that the hostile clients' own load shows.

It reads each body, and then answers 400. Of pipelined requests, it answers one per read.
"""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

REFUSAL = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
LENGTH = b"content-length:"


class Refusing(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._left = 0  # bytes of a body
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._left:
            head, end, data = (self._head + data).partition(b"\r\n\r\n")
            if not end:
                self._head = head
                return
            self._head = b""
            lines = [line.lower() for line in head.split(b"\r\n")]
            lengths = [int(line[len(LENGTH) :]) for line in lines if line.startswith(LENGTH)]
            self._left = lengths[0] if lengths else 0
            if not self._left:
                self._transport.write(REFUSAL)
                return
        self._left = max(0, self._left - len(data))
        if not self._left:
            self._transport.write(REFUSAL)


@contextmanager
def running_sink() -> Iterator[str]:
    """Run the server in a process of its own; yield its URL."""
    command = (sys.executable, "-m", "benchmarks.soak_sink")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.communicate(timeout=30)  # it ends with its standard input


async def serve() -> None:
    """Serve until the standard input ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Refusing, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve())
