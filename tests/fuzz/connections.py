"""The whole data plane on simulated transports: a client that does anything, instances that answer anything.

An input is a script: after each 0xFE, a letter names an event, and the bytes that follow are received data.

    c DATA   the client sends         s DATA   the instance that was connected to last sends
    e l      it half-closes, leaves   E L      it half-closes, is gone
    p r      it stops, resumes reads  P R      it stops, resumes reads
    t        its deadline passes      x        the next connection to an instance is refused
    d u      instance a is drained, resumed         D    it is found down
    a        from now on instances answer each request by themselves, with a digest of the body that came

Invariants: no callback raises an exception; instances receive valid HTTP by llhttp; the client receives well-formed
answers to its requests, in order, and a broken connection may cut the last; an instance's answer reaches only the
client whose body it digests; at the end no lease, task or kept byte is left. Each script is played with the fast path
and without it, with decisions recorded and without, and with a token on a proxy that has keys and limits its callers:
both sides receive the same bytes, and the same is counted.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from random import Random
from typing import Any

import httptools

from tests.decision_limits import leave_out_usual
from tests.fuzz.llhttp import CUT, Answers, Requests
from torchmoor.config.credentials import Credentials
from torchmoor.config.limits import LimitSettings
from torchmoor.config.listen import ListenSettings
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.config.sessions import SessionIdSettings
from torchmoor.config.settings import ProxySettings
from torchmoor.proxy.access.gate import principal_of
from torchmoor.proxy.dispatch.recent_decisions import MAX_SHOWN, DecisionQuery
from torchmoor.proxy.dispatch.record import RequestRecord, describe_record
from torchmoor.proxy.fast_path.request import FastRequest
from torchmoor.proxy.http.client_connection import ClientConnection
from torchmoor.proxy.http.message import Reply, Request
from torchmoor.proxy.http.upstream import UpstreamConnection
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry
from torchmoor.run.app import Proxy
from torchmoor.wire import headers
from torchmoor.wire.session_ids import compose, verify

KEY_ID, KEY = "k1", b"0123456789abcdef0123456789abcdef"
SETTINGS = ProxySettings(
    endpoints=(EndpointSettings(name="llava", variants=(VariantSettings(model="llava"),)),),
    listen=ListenSettings(host="0.0.0.0"),  # nothing listens; any Host is served
    limits=LimitSettings(max_header_bytes=1_000, max_body_bytes=600, max_passthrough_body_bytes=800),
    sessions=SessionIdSettings(keys={KEY_ID: KEY}),
)
CREDENTIALS = Credentials(tokens={"app": "the-token-of-an-app"})
WITH_KEYS = SETTINGS.model_copy(update={"credentials": CREDENTIALS})
PRINCIPAL = principal_of("token", "app")
_HOST_LINE, _AUTHORIZED = b"Host: x\r\n", b"Host: x\r\nAuthorization: Bearer the-token-of-an-app\r\n"
_SESSION = re.compile(rb"ts-seq-[a-z2-7]{16}-[0-9a-f]{8}-[ab]-k1[a-z2-7]+")
# Bytes that differ from run to run: the beginning of request ids, the time that is left for a second attempt, the time
# of an answer, and the interim answers to a half-closed client, which are sent at intervals.
PASSING = re.compile(
    rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}(?=-[0-9a-f]{12})|(?<=%b: )[0-9]+|HTTP/1\.1 100 Continue\r\n\r\n"
    rb"|(?<=\r\ndate: )[^\r]{25} GMT(?=\r)" % headers.TIMEOUT_MS.encode()
)
TOKEN = re.compile(rb"<[0-9a-f]{32}>")
# Fields of a decision; the others are times and ids.
COMPARED = frozenset(
    (
        *("method", "path", "caller", "model", "operation", "endpoint", "variant", "instance", "reason", "session"),
        *("outcome", "status", "error", "bytes_in", "instance_status", "model_error", "receipt", "retries"),
    )
)
OTHER = b"POST /endpoints/llava/invocations HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nthe other"
_HEAD = re.compile(
    rb"HTTP/1\.1 ([1-5][0-9][0-9]) [\t\x20-\x7e\x80-\xff]*\r\n((?:[!-9;-~]+:[\t\x20-\x7e\x80-\xff]*\r\n)*)\r\n"
)
_LENGTH = re.compile(rb"(?:^|\r\n)content-length: *([0-9]+) *\r\n", re.IGNORECASE)
_CHUNKED = re.compile(rb"(?:^|\r\n)transfer-encoding: *chunked *\r\n", re.IGNORECASE)


class Faults(logging.Handler):
    """Logged faults, raised at the end of the script."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(logging.Formatter().format(record))


