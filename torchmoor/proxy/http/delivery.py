"""A forwarded request on its way: to one target after another, on a pooled connection or a fresh one.

Knows of the answer only whether it has begun; what is in it, and what becomes of the client, is the exchange's.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from torchmoor.proxy.http.answer import Loss
from torchmoor.proxy.http.call import Call, Target
from torchmoor.proxy.http.message import AnswerHead, Request
from torchmoor.proxy.http.outgoing import OutgoingRequest, ReplayBudget, WholeRequest
from torchmoor.proxy.http.upstream import Connector, UpstreamConnection

logger = logging.getLogger(__name__)

# A pooled connection that the peer has closed shows it at once. A reset that comes later may mean that the
# request was being worked on, so the application decides.
STALE_WINDOW_S = 0.25


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


class Delivery:
    """What an Exchange is made from; not a part of it, because another object a request costs too much.

    No slots: an exchange is made for each request, and what most of them never change is not set.
    """

    is_answered = False
    _collected: list[bytes] | None = None  # of a refusal's body
    _target: Target | None = None
    _upstream: UpstreamConnection | None = None
    _connecting: asyncio.Task[None] | None = None
    _sent_at = 0.0
    _was_stale = False
    _is_awaited = False  # the target has the whole request, and its answer's head has not come
    _has_waited = False
    _complete_at = 0.0  # when the request had come whole: from then on the instance's time counts

    def __init__(
        self,
        client: ExchangeClient,
        request: Request,
        call: Call,
        means: ExchangeMeans,
        piece: bytes,
        is_complete: bool,
    ) -> None:
        """piece: what has come of the request's body; is_complete: that is all of it."""
        self.client = client
        self.request = request
        self.call = call
        self._means = means
        self._outgoing: WholeRequest | OutgoingRequest = (
            WholeRequest(means.budget, piece) if is_complete else OutgoingRequest(request, means.budget, piece)
        )

    @property
    def is_request_complete(self) -> bool:
        """True once the client has sent its whole request."""
        return self._outgoing.is_complete

    @property
    def num_bytes_in(self) -> int:
        """Of the request's body, as far as it has come."""
        return self._outgoing.num_body_bytes

    @property
    def can_replay(self) -> bool:
        """True while the request can be sent once more from its beginning."""
        return not self.is_answered and self._outgoing.can_repeat

    @property
    def _answer_by(self) -> float:
        """When the answer must have begun."""
        return self._complete_at + self.call.deadlines.first_byte_s

    @property
    def _ends_at(self) -> float:
        """When the answer must have ended."""
        return self._complete_at + self.call.deadlines.total_s

    # What the exchange does with the answer

    def on_answer(self, head: AnswerHead, piece: bytes, *, is_complete: bool) -> None:
        """A final status line and its fields are there, and perhaps all of the body."""
        raise NotImplementedError

    def on_answer_piece(self, piece: bytes, *, is_complete: bool) -> None:
        """More of the body."""
        raise NotImplementedError

    def on_lost(self, loss: Loss) -> None:
        """The instance's connection ended too early, and is closed."""
        raise NotImplementedError

    def _fail(self, loss: Loss) -> None:
        """The target cannot be reached."""
        raise NotImplementedError

    # To a target

    def _send_to(self, target: Target, *, fresh: bool = False) -> None:
        """Begin (or begin again) to send the request. fresh: not on a pooled connection."""
        outgoing = self._outgoing
        is_late = outgoing.is_complete and (self._has_waited or self._target is not None)
        time_left_s = self._ends_at - monotonic() if is_late else None
        self._target = target
        self._is_awaited = False
        outgoing.begin(self.call.request_head(self.request.framing_line, time_left_s))
        idle = target.idle
        while idle and not fresh:
            upstream: UpstreamConnection = idle.pop()
            if not upstream.transport.is_closing():
                self._attach(upstream)
                return
        self._connecting = asyncio.get_running_loop().create_task(self._connect(target))
        if not outgoing.is_complete:
            self.client.pause_reading()

    async def _connect(self, target: Target) -> None:
        """The slow path: no idle connection."""
        try:
            upstream = await self._means.connector.connect(target)
        except OSError as error:
            logger.debug("instance unreachable instance=%s error=%s", target.name, error)
            self._connecting = None
            self.client.resume_reading()
            self._fail(Loss.UNANSWERED if isinstance(error, TimeoutError) else Loss.UNREACHABLE)
            return
        self._connecting = None
        self.client.resume_reading()
        self._attach(upstream)

    def _attach(self, upstream: UpstreamConnection) -> None:
        """Send on this connection."""
        self._upstream = upstream
        upstream.take(self)
        if self.client.is_write_paused:
            upstream.pause_reading()
        self._write_request(upstream)

    def _write_request(self, upstream: UpstreamConnection) -> None:
        """Send on what was received, in one write."""
        outgoing = self._outgoing
        data = outgoing.take()
        if data:
            upstream.transport.write(data)
            self._sent_at = monotonic()
            self._is_awaited = outgoing.is_complete and not self.is_answered and self._collected is None

    def _try_fresh(self, upstream: UpstreamConnection) -> bool:
        """Send once more on a fresh connection, if this one was lost because its peer had closed it meanwhile."""
        is_stale = upstream.is_reused and monotonic() - self._sent_at < STALE_WINDOW_S
        has_begun = self.is_answered or self._collected is not None
        if not is_stale or has_begun or self._was_stale or not self.can_replay or self._target is None:
            return False
        self._was_stale = True
        self._send_to(self._target, fresh=True)
        return True

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

    # Back-pressure

    def on_upstream_write_paused(self, is_paused: bool) -> None:
        """Hold the client back while the instance does not take more."""
        if is_paused:
            self.client.pause_reading()
        else:
            self.client.resume_reading()

    def on_client_write_paused(self, is_paused: bool) -> None:
        """Hold the instance back while the client does not take more."""
        upstream = self._upstream
        if upstream is not None:
            if is_paused:
                upstream.pause_reading()
            else:
                upstream.resume_reading()
