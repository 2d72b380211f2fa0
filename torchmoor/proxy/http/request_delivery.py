"""Writes a request to the target that was chosen last, on a pooled or a new connection.

It reports a loss to the exchange and does not choose another target itself.
"""

from __future__ import annotations

import asyncio
from functools import partial
from time import monotonic

from torchmoor.proxy.http.answer import ClientSide, Loss
from torchmoor.proxy.http.call import Target
from torchmoor.proxy.http.message import AnswerHead
from torchmoor.proxy.http.outgoing import OutgoingRequest
from torchmoor.proxy.http.upstream import AnswerReceiver, Connector, UpstreamConnection

# A pooled connection that the peer has closed fails at once. After a later reset, the target may have begun the
# request, so the application decides.
STALE_WINDOW_S = 0.25


class RequestDelivery:
    """Writes a request to the target that was chosen last, whose answer goes to the receiver.

    It has no reference to the receiver, which owns it: that cycle would be freed by the garbage collector only.
    has_answer: the current target has begun to answer.
    """

    def __init__(self, client: ClientSide, connector: Connector, outgoing: OutgoingRequest) -> None:
        self.has_answer = False
        self._client = client
        self._connector = connector
        self._outgoing = outgoing
        self._target: Target | None = None
        self._upstream: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._sent_at = 0.0
        self._is_sent = False  # a body in a file may still be on its way
        self._was_stale = False
        self._held: HeldAnswer | None = None

    @property
    def is_active(self) -> bool:
        """True while there is a connection to the target, or one is being opened."""
        return self._upstream is not None or self._connecting is not None

    @property
    def is_sending(self) -> bool:
        """True while the body goes to the target from its file."""
        return self._upstream is not None and self._upstream.is_sending

    def find_loss(self, target: Target) -> Loss | None:
        """Return the loss to report if this target is down; None if the request is not on its way there."""
        if self._target is not target or not self.is_active:
            return None
        return Loss.UNREACHABLE if self._upstream is None else Loss.RESET

    def send(self, receiver: AnswerReceiver, target: Target, head: bytes, *, fresh: bool = False) -> None:
        """Begin to send the request, or begin again. fresh: not on a pooled connection."""
        self._target = target
        self._is_sent = self.has_answer = False
        self._outgoing.begin(head)
        idle = target.idle
        while idle and not fresh:
            upstream: UpstreamConnection = idle.pop()
            if not upstream.transport.is_closing():
                self._attach(receiver, upstream)
                return
        connecting = self._connector.connect_for(target, partial(self._attach, receiver), receiver.on_lost)
        self._connecting = asyncio.get_running_loop().create_task(connecting)

    def take_over(self, receiver: AnswerReceiver, target: Target, upstream: UpstreamConnection, sent_at: float) -> None:
        """Continue with a request that is already written to this connection, which may be lost by now."""
        self._outgoing.note_sent()
        self._target, self._upstream, self._sent_at = target, upstream, sent_at
        self._is_sent = True
        if upstream.exchange is not None:
            upstream.exchange = receiver

    def _attach(self, receiver: AnswerReceiver, upstream: UpstreamConnection) -> None:
        self._connecting = None
        self._upstream = upstream
        upstream.exchange = receiver
        if self._client.is_write_paused:
            upstream.pause_reading()
        upstream.send(self._outgoing.take(), self._outgoing.file)
        self._sent_at = monotonic()
        self._is_sent = True

    def lose_connection(self) -> bool:
        """Forget a connection that has ended or was not opened. True if the peer had closed it before the request.

        True at most once per request.
        """
        self._connecting = None
        upstream, self._upstream = self._upstream, None
        is_stale = upstream is not None and upstream.is_reused and monotonic() - self._sent_at < STALE_WINDOW_S
        if not is_stale or self.has_answer or self._was_stale or not self._outgoing.can_repeat:
            return False
        self._was_stale = True
        return True

    def detach(self) -> bool:
        """Close the connection to the target. True if the target has the whole request and had not answered."""
        is_abandoned = self._is_sent and not self.is_sending and not self.has_answer
        self._is_sent = False
        self.end(can_reuse=False)
        return is_abandoned

    def end(self, *, can_reuse: bool) -> None:
        """Release the connection. can_reuse: to the pool, if the answer was whole."""
        self._held = None
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.release(can_reuse=can_reuse)

    def hold(self, held: HeldAnswer) -> None:
        """Send the answer to `held` until `pass_on`."""
        self._held = held
        if self._upstream is not None:
            self._upstream.exchange = held
            self._upstream.pause_reading()

    def pass_on(self, receiver: AnswerReceiver) -> None:
        """Deliver the held answer to its receiver."""
        held, self._held = self._held, None
        assert held is not None
        if self._upstream is not None:
            if self._upstream.exchange is held:
                self._upstream.exchange = receiver
            if not self._client.is_write_paused:
                self._upstream.resume_reading()
        held.pass_on(receiver)

    def pause_answer(self, is_paused: bool) -> None:
        """Pause the target while the client does not read, or let it continue."""
        upstream = self._upstream
        if upstream is not None and self._held is None:
            if is_paused:
                upstream.pause_reading()
            else:
                upstream.resume_reading()

    def __repr__(self) -> str:
        return f"<RequestDelivery to {self._target!r}>"


class HeldAnswer:
    """Receives, in place of the exchange, what the target has already sent of an answer that waits for its call.

    The connection is not read meanwhile, so little more arrives.
    """

    def __init__(self, head: AnswerHead, piece: bytes, *, is_complete: bool) -> None:
        self._head = head
        self._data = piece
        self._is_complete = is_complete
        self._loss: Loss | None = None

    def on_answer(self, head: AnswerHead, piece: bytes, *, is_complete: bool) -> None:
        """Do nothing: the head was received."""

    def on_answer_piece(self, piece: bytes, *, is_complete: bool) -> None:
        self._data += piece
        self._is_complete = is_complete

    def on_lost(self, loss: Loss) -> None:
        self._loss = loss

    def pass_on(self, receiver: AnswerReceiver) -> None:
        """Let the exchange receive what was held."""
        receiver.on_answer(self._head, self._data, is_complete=self._is_complete)
        if self._loss is not None and not self._is_complete:
            receiver.on_lost(self._loss)