@contextmanager
def faults() -> Iterator[list[str]]:
    """Collect what the proxy logs as faults, and restore its logging afterwards."""
    logger, handler = logging.getLogger("torchmoor"), Faults()
    before = logger.propagate, logger.level
    logger.propagate = False
    logger.setLevel(logging.ERROR)
    logger.addHandler(handler)
    try:
        yield handler.seen
    finally:
        logger.removeHandler(handler)
        logger.propagate = before[0]
        logger.setLevel(before[1])


def token_of(body: bytes) -> bytes:
    """Return the digest that an instance answers for a body."""
    return b"<%b>" % blake2b(body, digest_size=16).hexdigest().encode()


def authorize(data: bytes) -> bytes:
    """Return a script whose requests have a token and whose sessions belong to its principal."""
    return _SESSION.sub(_make_own, data.replace(_HOST_LINE, _AUTHORIZED))


def _make_own(match: re.Match[bytes]) -> bytes:
    text = match[0].decode()
    if verify(text, {KEY_ID: KEY}, endpoint="llava") is None:
        return match[0]
    nonce, expiry, instance = text.split("-")[2:5]
    own = compose(
        KEY, endpoint="llava", principal=PRINCIPAL, nonce=nonce, expiry=expiry, instance=instance, key_id=KEY_ID
    )
    return own.encode()


class Transport(asyncio.Transport):
    """A transport with asyncio's guarantees: no callback after the end, no data while reading is paused."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.protocol = protocol
        self.written = bytearray()
        self.is_aborted = self.is_reading_paused = False
        self._is_closing = self._is_lost = self._has_eof = self._is_write_paused = False
        self._held: list[bytes] = []  # received while reading was paused
        protocol.connection_made(self)

    # Methods that protocols use

    def write(self, data: bytes) -> None:
        assert not self._has_eof, "write() after write_eof()"
        if not self._is_closing:
            self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._has_eof = True

    def get_write_buffer_size(self) -> int:
        return 1 if self._is_write_paused else 0

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self.lose)

    def abort(self) -> None:
        self.is_aborted = True
        self.close()

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False
        asyncio.get_running_loop().call_soon(self._give)

    # Events

    def receive(self, data: bytes) -> None:
        if data:
            self._held.append(data)
            self._give()

    def _give(self) -> None:
        while self._held and not (self._is_closing or self.is_reading_paused):
            self.protocol.data_received(self._held.pop(0))

    def receive_eof(self) -> None:
        if not (self._is_closing or self._held) and not self.protocol.eof_received():
            self.close()

    def lose(self) -> None:
        self._is_closing = True
        if not self._is_lost:
            self._is_lost = True
            self.protocol.connection_lost(None)

    def pause_writing(self, is_paused: bool) -> None:
        if self._is_write_paused is not is_paused and not self._is_closing:
            self._is_write_paused = is_paused
            if is_paused:
                self.protocol.pause_writing()
            else:
                self.protocol.resume_writing()


class InstanceEnd(Transport):
    """An instance's end of a connection; it parses received bytes with llhttp."""

    def __init__(self, stage: Stage, protocol: UpstreamConnection) -> None:
        self._stage = stage
        self.requests = Requests()
        self.num_answered = 0
        super().__init__(protocol)

    def write(self, data: bytes) -> None:
        super().write(data)
        self.requests.parser.feed_data(data)  # raises unless it is HTTP
        if self._stage.is_automatic:
            asyncio.get_running_loop().call_soon(self.answer)

    def answer(self) -> None:
        """Answer each complete request."""
        while self.num_answered < self.requests.num_complete:
            body = token_of(self.requests.bodies[self.num_answered])
            self.num_answered += 1
            self.receive(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))


