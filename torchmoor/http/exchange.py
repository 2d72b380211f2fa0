"""One forwarded request: from the choice of a target to the last byte of its answer.

The life of an exchange:

    ROUTING    the call wants to see the beginning of the body first, or waits until a target is free; what is
               received meanwhile is held
    SENDING    the request's head and body go to the target, which may be being connected to
    ANSWERED   the answer's head was judged; its body passes, or is collected if it explains a refusal
    over       `call.finish` was told the outcome; both connections were released

ROUTING or SENDING may begin again, with another target, as long as nothing was told to the client and the body
was kept.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from torchmoor.http.call import Answer, Call, Encoder, Loss, Outcome, Target, Waiting
from torchmoor.http.message import Headers, Reply, Request
from torchmoor.http.outgoing import OutgoingRequest, ReplayBudget
from torchmoor.http.upstream import Connector, UpstreamConnection

logger = logging.getLogger(__name__)

# A pooled connection that the peer has closed shows it at once. A reset that comes later may mean that the
# request was being worked on, so the application decides.
STALE_WINDOW_S = 0.25
# Of a body without a declared length that is taken while its request waits for a target: nobody has counted more.
MAX_WAITING_CHUNKED_BYTES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeMeans:
    """What all exchanges share."""

    connector: Connector
    budget: ReplayBudget
    body_timeout_s: float
    max_error_body_bytes: int


class ExchangeClient(Protocol):
    """The client's connection, as its exchange uses it."""

    deadline: float
    keep_alive: bool
    is_http10: bool
    is_write_paused: bool

    def write(self, data: bytes) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def abort(self) -> None: ...
    def exchange_over(self, *, is_request_complete: bool) -> None: ...


