"""Run a fake TorchServe instance whose behaviour the test defines: a raw HTTP/1.1 server on its own port."""

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

Behaviour = Callable[["Received", "Wire"], Awaitable[None]]


@dataclass
class Received:
    """A request as the instance saw it; header names are lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int = 0  # which of the instance's connections, counted from 1


class Wire:
    """The operations that a behaviour can use on its connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Send bytes unchanged."""
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, status: int, headers: dict[str, str]) -> None:
        """Send a status line and header fields."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        await self.send(f"HTTP/1.1 {status} Whatever\r\n{lines}\r\n".encode())

    async def answer(self, status: int = 200, headers: dict[str, str] | None = None, body: bytes = b"{}") -> None:
        """Send a complete answer with Content-Length."""
        fields = {"Content-Type": "application/json", **(headers or {}), "Content-Length": str(len(body))}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        await self.send(f"HTTP/1.1 {status} Whatever\r\n{lines}\r\n".encode() + body)

    async def begin_stream(self, content_type: str, headers: dict[str, str] | None = None) -> None:
        """Send the head of a chunked answer."""
        fields = {"Content-Type": content_type, "Transfer-Encoding": "chunked", "ts_stream_next": "true"}
        await self.head(200, {**fields, **(headers or {})})

    async def chunk(self, piece: bytes) -> None:
        """Send one chunk; an empty one ends the stream."""
        await self.send(b"%x\r\n%b\r\n" % (len(piece), piece))

    def reset(self) -> None:
        """Reset the connection, as the death of a process does."""
        self.writer.transport.abort()

    async def until_closed(self) -> None:
        """Wait until the proxy closes the connection."""
        with suppress(ConnectionError):
            while await self.reader.read(65536):
                pass


async def silent(request: Received, wire: Wire) -> None:
    """Work on the request until the proxy cancels it."""
    await wire.until_closed()


async def dying(request: Received, wire: Wire) -> None:
    """Die at the request."""
    wire.reset()


def answering(status: int = 200, headers: dict[str, str] | None = None, body: bytes = b"{}") -> Behaviour:
    """Return a behaviour that always sends this answer."""

    async def behave(request: Received, wire: Wire) -> None:
        await wire.answer(status, headers, body)

    return behave


def refusing(status: int, code: str | None, message: str, headers: dict[str, str] | None = None) -> Behaviour:
    """Return a behaviour that sends a handler's error (with a code), or TorchServe's own (without) and closes."""
    if code is None:
        body = json.dumps({"code": status, "type": "SomeException", "message": message}).encode()
        fields = dict(headers or {})
    else:
        body = json.dumps({"error": {"code": code, "message": message}}).encode()
        fields = {"X-Torchmoor-Error": code, **(headers or {})}

    async def behave(request: Received, wire: Wire) -> None:
        await wire.answer(status, {**fields, "Connection": "close"}, body)
        wire.writer.close()

    return behave


def streaming(pieces: Iterable[bytes], content_type: str = "text/plain; charset=utf-8") -> Behaviour:
    """Return a behaviour that sends a chunked answer of these pieces."""

    async def behave(request: Received, wire: Wire) -> None:
        await wire.begin_stream(content_type)
        for piece in pieces:
            await wire.chunk(piece)
        await wire.chunk(b"")

    return behave