class Client(ClientConnection):
    """A client's connection that records its accepted requests: method and body."""

    __slots__ = ("accepted",)

    def __init__(self, server: Any) -> None:
        super().__init__(server)
        self.accepted: list[list[bytes]] = []

    def on_request(self, request: Request, piece: bytes, *, is_complete: bool) -> None:
        self.accepted.append([request.method, piece])
        super().on_request(request, piece, is_complete=is_complete)

    def on_request_piece(self, piece: bytes, *, is_complete: bool) -> None:
        self.accepted[-1][1] += piece
        super().on_request_piece(piece, is_complete=is_complete)


class RecordingObserver:
    """Records what an access log would write of each request, without times and ids. Implements Observer."""

    is_tracing = False

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def begin_trace(self, request: Request) -> None:
        """Trace nothing."""

    def on_end(self, record: RequestRecord) -> None:
        row = {name: value for name, value in describe_record(record).items() if name in COMPARED}
        timed = ("upstream_s", "first_byte_s", "waited_s", "answered_s")
        happened = [name for name in timed if getattr(record, name) is not None]
        self.rows.append({**row, "bytes_out": record.num_bytes_out, "has": happened})

    def on_reply(self, request: Request, request_id: bytes, reply: Reply) -> None:
        self.rows.append({"path": request.path, "status": reply.status})


class Stage:
    """A proxy that never listens, its two instances, and the clients of a script."""

    def __init__(
        self,
        *,
        has_fast_path: bool = True,
        keeps_decisions: bool = True,
        has_keys: bool = False,
        is_observed: bool = False,
    ) -> None:
        """keeps_decisions: of usual requests. The general path records them, so few end on the fast path then.

        has_keys: scripts are played with a token. is_observed: records are observed, as for an access log.
        """
        settings = WITH_KEYS if has_keys else SETTINGS
        self.has_keys = has_keys
        self.is_automatic = self.refuses_next = False
        self.ends: list[InstanceEnd] = []
        self.num_fast = 0  # requests that the fast path has sent
        self.is_comparable = True  # events before a body finds fewer connections on the fast path
        self.registry = Registry(settings.endpoints)
        for endpoint in self.registry.endpoints():
            endpoint.created_at = 0.0  # GET /v1/models shows it, in seconds
        for name in ("a", "b"):
            self.registry.add(Instance(name=name, endpoint="llava", model="llava", port=1, state=InstanceState.READY))
        self.proxy = Proxy(settings, self.registry, rng=Random(7))
        self.observer = RecordingObserver()
        if is_observed:
            self.proxy.data.dispatchers.observer = self.observer
        if not has_fast_path:
            self.proxy.data.server.fast_path = None
        if not keeps_decisions:
            leave_out_usual(self.proxy.data.dispatchers.decisions, settings.observe)

    def take_client(self) -> Transport:
        return Transport(Client(self.proxy.data.server))

    def describe(self, *clients: Transport) -> dict[str, Any]:
        """Return the script's result, for comparison: bytes, counts and decisions, but no times."""
        [dispatcher] = self.proxy.data.dispatchers.all()
        counts = dispatcher.metrics.snapshot()
        decisions = self.proxy.data.dispatchers.decisions.describe(DecisionQuery(limit=MAX_SHOWN))
        return {
            "clients": [(PASSING.sub(b"", client.written), client.is_aborted) for client in clients],
            "instances": [(PASSING.sub(b"", end.written), end.is_aborted) for end in self.ends],
            "counts": {name: sum(n[0]) if isinstance(n, list) else n for name, n in counts.items()},
            "failures": [instance.breaker.num_failures for instance in self.registry.instances()],
            "left_out": decisions["left_out"],
            "observed": self.observer.rows,
            "decisions": [
                {name: value for name, value in row.items() if name in COMPARED} for row in decisions["decisions"]
            ],
        }

    def check_clean(self) -> None:
        """Check that no lease, connection, task or kept byte is left."""
        assert [instance.outstanding for instance in self.registry.instances()] == [0, 0]
        assert self.proxy.data.parts.budget.used_bytes == 0
        assert self.proxy.data.subrequests.num_running == 0
        assert not self.proxy.data.server.connections
        callers = self.proxy.data.dispatchers.callers
        assert callers is None or not callers.num_requests
        self.proxy.data.dispatchers.all()[0].variant.pool.check_integrity()


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose connections are a stage's."""

    stage: Stage

    async def create_connection(self, factory: Any, *_: object, **__: object) -> Any:
        await asyncio.sleep(0)
        if self.stage.refuses_next:
            self.stage.refuses_next = False
            raise ConnectionRefusedError
        end = InstanceEnd(self.stage, factory())
        self.stage.ends.append(end)
        return end, end.protocol


