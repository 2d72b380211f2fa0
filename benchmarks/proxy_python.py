"""Measures the Python part of the front proxy per request and token: bytecodes, calls and time.

The benchmark opens no sockets: it passes bytes to the product's connections with the default settings, for 16 clients
at a time, and their transports discard the output. `bytecodes` and `calls` count the instructions and Python calls per
request or token. Both are exact, so they show the effect of a change even on a busy machine. `hot_us` is the minimum of
many passes. `cold_us` is the median of passes that fill the processor's caches with other data before each input, as
happens while a proxy waits for its clients; tokens have no `cold_us`.

    session   1 KB POST with a signed session id     boto3   the same with the header lines that boto3 sends
    load      without a session, least outstanding   token   a token of a chunked stream; framed: of an event stream
    bearer    session, with a bearer token           signed  boto3, with a signature that is verified
    logged    session, with an access log

    make bench NAME=proxy_python [QUICK=1]
    python -m benchmarks.proxy_python [--quick] [--rounds 400] [--save]
"""

import asyncio
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter_ns
from types import FrameType
from typing import Any, cast

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotoCredentials

from benchmarks.proxy import make_body, make_sessions
from benchmarks.proxy_load import BOTO_HEADERS
from benchmarks.proxy_server import ENDPOINT, registry_of, settings_of
from benchmarks.report import parse_options, print_report
from torchmoor.config.credentials import AccessKey, Credentials
from torchmoor.config.observe import ObserveSettings
from torchmoor.proxy.access.gate import principal_of
from torchmoor.proxy.http.client_connection import ClientConnection
from torchmoor.proxy.http.long_body_queue import LongBodyQueue
from torchmoor.proxy.http.upstream import AnswerCaches, UpstreamConnection
from torchmoor.proxy.observe.access_log import AccessLog
from torchmoor.proxy.observe.observing import RequestObserver
from torchmoor.run.app import Proxy

NUM_CLIENTS = 16
NUM_TOKENS = 50
KINDS = ("session", "boto3", "load", "token", "framed", "bearer", "signed", "logged")
KEY_ID, SECRET, TOKEN = "AKIAEXAMPLE", "a-secret-of-the-benchmark", "a-token-of-the-benchmark"
CREDENTIALS = Credentials(keys={KEY_ID: AccessKey(secret=SECRET)}, tokens={"app": TOKEN})
PRINCIPALS = {"bearer": principal_of("token", "app"), "signed": principal_of("key", KEY_ID)}
OTHER_DATA = bytes(3_000_000)  # larger than the caches of a core