class Exchange:
    """Joins a client's connection, a call and an upstream connection until the answer has ended."""

    __slots__ = (
        "client",
        "request",
        "call",
        "is_over",
        "is_answered",
        "_means",
        "_outgoing",
        "_target",
        "_upstream",
        "_connecting",
        "_sent_at",
        "_was_stale",
        "_is_awaited",
        "_prefix",
        "_is_waiting",
        "_out",
        "_encoder",
        "_collected",
        "_num_collected",
        "_is_out_chunked",
        "_has_piece",
        "_idle_s",
        "_ends_at",
        "_answer_by",
    )

    def __init__(
        self,
        client: ExchangeClient,
        request: Request,
        call: Call,
        means: ExchangeMeans,
    ) -> None:
        self.client = client
        self.request = request
        self.call = call
        self.is_over = self.is_answered = False
        self._means = means
        self._target: Target | None = None
        self._upstream: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._outgoing = OutgoingRequest(request, means.budget)
        self._sent_at = 0.0
        self._was_stale = False
        self._is_awaited = False  # the target has the whole request, and its answer's head has not come
        self._out: list[bytes] = []
        self._encoder: Encoder | None = None
        self._collected: list[bytes] | None = None
        self._num_collected = 0
        self._is_out_chunked = self._has_piece = False
        self._idle_s: float | None = None
        self._ends_at = self._answer_by = 0.0
        self._prefix: list[bytes] | None = None  # of the body, while the call waits for it
        self._is_waiting = False
        client.deadline = request.received_at + means.body_timeout_s

    def start(self) -> None:
        """Choose a target and begin to send, unless the call wants to see some of the body first."""
        if self.call.num_prefix_bytes:
            self._prefix = []
            self._outgoing.begin(b"")
        else:
            self._follow(self.call.route(b"", self))

    def _route_by_prefix(self, prefix: list[bytes]) -> None:
        """Let the call choose once it has as much of the body as it wants, or all there is."""
        if self.is_request_complete or self._outgoing.num_body_bytes >= self.call.num_prefix_bytes:
            self._prefix = None
            self._follow(self.call.route(b"".join(prefix), self))
            if not self.is_over:
                self.flush_request()

    def _follow(self, verdict: Target | Reply | Waiting) -> None:
        """Send the request, answer it, or hold it."""
        if isinstance(verdict, Reply):
            self._reply(verdict)
        elif isinstance(verdict, Waiting):
            self._is_waiting = True
            self._outgoing.begin(b"")
            self.client.deadline = min(self.client.deadline, self.call.wait_ends_at)
        else:
            self._send_to(verdict)

    def resume(self, verdict: Target | Reply | Waiting) -> None:
        """The call has waited, and now there is a target, or never will be."""
        self._is_waiting = False
        request = self.request
        is_complete = self.is_request_complete
        self.client.deadline = self._answer_by if is_complete else request.received_at + self._means.body_timeout_s
        self._follow(verdict)
        if not self.is_over:
            self.client.resume_reading()
            self.flush_request()

    @property
    def is_request_complete(self) -> bool:
        """True once the client has sent its whole request."""
        return self._outgoing.is_complete

    @property
    def can_replay(self) -> bool:
        """True while the request can be sent once more from its beginning."""
        return not self.is_answered and self._outgoing.can_repeat

    # The request

    def _send_to(self, target: Target, *, fresh: bool = False) -> None:
        """Begin (or begin again) to send the request. fresh: not on a pooled connection."""
        self._target = target
        self._is_awaited = False
        time_left_s = self._ends_at - monotonic() if self.is_request_complete else self.call.deadlines.total_s
        self._outgoing.begin(self.call.request_head(self._outgoing.framing, time_left_s))
        idle = target.idle
        while idle and not fresh:
            upstream: UpstreamConnection = idle.pop()
            if upstream.is_usable:
                self._attach(upstream)
                return
        self._connecting = asyncio.get_running_loop().create_task(self._connect(target))

    async def _connect(self, target: Target) -> None:
        """The slow path: no idle connection."""
        try:
            upstream = await self._means.connector.connect(target)
        except OSError as error:
            logger.debug("instance unreachable instance=%s error=%s", target.name, error)
            self._connecting = None
            self.client.resume_reading()
            self._fail(Loss.UNREACHABLE)
            return
        self._connecting = None
        self._attach(upstream)
        self.client.resume_reading()
        self.flush_request()

    def _attach(self, upstream: UpstreamConnection) -> None:
        self._upstream = upstream
        upstream.take(self)
        if self.client.is_write_paused:
            upstream.pause_reading()

    def on_request_piece(self, piece: bytes) -> None:
        """Part of the request's body was received."""
        if self.is_over:
            return
        outgoing = self._outgoing
        outgoing.add(piece)
        if self._prefix is not None:
            self._prefix.append(piece)
        if outgoing.num_body_bytes > self.call.max_body_bytes:
            self._detach()
            if self.is_answered:
                self._abort()
            else:
                self._reply(self.call.on_body_too_large())

    def on_request_complete(self) -> None:
        """The request was received whole: from now on the instance's time counts."""
        self._outgoing.end()
        if self.is_over:
            return
        now = monotonic()
        deadlines = self.call.deadlines
        self._ends_at = now + deadlines.total_s
        self._answer_by = now + deadlines.first_byte_s
        if self.is_answered:
            self._note_progress(now)
        elif self._is_waiting:
            self.client.deadline = min(self._answer_by, self.call.wait_ends_at)
        else:
            self.client.deadline = self._answer_by

    def flush_request(self) -> None:
        """Everything of one received piece was told: send it on in one write."""
        upstream = self._upstream
        if upstream is not None:
            data = self._outgoing.take()
            if data is not None:
                upstream.transport.write(data)
                self._sent_at = monotonic()
                self._is_awaited = self.is_request_complete and not self.is_answered and self._collected is None
        elif self._connecting is not None:
            if not self.is_request_complete:
                self.client.pause_reading()
        elif self._prefix is not None:
            self._route_by_prefix(self._prefix)
        elif (
            self._is_waiting
            and not self.is_request_complete
            # A body of declared length is counted by the queue, and read on so that a client that leaves is noticed.
            and self.request.is_chunked
            and self._outgoing.num_body_bytes >= MAX_WAITING_CHUNKED_BYTES
        ):
            self.client.pause_reading()

    def on_upstream_write_paused(self, is_paused: bool) -> None:
        """Hold the client back while the instance does not take more."""
        if is_paused:
            self.client.pause_reading()
        else:
            self.client.resume_reading()

    # The answer

    def on_answer_head(self, status: int, reason: bytes, headers: Headers, content_length: int | None) -> None:
        """Let the call judge, then write the head, collect the body, or begin again elsewhere."""
        self._is_awaited = False
        verdict = self.call.on_answer(status, reason, headers, can_replay=self.can_replay)
        if verdict is None:
            self._collected = []
        elif isinstance(verdict, Answer):
            self._begin_answer(verdict, status, content_length)
        else:
            self._detach()
            self._follow(verdict)
            self.flush_request()

    def _begin_answer(self, answer: Answer, status: int, content_length: int | None) -> None:
        client = self.client
        self.is_answered = True
        self._outgoing.forget_kept()
        self._encoder = answer.encoder
        if not self.is_request_complete:
            client.keep_alive = False
        if status in (204, 304):
            framing = b""
        elif content_length is not None and answer.encoder is None:
            framing = b"content-length: %d\r\n" % content_length
        elif client.is_http10:
            framing = b""
            client.keep_alive = False
        else:
            framing = b"transfer-encoding: chunked\r\n"
            self._is_out_chunked = True
        close = b"" if client.keep_alive else b"connection: close\r\n"
        self._out.append(b"%b%b%b\r\n" % (answer.head, framing, close))
        self._idle_s = self.call.deadlines.idle_s
        if self.is_request_complete:
            client.deadline = self._ends_at

    def on_answer_piece(self, piece: bytes) -> None:
        """Pass a piece of the body on, through the encoder if there is one."""
        if self._collected is not None:
            self._num_collected += len(piece)
            self._collected.append(piece)
            return
        if not self._has_piece:
            self._has_piece = True
            self.call.on_first_piece()
        if self._encoder is not None:
            piece = self._encoder.encode(piece)
        self._put(piece)

    def _put(self, piece: bytes) -> None:
        if not piece:
            return
        if self._is_out_chunked:
            self._out += (b"%x\r\n" % len(piece), piece, b"\r\n")
        else:
            self._out.append(piece)

    def on_received(self, *, is_complete: bool) -> None:
        """Everything of one received piece was told: write it in one go, and end with the answer's end."""
        if self.is_over or self._upstream is None:
            return
        if self._collected is not None:
            if is_complete:
                self._end_collected()
            elif self._num_collected > self._means.max_error_body_bytes:
                self._detach()
                self._end_collected()
            return
        if is_complete:
            self._end_body(self._encoder.finish() if self._encoder is not None else b"")
        self._flush_answer()
        if is_complete:
            self._finish(Outcome.ANSWERED)
        elif self._idle_s is not None and self.is_request_complete:
            self._note_progress(monotonic())

    def _note_progress(self, now: float) -> None:
        idle_s = self._idle_s
        self.client.deadline = self._ends_at if idle_s is None else min(self._ends_at, now + idle_s)

    def _end_body(self, tail: bytes) -> None:
        self._put(tail)
        if self._is_out_chunked:
            self._out.append(b"0\r\n\r\n")

    def _flush_answer(self) -> None:
        out = self._out
        if out:
            self.client.write(out[0] if len(out) == 1 else b"".join(out))
            out.clear()

    def _end_collected(self) -> None:
        body = b"".join(self._collected or ())
        self._reply(self.call.on_refusal(body[: self._means.max_error_body_bytes]))

    def _reply(self, reply: Reply) -> None:
        """Answer in the instance's place."""
        if not self.is_request_complete:
            self.client.keep_alive = False
        self.is_answered = True
        self.client.write(reply.render(keep_alive=self.client.keep_alive))
        self._finish(Outcome.ANSWERED)

    # When things go wrong

    def on_lost(self, loss: Loss) -> None:
        """The instance's connection ended too early, and is closed."""
        upstream, self._upstream = self._upstream, None
        if self.is_over:
            return
        is_stale = upstream is not None and upstream.is_reused and monotonic() - self._sent_at < STALE_WINDOW_S
        has_begun = self.is_answered or self._collected is not None
        if is_stale and not has_begun and not self._was_stale and self.can_replay and self._target is not None:
            self._was_stale = True
            self._send_to(self._target, fresh=True)
            self.flush_request()
        else:
            self._fail(loss)

    def _fail(self, loss: Loss) -> None:
        """End the exchange, or begin again, after its target failed."""
        self._detach()
        if self.is_answered:
            self._break(loss)
        elif self._collected is not None:
            self._end_collected()
        else:
            verdict = self.call.on_lost(loss, can_replay=self.can_replay and loss is not Loss.TIMEOUT)
            self._follow(verdict)
            if not self.is_over:
                self.flush_request()

    def _break(self, loss: Loss) -> None:
        """The answer had begun: say so if its form can, else end without the end that would make it look whole."""
        tail = self._encoder.fail(loss) if self._encoder is not None else None
        if tail is None:
            self._abort()
            return
        self._end_body(tail)
        self._flush_answer()
        self._finish(Outcome.BROKEN)

    def _abort(self) -> None:
        self._finish(Outcome.BROKEN)
        self.client.abort()

    def expire(self, refusal: Reply) -> None:
        """The client's deadline has passed. refusal: the answer if it was the client who was too slow."""
        if self._is_waiting and (self.is_request_complete or monotonic() >= self.call.wait_ends_at):
            self._reply(self.call.on_wait_over())
        elif not self.is_request_complete or self.client.is_write_paused:
            self._detach()
            if self.is_answered:
                self._finish(Outcome.CLIENT_GONE)
                self.client.abort()
            else:
                self._reply(refusal)
        else:
            self._fail(Loss.TIMEOUT)

    def fault(self, refusal: Reply) -> None:
        """The rest of the request cannot be understood, or we failed: answer so, or abort if it is too late."""
        self._detach()
        if self.is_answered:
            self._abort()
        else:
            self._reply(refusal)

    def on_client_gone(self) -> None:
        """Nobody waits for the answer: the instance's work ends with its connection, or by the call's word."""
        self._detach()
        self._finish(Outcome.CLIENT_GONE)

    def on_client_write_paused(self, is_paused: bool) -> None:
        """Hold the instance back while the client does not take more."""
        upstream = self._upstream
        if upstream is not None:
            if is_paused:
                upstream.pause_reading()
            else:
                upstream.resume_reading()
        if not is_paused and self.is_answered and self.is_request_complete:
            self._note_progress(monotonic())

    # The end

    def _detach(self) -> None:
        """Let go of an upstream connection in the middle of an exchange: it cannot be used again."""
        if self._is_awaited:
            self._is_awaited = False
            self.call.on_abandoned()
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.release(can_reuse=False)

    def _finish(self, outcome: Outcome) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._outgoing.forget_kept()
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.release(can_reuse=self.is_request_complete)
        self.call.finish(outcome)
        if outcome is not Outcome.CLIENT_GONE:
            self.client.exchange_over(is_request_complete=self.is_request_complete)

    def __repr__(self) -> str:
        state = (
            "over" if self.is_over else "answered" if self.is_answered else "waiting" if self._is_waiting else "sending"
        )
        return f"<Exchange {state} {self.request!r} to {self._target!r}>"