async def turn(times: int = 4) -> None:
    """Let the loop run its callbacks."""
    for _ in range(times):
        await asyncio.sleep(0)


def act(what: bytes, received: bytes, stage: Stage, client: Any) -> None:
    """Carry out one step of a script. what: its letter (see the module); received: the bytes that follow it."""
    end = stage.ends[-1] if stage.ends else None
    if what != b"c" and is_in_request(client.protocol):
        stage.is_comparable = False
    match what:
        case b"c":
            client.receive(received)
            stage.num_fast += isinstance(client.protocol.exchange, FastRequest)
        case b"e":
            client.receive_eof()
        case b"l":
            client.lose()
        case b"p" | b"r":
            client.pause_writing(what == b"p")
        case b"t" if not client.is_closing():
            client.protocol.expire()
        case b"x":
            stage.refuses_next = True
        case b"a":
            stage.is_automatic = True
        case b"d":
            stage.registry.drain("a")
        case b"u":
            stage.registry.resume("a")
        case b"D":
            stage.registry.set_state("a", InstanceState.DOWN)
        case b"s" if end is not None:
            end.num_answered = end.requests.num_complete  # no longer answers automatically
            end.receive(received)
        case b"E" if end is not None:
            end.receive_eof()
        case b"L" if end is not None:
            end.lose()
        case b"P" | b"R" if end is not None:
            end.pause_writing(what == b"P")


async def play(data: bytes, stage: Stage) -> dict[str, Any]:
    """Play a script, then another client's request, then close everything; return the result."""
    LOOP.stage = stage
    other_request = authorize(OTHER) if stage.has_keys else OTHER
    if stage.has_keys:
        data = authorize(data)
    client = stage.take_client()
    for step in data.split(CUT)[1:]:
        act(step[:1], step[1:], stage, client)
        await turn()
    stage.is_automatic, stage.refuses_next = True, False
    client.protocol.begin_awaited()  # as a sweep does: both paths give this request its id before the other client's
    other = stage.take_client()
    other.receive(other_request)
    await turn(12)
    check_answers(other)
    if any(instance.is_ready for instance in stage.registry.instances()):
        assert bytes(other.written).count(token_of(b"the other")) == 1, bytes(other.written)
    check_answers(client)
    for transport in (client, other):
        transport.lose()
    await turn(12)  # work that the client no longer waits for is cancelled
    await stage.proxy.data.subrequests.stop(grace_s=0)
    for end in stage.ends:
        end.lose()
    await turn()
    stage.check_clean()
    assert len(asyncio.all_tasks()) == 1
    return stage.describe(client, other)