ANSWER = (
    b"HTTP/1.1 200 OK\r\nServer: nginx\r\nDate: Sat, 21 Nov 2026 09:30:00 GMT\r\nContent-Type: application/json\r\n"
    b'Content-Length: 11\r\nConnection: keep-alive\r\n\r\n{"ok":true}'
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nx-request-id: 1\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM = (STREAM_HEAD, *[b"5\r\nhello\r\n"] * NUM_TOKENS, b"0\r\n\r\n")


class Sink:
    """A transport that discards its output."""

    def write(self, data: bytes) -> None: ...

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> tuple[str, int]:
        """Return the client's address for any name."""
        return ("127.0.0.1", 1)


def make_requests(kind: str) -> Iterator[bytes]:
    """Yield requests without end, with a few different sessions."""
    body = make_body()
    path = f"/endpoints/{ENDPOINT}/invocations" + ("-response-stream" if kind == "framed" else "")
    lines = {"Host": "127.0.0.1", "Content-Type": "application/json"}
    if kind in ("boto3", "signed"):
        lines |= BOTO_HEADERS
    if kind == "bearer":
        lines["Authorization"] = f"Bearer {TOKEN}"
    requests = []
    for session in make_sessions(PRINCIPALS.get(kind, "")):
        if kind != "load":
            lines["X-Amzn-SageMaker-Session-Id"] = session
        own = {**lines, **(sign(path, lines, body) if kind == "signed" else {}), "Content-Length": len(body)}
        head = "".join(f"{name}: {value}\r\n" for name, value in own.items())
        requests.append(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
    return itertools.cycle(requests)


def sign(path: str, lines: dict[str, str], body: bytes) -> dict[str, str]:
    """Return the header lines that boto3's signer makes for a request."""
    signed = [name for name in lines if name not in ("Host", *BOTO_HEADERS)]
    request = AWSRequest("POST", f"http://127.0.0.1{path}", {name: lines[name] for name in signed}, body)
    SigV4Auth(BotoCredentials(KEY_ID, SECRET), "sagemaker", "us-east-1").add_auth(request)
    return {name: request.headers[name] for name in ("X-Amz-Date", "Authorization")}


class Stage:
    """A proxy with connections to its clients and its instances."""

    def __init__(self, kind: str) -> None:
        is_stream = kind in ("token", "framed")
        self.num_each = NUM_TOKENS if is_stream else 1
        self._answer = STREAM if is_stream else (ANSWER,)
        self._requests = make_requests(kind)
        settings = settings_of(port=0)
        if kind in PRINCIPALS:
            settings = settings.model_copy(update={"credentials": CREDENTIALS})
        registry = registry_of(settings, [1, 2, 3, 4])
        proxy = Proxy(settings, registry)
        if kind == "logged":
            proxy.data.dispatchers.observer = RequestObserver(AccessLog(ObserveSettings(access_log=os.devnull)), None)
        self._clients = [ClientConnection(proxy.data.server) for _ in range(NUM_CLIENTS)]
        self._upstreams: list[UpstreamConnection] = []
        known = AnswerCaches()
        for instance in registry.instances():
            for _ in range(NUM_CLIENTS):
                made = UpstreamConnection(
                    instance,
                    proxy.data.sweeper,
                    known,
                    siblings=set(),
                    long_bodies=LongBodyQueue(1e9),
                    max_header_bytes=65_536,
                    idle_timeout_s=60,
                )
                self._upstreams.append(made)
                instance.idle.append(made)
        for connection in (*self._clients, *self._upstreams):
            connection.connection_made(cast(asyncio.Transport, Sink()))

    def run(self, before_each: Callable[[], object] = lambda: None) -> float:
        """Process a request of each client and its whole answer. Return the us per request or token."""
        spent = 0
        for client in self._clients:
            request = next(self._requests)
            before_each()
            start = perf_counter_ns()
            client.data_received(request)
            spent += perf_counter_ns() - start
        busy = [upstream for upstream in self._upstreams if upstream.exchange is not None]
        assert len(busy) == NUM_CLIENTS
        for data in self._answer:
            for upstream in busy:
                before_each()
                start = perf_counter_ns()
                upstream.data_received(data)
                spent += perf_counter_ns() - start
        return spent / 1000 / NUM_CLIENTS / self.num_each


class Count:
    """Counts the bytecodes and calls of the product's code."""

    def __init__(self) -> None:
        self.num_bytecodes = self.num_calls = 0

    def of(self, run: Callable[[], object]) -> "Count":
        sys.settrace(self._on_call)
        try:
            run()
        finally:
            sys.settrace(None)
        return self

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if "torchmoor" not in frame.f_globals.get("__name__", ""):
            return None
        self.num_calls += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._on_opcode

    def _on_opcode(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.num_bytecodes += event == "opcode"
        return self._on_opcode


async def measure(kind: str, rounds: int) -> dict[str, Any]:
    """Measure one kind. It is a coroutine because the proxy's parts need a running event loop."""
    stage = Stage(kind)
    for _ in range(40):
        stage.run()
    count = Count().of(stage.run)
    num = NUM_CLIENTS * stage.num_each
    hot = min(stage.run() for _ in range(rounds))
    cold = None
    if stage.num_each == 1:
        cold = median([stage.run(lambda: OTHER_DATA.find(b"x")) for _ in range(max(1, rounds // 4))])
    return {
        "kind": kind,
        "bytecodes": round(count.num_bytecodes / num),
        "calls": round(count.num_calls / num, 1),
        "hot_us": round(hot, 2),
        "cold_us": None if cold is None else round(cold, 2),
    }


def main() -> None:
    options = parse_options(__doc__, quick="20 passes", rounds=400)
    rounds = 20 if options.quick else options.rounds
    rows = [asyncio.run(measure(kind, rounds)) for kind in KINDS]
    print_report("proxy_python", rows, {}, options, rounds=rounds)


if __name__ == "__main__":
    main()
