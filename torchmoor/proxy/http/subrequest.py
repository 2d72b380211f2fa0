"""Subrequests: small requests of the proxy itself, written at once; their answers are discarded.

Each uses a pooled connection, ends by its deadline, and has no lease, so routing does not count it as load.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from torchmoor.proxy.http.answer import Loss
from torchmoor.proxy.http.call import Target
from torchmoor.proxy.http.message import AnswerHead
from torchmoor.proxy.http.sweeper import Sweeper
from torchmoor.proxy.http.upstream import Connector, UpstreamConnection

logger = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 65_536


class Subrequest:
    """One subrequest, from its sending to its end."""

    def __init__(
        self, subrequests: Subrequests, target: Target, data: bytes, deadline: float, on_over: Callable[[], None]
    ) -> None:
        self.deadline = deadline
        self._subrequests = subrequests
        self._target = target
        self._data = data
        self._on_over = on_over
        self._upstream: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._num_received = 0

    def start(self, *, fresh: bool = False) -> None:
        """Send on a pooled connection, or (fresh) on a new one."""
        idle = self._target.idle
        while idle and not fresh:
            upstream: UpstreamConnection = idle.pop()
            if not upstream.transport.is_closing():
                self._send_on(upstream)
                return
        connecting = self._subrequests.connector.connect_for(self._target, self._send_on, self.on_lost)
        self._connecting = asyncio.get_running_loop().create_task(connecting)

    def _send_on(self, upstream: UpstreamConnection) -> None:
        self._connecting = None
        self._upstream = upstream
        upstream.exchange = self
        upstream.transport.write(self._data)

    # AnswerReceiver

    def on_answer(self, head: AnswerHead, piece: bytes, *, is_complete: bool) -> None:
        """Log a refusal; the status has no other effect."""
        if head.status >= 300:
            logger.debug("subrequest refused instance=%s status=%d", self._target.name, head.status)
        self.on_answer_piece(piece, is_complete=is_complete)

    def on_answer_piece(self, piece: bytes, *, is_complete: bool) -> None:
        self._num_received += len(piece)
        if is_complete:
            self.end(None)
        elif self._num_received > MAX_ANSWER_BYTES:
            self.end("endless answer")

    def on_lost(self, loss: Loss) -> None:
        """Send once more on a fresh connection if a pooled one was closed by its peer."""
        self._connecting = None
        upstream, self._upstream = self._upstream, None
        if upstream is not None and upstream.is_reused and not self._num_received:
            self.start(fresh=True)
        else:
            self.end(loss.value)

    # The end

    def expire(self) -> None:
        self.end("timed out")

    def end(self, why_failed: str | None) -> None:
        """Release the connection and call on_over, once."""
        if not self._subrequests.forget(self):
            return
        if why_failed is not None:
            logger.debug("subrequest failed instance=%s why=%s", self._target.name, why_failed)
        self.let_go(can_reuse=why_failed is None)
        self._on_over()

    def let_go(self, *, can_reuse: bool) -> None:
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.release(can_reuse=can_reuse)


class Subrequests:
    """Sends subrequests and tracks those that have not ended."""

    def __init__(self, connector: Connector, sweeper: Sweeper, *, timeout_s: float) -> None:
        self.connector = connector
        self._sweeper = sweeper
        self._timeout_s = timeout_s
        self._running: set[Subrequest] = set()
        self._none_left = asyncio.Event()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def send(self, target: Target, data: bytes, on_over: Callable[[], None]) -> None:
        """Send a whole request; on_over is called once at its end and may send the next."""
        subrequest = Subrequest(self, target, data, monotonic() + self._timeout_s, on_over)
        self._none_left.clear()
        self._running.add(subrequest)
        self._sweeper.watch(subrequest)
        subrequest.start()

    def forget(self, subrequest: Subrequest) -> bool:
        """Remove an ended subrequest. False if it was removed before."""
        if subrequest not in self._running:
            return False
        self._running.discard(subrequest)
        self._sweeper.forget(subrequest)
        if not self._running:
            self._none_left.set()
        return True

    async def stop(self, *, grace_s: float) -> None:
        """Let subrequests end within grace_s, then close their connections without a callback."""
        if self._running:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._none_left.wait(), grace_s)
        for subrequest in list(self._running):
            self.forget(subrequest)
            subrequest.let_go(can_reuse=False)
