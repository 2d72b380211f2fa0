"""The exchange: one call, from the choice of a target to the last byte of its answer.

The states of an exchange:

    ARRIVING   the request's body is received and kept
    ROUTING    the call waits until a target is free
    SENDING    the request goes to the target; the connection may still be opening
    ANSWERED   the answer's head was judged; its body passes, or is collected if it explains a refusal
    over       `call.finish` was called with the outcome; both connections were released

ROUTING or SENDING may begin again with another target, as long as nothing was sent to the client and the body is kept.
A marked answer may begin again where it was cut: then ROUTING and SENDING are part of ANSWERED.
"""

from __future__ import annotations

from time import monotonic

from torchmoor.proxy.http.answer import Answer, ClientSide, CollectedRefusal, Loss
from torchmoor.proxy.http.arriving import ArrivingBody, counted_source
from torchmoor.proxy.http.call import Call, Hold, NextStep, Outcome, PassOn, ReadRefusal, Send, Target, Wait
from torchmoor.proxy.http.connection_parts import ConnectionParts
from torchmoor.proxy.http.marked_answer import MarkedAnswer
from torchmoor.proxy.http.message import AnswerHead, Reply, Request
from torchmoor.proxy.http.outgoing import SENT_ONCE, OutgoingRequest
from torchmoor.proxy.http.request_delivery import HeldAnswer, RequestDelivery
from torchmoor.proxy.http.spool import SpooledBody, SpoolFull
from torchmoor.proxy.http.upstream import UpstreamConnection

# Local names: a member of an Enum takes long to look up.
_ANSWERED, _BROKEN, _FAILED, _CLIENT_GONE = Outcome.ANSWERED, Outcome.BROKEN, Outcome.FAILED, Outcome.CLIENT_GONE