class Gate:
    """Lets a behaviour wait for the test (`pass_through`, `open`) and the test for a behaviour (`reached`)."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened: Future[None] = Future()

    def open(self) -> None:
        """Let the behaviour continue; the test calls this."""
        if not self._opened.done():
            self._opened.set_result(None)

    async def pass_through(self) -> None:
        """Wait until the test opens the gate, or this task is cancelled; the behaviour calls this."""
        self.reached.set()
        await asyncio.shield(asyncio.wrap_future(self._opened))  # other tasks may wait for it, too

    async def behave(self, request: Received, wire: Wire) -> None:
        """Answer once the gate is open."""
        await self.pass_through()
        await wire.answer()

    def wait_reached(self) -> None:
        """Wait until the behaviour has reached the gate; the test calls this."""
        assert self.reached.wait(60), "the instance was not reached"


@dataclass
class FakeInstance:
    """Answers with `behave`, records the requests, and counts their connections.

    It answers a cancel operation with `on_cancel`, independently of the request that it names, and an end-closed
    operation with `on_end_closed`. It answers other operations with `on_operation` if that is set. Otherwise
    `on_status` answers the status operation, by default as a model that does not know the operation.
    """

    name: str
    behave: Behaviour = field(default_factory=answering)
    received: list[Received] = field(default_factory=list)
    cancels: list[Received] = field(default_factory=list)  # cancel operations, which are not among `received`
    cancelled: list[str] = field(default_factory=list)  # the ids that they named
    on_cancel: Behaviour = field(default_factory=lambda: answering(body=b'{"cancelled": 1}'))
    ended: list[list[str]] = field(default_factory=list)  # the session ids of each end-closed operation
    on_end_closed: Behaviour = field(default_factory=lambda: answering(body=b'{"ended": 1}'))
    on_operation: Behaviour | None = None
    on_status: Behaviour = field(default_factory=lambda: answering(404))
    reads_bodies: bool = True
    num_pings: int = 0
    num_connections: int = 0
    num_open: int = 0
    port: int = 0
    host: str | None = "127.0.0.1"  # None: every address
    server: asyncio.Server | None = None
    _kept: socket.socket | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        """Listen on any free port, or on the one that it had before."""
        self.server = await asyncio.start_server(self.serve, self.host, self.port, limit=1 << 20, reuse_port=True)
        self.port = self.server.sockets[0].getsockname()[1]
        self._release_port()

    async def die(self) -> None:
        """Refuse new connections and reset the open ones. No other process gets the port before `start` or `stop`."""
        kept = socket.socket()  # which does not listen
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind((self.host or "", self.port))
        await self.stop()
        self._kept = kept

    async def stop(self) -> None:
        """Refuse new connections, reset the open ones, and free the port."""
        self._release_port()
        if self.server is not None:
            self.server.close()
            self.server = None
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def _release_port(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self._writers.add(writer)
        connection = 0
        try:
            while not writer.is_closing():
                request = await self.read(reader)
                if request is None:
                    break
                answer = self._note_operation(request)
                if answer is None:
                    if not connection:  # this connection carries more than probes and operations
                        self.num_connections += 1
                        self.num_open += 1
                        connection = self.num_connections
                    request.connection = connection
                    self.received.append(request)
                    answer = self.behave
                await answer(request, Wire(reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.num_open -= bool(connection)
            self.tasks.discard(task)
            self._writers.discard(writer)
            writer.close()

    def _note_operation(self, request: Received) -> Behaviour | None:
        """Return how a probe or an operation is answered; None for any other request."""
        operation = request.headers.get("x-torchmoor-operation")
        if request.path == "/ping":
            self.num_pings += 1
            return answering(body=b'{"status": "Healthy"}')
        if operation == "cancel":
            self.cancelled += json.loads(request.body)["request_ids"]
            self.cancels.append(request)
            return self.on_cancel
        if operation == "end-closed":
            self.ended.append(json.loads(request.body)["session_ids"])
            return self.on_end_closed
        if self.on_operation is not None and operation is not None:
            return self.on_operation
        return self.on_status if operation == "status" else None

    async def read(self, reader: asyncio.StreamReader) -> Received | None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head.rstrip("\r\n").split("\r\n")
        method, path, _ = first.split(" ")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            if name.lower() in ("content-length", "transfer-encoding") and name.lower() in headers:
                raise ConnectionError(f"{name} twice")  # TorchServe refuses such a request, too
            headers[name.lower()] = value.strip()
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += await reader.readexactly(size)
                await reader.readexactly(2)
            await reader.readexactly(2)
        elif "content-length" in headers and self.reads_bodies:
            body = await reader.readexactly(int(headers["content-length"]))
        return Received(method, path, headers, body)
