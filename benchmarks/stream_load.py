"""Generates the load of stream.py: one thread reads a fixed number of event streams in closed loops."""

import json
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

PART_BYTES = 1 << 18
MARK = b"data:"  # one event for each token
LAST = b"0\r\n\r\n"  # the last chunk of an answer


@dataclass(slots=True)
class Counted:
    """Counts of one measurement. gaps_s: between parts of a stream; firsts_s: to the first part of an answer."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_parts: int = 0
    gaps_s: list[float] = field(default_factory=list)
    firsts_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Stream:
    connection: socket.socket
    asked_at: float
    last_at: float | None = None


def run_load(
    url: str, question: dict[str, Any], *, num_streams: int, warm_s: float, seconds: float, mark: Callable[[], Any]
) -> tuple[Counted, Any, Any]:
    """Keep this number of streams open. Return the counts after the first `warm_s`.

    mark: is called at the start and at the end of the measurement; its two results are returned, too.
    """
    address, body = urlsplit(url), json.dumps(question).encode()
    request = (
        b"POST /invocations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    ) % len(body) + body
    with selectors.DefaultSelector() as selector:
        try:
            for _ in range(num_streams):
                connection = socket.create_connection((address.hostname, address.port), timeout=60)
                selector.register(connection, selectors.EVENT_READ, _Stream(connection, time.monotonic()))
                connection.sendall(request)
            _read_until(time.monotonic() + warm_s, selector, request, Counted())
            before, began, counted = mark(), time.monotonic(), Counted()
            _read_until(began + seconds, selector, request, counted)
            counted.seconds = time.monotonic() - began
            return counted, before, mark()
        finally:
            for key in list(selector.get_map().values()):
                key.data.connection.close()


def _read_until(end: float, selector: selectors.BaseSelector, request: bytes, counted: Counted) -> None:
    while time.monotonic() < end:
        for key, _ in selector.select(timeout=0.1):
            stream: _Stream = key.data
            data = stream.connection.recv(PART_BYTES)
            now = time.monotonic()
            if not data or (data.startswith(b"HTTP/1.1") and not data.startswith(b"HTTP/1.1 200")):
                raise SystemExit(f"a stream failed: {data[:300]!r}")
            num_tokens = data.count(MARK)
            if num_tokens:
                counted.num_tokens += num_tokens
                counted.num_parts += 1
                if stream.last_at is None:
                    counted.firsts_s.append(now - stream.asked_at)
                else:
                    counted.gaps_s.append(now - stream.last_at)
                stream.last_at = now
            if data.endswith(LAST):
                stream.asked_at, stream.last_at = now, None
                stream.connection.sendall(request)