class Exchange:
    """Joins a client's connection, a call and a request delivery until the answer has ended.

    A plain class without slots: attributes that most exchanges never change are not set.
    """

    is_over = False
    is_answered = False
    status_replied = 0
    num_bytes_replied = 0
    _arriving: ArrivingBody | None = None
    _first_piece = b""  # of a body that is arriving
    _is_waiting = False
    _has_waited = False
    _sending: Send | None = None  # the last verdict that named a target
    _answer: Answer | None = None
    _marked: MarkedAnswer | None = None
    _refusal: CollectedRefusal | None = None
    _progress_at = 0.0  # when a part of the answer's body was last sent
    complete_at = 0.0  # the instance's time counts from then on

    def __init__(
        self,
        client: ClientSide,
        request: Request,
        call: Call,
        parts: ConnectionParts,
        piece: bytes,
        is_complete: bool,
    ) -> None:
        """piece: what was received of the request's body; is_complete: that is all of it."""
        self.client = client
        self.request = request
        self.call = call
        self._parts = parts
        if not is_complete:
            spool = parts.spool if call.num_read_bytes <= parts.spool.max_kept_bytes else None
            self._arriving = ArrivingBody(counted_source(request, client.source), self._on_dropped, spool)
            self._first_piece, piece = piece, b""
        self.num_bytes_in = len(piece)
        self._set_body(piece)

    def _set_body(self, body: bytes | SpooledBody) -> None:
        self._outgoing = OutgoingRequest(self._parts.budget, body)
        self._delivery = RequestDelivery(self.client, self._parts.connector, self._outgoing)

    @property
    def is_request_complete(self) -> bool:
        return self._arriving is None

    @property
    def num_tokens(self) -> int | None:
        return None if self._marked is None else self._marked.num_tokens

    @property
    def source(self) -> str:
        return self.client.source

    @property
    def _can_replay(self) -> bool:
        return not self.is_answered and self._outgoing.can_repeat

    @property
    def _answer_by(self) -> float:
        return self.complete_at + self.call.deadlines.first_byte_s

    @property
    def _ends_at(self) -> float:
        return self.complete_at + self.call.deadlines.total_s

    def start(self) -> None:
        """Place the request, or receive its body first."""
        request, call = self.request, self.call
        if self._arriving is None:
            self.complete_at = request.received_at
            self.client.deadline = request.received_at + call.deadlines.first_byte_s
            self._place()
            return
        self.client.deadline = request.received_at + self._parts.limits.body_timeout_s
        call.limit_body(self)
        if (request.content_length or 0) > call.max_body_bytes:
            self._reply(call.on_body_too_large())
        elif self._first_piece:
            self.on_request_piece(self._first_piece, is_complete=False)

    def _place(self) -> None:
        call, outgoing = self.call, self._outgoing
        if outgoing.num_body_bytes > call.max_body_bytes:
            self._reply(call.on_body_too_large())
        else:
            self._follow(call.route(outgoing.begin_of_body(call.num_read_bytes), self))

    def take_over(self, sending: Send, upstream: UpstreamConnection, sent_at: float) -> None:
        """Continue with a request that is already sent to sending.target on this connection, and not answered yet."""
        self.complete_at, self._sending = self.request.received_at, sending
        self._delivery.take_over(self, sending.target, upstream, sent_at)

    def _follow(self, step: NextStep) -> None:
        """Do what the verdict says: send the request, answer it, or wait."""
        if isinstance(step, Send):
            self._send(step)
        elif isinstance(step, Wait):
            self._is_waiting = True
            self.client.deadline = min(self.client.deadline, self.call.wait_ends_at)
        elif isinstance(step, PassOn):
            self._delivery.pass_on(self)
        elif self._answer is not None:
            self._end_answer(self._answer.render_failure(Loss.RESET), _FAILED)  # the loss is counted already
        else:
            self._reply(step)

    def _send(self, sending: Send, *, fresh: bool = False) -> None:
        is_late = self._has_waited or self._sending is not None
        time_left_s = self._ends_at - monotonic() if is_late else None
        self._sending = sending
        if self._marked is None:
            head = sending.forwarding.request_head(self._framing_line, time_left_s)
        else:
            head, body = self._marked.request(time_left_s)
            self._delivery = RequestDelivery(self.client, self._parts.connector, OutgoingRequest(SENT_ONCE, body))
        self._delivery.send(self, sending.target, head, fresh=fresh or self._marked is not None)

    @property
    def _framing_line(self) -> bytes:
        request = self.request
        return b"content-length: %d\r\n" % self.num_bytes_in if request.is_chunked else request.framing_line

    def resume(self, step: NextStep) -> None:
        self._is_waiting = False
        self._has_waited = True
        self._progress_at = monotonic()  # the wait was not a target's silence
        self.client.deadline = self._answer_by if self._answer is None else self._due
        self._follow(step)

    # The request

    def on_request_piece(self, piece: bytes, *, is_complete: bool) -> None:
        """Receive more of the request's body. is_complete: this is the last of it."""
        arriving = self._arriving
        if self.is_over or arriving is None:
            return
        self.num_bytes_in += len(piece)
        if self.num_bytes_in > self.call.max_body_bytes:
            self.fault(self.call.on_body_too_large())
        elif is_complete:
            try:
                body = self._parts.arriving.take(arriving, piece)
            except SpoolFull:
                self._on_dropped()
                return
            self._arriving = None
            self.complete_at = monotonic()
            self.client.deadline = self._answer_by
            self._set_body(body)
            self._place()
        elif piece:
            self._parts.arriving.add(arriving, piece)

    def _on_dropped(self) -> None:
        self._reply(self.call.on_body_dropped())

    # The answer

    def on_answer(self, head: AnswerHead, piece: bytes, *, is_complete: bool) -> None:
        """Let the call judge; then deliver the answer, collect its body, or begin again elsewhere."""
        assert self._sending is not None
        self._delivery.has_answer = True
        if self._marked is not None:
            if self._marked.try_resume(head):
                self.on_answer_piece(piece, is_complete=is_complete)
            else:
                self._fail(Loss.REFUSED)
            return
        can_replay = head.status >= 400 and self._can_replay  # a success is never replaced
        judgement = self._sending.forwarding.on_answer(head, can_replay=can_replay)
        if isinstance(judgement, Answer):
            self._begin_answer(judgement, head, is_whole=is_complete)
            self.on_answer_piece(piece, is_complete=is_complete)
        elif isinstance(judgement, ReadRefusal):
            self._refusal = CollectedRefusal(judgement.explain)
            self.on_answer_piece(piece, is_complete=is_complete)
        elif isinstance(judgement, Hold):
            self._delivery.hold(HeldAnswer(head, piece, is_complete=is_complete))
        else:
            self._detach()
            self._follow(judgement)

    def _begin_answer(self, answer: Answer, head: AnswerHead, *, is_whole: bool) -> None:
        """Drop the kept body and count the answer's time. is_whole: the answer is complete; then do neither."""
        client, outgoing = self.client, self._outgoing
        self.is_answered = True
        self._answer = answer
        if answer.continuer is not None:
            answer.encoder = self._marked = MarkedAnswer(answer, self._parts.continuations, outgoing.kept_body)
        answer.begin(head, client, self.request.answer_lines)
        if not is_whole:
            if self._delivery.is_sending:
                outgoing.forget_kept()
            else:
                outgoing.close()
            self._progress_at = monotonic()
            client.deadline = self._due

    def on_answer_piece(self, piece: bytes, *, is_complete: bool) -> None:
        """Forward a piece of the body, through the encoder if there is one; finish with the answer's end."""
        answer = self._answer
        if answer is None:
            if self._refusal is not None and (self._refusal.is_full_with(piece) or is_complete):
                if not is_complete:
                    self._detach()
                self._reply(self._refusal.reply())
            return
        if answer.on_body is not None and piece:
            on_body, answer.on_body = answer.on_body, None
            on_body()
        marked = self._marked
        if is_complete and marked is None:
            self._end_whole(answer, piece)
            return
        data = answer.render(piece)
        if data:
            self.client.write(data)
        self._progress_at = monotonic()
        if marked is not None and (is_complete or marked.is_malformed):
            if is_complete and marked.is_ended:
                self._end_whole(answer)
            else:
                self._fail(Loss.RESET)

    @property
    def _due(self) -> float:
        """Return when an answer that has begun times out: by its total time, or the longest silence."""
        idle_s = self.call.deadlines.idle_s
        return self._ends_at if idle_s is None else min(self._ends_at, self._progress_at + idle_s)

    def _reply(self, reply: Reply) -> None:
        """Answer in the instance's place."""
        if not self.is_request_complete:
            self.client.keep_alive = False
        self.is_answered = True
        self.status_replied = reply.status
        data = reply.render(keep_alive=self.client.keep_alive, added_lines=self.request.answer_lines)
        self.num_bytes_replied = len(data)
        self.client.write(data)
        self._finish(_ANSWERED)

    # Failures

    def on_lost(self, loss: Loss) -> None:
        """Send once more on a fresh connection if the pooled one was stale; else fail."""
        is_stale = self._delivery.lose_connection()
        if self.is_over:
            return
        if is_stale and self._sending is not None:
            self._send(self._sending, fresh=True)
        else:
            self._fail(loss)

    def _fail(self, loss: Loss) -> None:
        """End the exchange, or begin again, after its target failed."""
        self._detach()
        if self._answer is not None:
            self._go_on(self._answer, loss)
        elif self._refusal is not None:
            self._reply(self._refusal.reply())
        else:
            assert self._sending is not None
            can_replay = self._can_replay and loss is not Loss.TIMEOUT
            self._follow(self._sending.forwarding.on_lost(loss, can_replay=can_replay))

    def _go_on(self, answer: Answer, loss: Loss) -> None:
        """Let another target continue a marked answer; break any other one."""
        marked = self._marked
        if marked is not None and marked.is_ended:
            self._end_whole(answer)
        elif marked is not None and self._ends_at > monotonic() and (step := marked.place(loss)) is not None:
            if loss is not Loss.UNANSWERED:  # however often that is tried again, the silence goes on
                self._progress_at = monotonic()
            self.client.deadline = self._due
            self._follow(step)
        else:
            self._end_answer(answer.render_failure(loss), _FAILED if self._spares_target(loss) else _BROKEN)

    def _spares_target(self, loss: Loss) -> bool:
        """Return True if the target is not at fault: it did not begin, or it went on until the total time was over."""
        if loss is Loss.TIMEOUT:
            idle_s = self.call.deadlines.idle_s
            return idle_s is not None and self._progress_at + idle_s > monotonic()
        return loss in (Loss.SHORTAGE, Loss.REFUSED)

    def _detach(self) -> None:
        """Leave the target in the middle of the exchange, and stop its work if it has the whole request."""
        if self._delivery.detach() and self._sending is not None:
            self._sending.forwarding.on_abandoned()

    def _end_whole(self, answer: Answer, piece: bytes = b"") -> None:
        """End an answer that the instance has ended, perhaps with an error. piece: the last of its body."""
        tail = answer.render_last(piece)
        self._end_answer(tail, _FAILED if answer.has_failed else _ANSWERED)

    def _end_answer(self, tail: bytes | None, outcome: Outcome) -> None:
        """Send the answer's last bytes; with None, leave it visibly incomplete."""
        if tail is None:
            self._abort(outcome)
            return
        self.client.write(tail)
        self._finish(outcome)

    def _abort(self, outcome: Outcome) -> None:
        self.client.abort()
        self._finish(outcome)

    def expire(self, refusal: Reply) -> None:
        """Handle a passed deadline. refusal: the answer if the client was too slow."""
        if self._is_waiting:
            self._follow(self.call.on_wait_over())
        elif self._answer is not None and self._due > monotonic():
            self.client.deadline = self._due  # progress itself does not move the deadline
        elif not self.is_request_complete or self.client.is_write_paused:
            self.fault(refusal)
        else:
            self._fail(Loss.TIMEOUT)

    def on_target_down(self, target: Target) -> None:
        loss = self._delivery.find_loss(target)
        if loss is not None:
            self._fail(loss)

    def fault(self, refusal: Reply) -> None:
        """Answer a request with an error, or break the connection if the answer has begun."""
        self._detach()
        if self.is_answered:
            self._abort(_CLIENT_GONE)
        else:
            self._reply(refusal)

    def on_client_gone(self) -> None:
        """Stop the instance's work, by its connection or by the call."""
        self._detach()
        self._finish(_CLIENT_GONE)

    def on_client_write_paused(self, is_paused: bool) -> None:
        """Pause the instance while the client reads no more; meanwhile its silence does not count."""
        self._delivery.pause_answer(is_paused)
        if not is_paused:
            self._progress_at = monotonic()

    # The end

    def _finish(self, outcome: Outcome) -> None:
        if self.is_over:
            return
        self.is_over = True
        is_complete = self.is_request_complete
        if self._arriving is not None:
            self._parts.arriving.discard(self._arriving)
            self._arriving = None
        if self._marked is not None:
            self._marked.release()
        self._delivery.end(can_reuse=True)
        self._outgoing.close()
        self.call.finish(outcome)
        if outcome is not _CLIENT_GONE:
            self.client.exchange_over(is_request_complete=is_complete)

    def __repr__(self) -> str:
        return f"<Exchange {self.request!r} {self._delivery!r}>"