def is_in_request(client: Any) -> bool:
    """Return whether part of a request was received that has not begun."""
    return client.exchange is None and not client.is_idle


def check_answers(client: Transport) -> None:
    """Answers must be well-formed, at most one per request, each for the client's own body."""
    accepted: list[list[bytes]] = client.protocol.accepted
    given = list(
        read_answers(bytes(client.written), [method for method, _ in accepted], is_open=not client.is_closing())
    )
    tokens = TOKEN.findall(bytes(client.written))
    bodies = iter([token_of(body) for _, body in accepted])
    assert all(token in bodies for token in tokens), (tokens, accepted)  # subsequence test: `in` advances the iterator
    if any(method == b"HEAD" for method, _ in accepted):
        return  # llhttp cannot separate its answers
    oracle = Answers()
    with suppress(httptools.HttpParserUpgrade):
        oracle.parser.feed_data(bytes(client.written))
    assert [head[0] for head in oracle.heads if head[0] != 100][: len(given)] == given


def read_answers(data: bytes, methods: list[bytes], *, is_open: bool) -> Iterator[int]:
    """Return the statuses of whole answers.

    Raises AssertionError for malformed bytes or bytes after the last answer.
    """
    at = 0
    while data:
        match = _HEAD.match(data)
        assert match is not None, data
        status, lines, data = int(match[1]), match[2], data[match.end() :]
        if status == 100:
            continue
        assert status >= 200
        method = methods[at] if at < len(methods) else b""
        assert at <= len(methods), "more than one answer beyond the accepted requests"
        at += 1
        lengths, is_chunked = _LENGTH.findall(lines), bool(_CHUNKED.search(lines))
        assert len(lengths) + is_chunked <= 1, lines
        if method == b"HEAD" or status in (204, 304):
            yield status
        elif lengths:
            is_whole = len(data) >= int(lengths[0])
            data = data[int(lengths[0]) :]
            if is_whole:
                yield status
        elif is_chunked:
            is_whole, data = skip_chunks(data)
            if is_whole:
                yield status
        else:  # until the connection ends, for HTTP/1.0
            yield status
            return


def skip_chunks(data: bytes) -> tuple[bool, bytes]:
    """Return whether a chunked body has ended, and the bytes after it."""
    while data:
        size, end, data = data.partition(b"\r\n")
        if not end:
            break
        assert re.fullmatch(rb"[0-9a-f]+", size), size
        if not int(size, 16):
            assert data[:2] == b"\r\n"
            return True, data[2:]
        chunk, data = data[: int(size, 16) + 2], data[int(size, 16) + 2 :]
        assert len(chunk) < int(size, 16) + 2 or chunk.endswith(b"\r\n")
    return False, b""


LOOP = Loop()
atexit.register(LOOP.close)


def check(data: bytes) -> None:
    """Play a script on both paths and raise logged faults."""
    choices: tuple[dict[str, bool], ...] = ({"keeps_decisions": True}, {}, {"has_keys": True}, {"is_observed": True})
    for choice in choices:
        options = {"keeps_decisions": False} | choice
        stage = Stage(**options)
        fast = play_alone(data, stage)
        general = play_alone(data, Stage(has_fast_path=False, **options))
        assert fast == general or not stage.is_comparable


def play_alone(data: bytes, stage: Stage) -> dict[str, Any]:
    """Play a script on a new stage and raise logged faults; return the result."""
    broken: list[dict[str, Any]] = []
    LOOP.set_exception_handler(lambda loop, context: broken.append(context))
    with faults() as seen:
        found = LOOP.run_until_complete(play(data, stage))

    assert (seen, broken) == ([], [])
    return found
