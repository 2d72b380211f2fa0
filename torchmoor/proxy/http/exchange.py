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

from time import monotonic

from torchmoor.proxy.http.answer import Answer, Loss
from torchmoor.proxy.http.call import WAITING, Outcome, Target, Waiting
from torchmoor.proxy.http.delivery import Delivery
from torchmoor.proxy.http.message import AnswerHead, Reply

# Of a body without a declared length that is taken while its request waits for a target: nobody has counted more.
MAX_WAITING_CHUNKED_BYTES = 65_536
# Looking a member up in its Enum takes longer than many a step here.
_ANSWERED, _BROKEN, _CLIENT_GONE = Outcome.ANSWERED, Outcome.BROKEN, Outcome.CLIENT_GONE


class Exchange(Delivery):
    """Joins a client's connection, a call and an upstream connection until the answer has ended."""

    is_over = False
    _is_waiting = False
    _is_gathering = False  # the beginning of the body, which the call wants to see
    _answer: Answer | None = None
    _num_collected = 0
    _progress_at = 0.0  # when something of the answer's body was last passed on
    status_replied = num_bytes_replied = 0

    def start(self) -> None:
        """Choose a target and begin to send, unless the call wants to see some of the body first."""
        request, call, outgoing = self.request, self.call, self._outgoing
        if outgoing.is_complete:
            self._complete_at = request.received_at
            self.client.deadline = request.received_at + call.deadlines.first_byte_s
        else:
            self.client.deadline = request.received_at + self._means.body_timeout_s
        if outgoing.num_body_bytes > call.max_body_bytes:
            self._reply(call.on_body_too_large())
        elif call.num_prefix_bytes and not outgoing.is_complete:
            self._is_gathering = True
            self._flush_request()
        else:
            self._follow(call.route(outgoing.gathered() if call.num_prefix_bytes else b"", self))

    def _follow(self, verdict: Target | Reply | Waiting) -> None:
        """Send the request, answer it, or hold it."""
        if isinstance(verdict, Reply):
            self._reply(verdict)
        elif verdict is WAITING:
            self._is_waiting = True
            self.client.deadline = min(self.client.deadline, self.call.wait_ends_at)
            self._flush_request()
        else:
            self._send_to(verdict)

    def resume(self, verdict: Target | Reply | Waiting) -> None:
        """The call has waited, and now there is a target, or never will be."""
        self._is_waiting = False
        self._has_waited = True
        request = self.request
        is_complete = self.is_request_complete
        self.client.deadline = self._answer_by if is_complete else request.received_at + self._means.body_timeout_s
        self.client.resume_reading()
        self._follow(verdict)

    # The request

    def on_request_piece(self, piece: bytes, *, is_complete: bool) -> None:
        """More of the request's body was received. is_complete: that was the last of it."""
        if self.is_over:
            return
        outgoing = self._outgoing
        if piece:
            outgoing.add(piece)
            if outgoing.num_body_bytes > self.call.max_body_bytes:
                self._detach()
                if self.is_answered:
                    self._abort(_CLIENT_GONE)
                else:
                    self._reply(self.call.on_body_too_large())
                return
        if is_complete:
            outgoing.end()
            self._complete_at = monotonic()
            self.client.deadline = self._answer_by
            if self._answer is not None:
                self._progress_at = self._complete_at
                self.client.deadline = self._due
            elif self._is_waiting:
                self.client.deadline = min(self._answer_by, self.call.wait_ends_at)
        self._flush_request()

    def _flush_request(self) -> None:
        """Send on what was received, or see whether more may be."""
        upstream, outgoing = self._upstream, self._outgoing
        if upstream is not None:
            self._write_request(upstream)
        elif self._connecting is not None:
            if not outgoing.is_complete:
                self.client.pause_reading()
        elif self._is_gathering:
            if outgoing.is_complete or outgoing.num_body_bytes >= self.call.num_prefix_bytes:
                self._is_gathering = False
                self._has_waited = True
                self._follow(self.call.route(outgoing.gathered(), self))
        elif (
            self._is_waiting
            and not outgoing.is_complete
            # A body of declared length is counted by the queue, and read on so that a client that leaves is noticed.
            and self.request.is_chunked
            and outgoing.num_body_bytes >= MAX_WAITING_CHUNKED_BYTES
        ):
            self.client.pause_reading()

    # The answer

    def on_answer(self, head: AnswerHead, piece: bytes, *, is_complete: bool) -> None:
        """Let the call judge, then pass on what came, collect the body, or begin again elsewhere."""
        self._is_awaited = False
        can_replay = head.status >= 400 and self.can_replay  # nothing else is sent again
        verdict = self.call.on_answer(head, can_replay=can_replay)
        if isinstance(verdict, Answer):
            self._begin_answer(verdict, head, is_whole=is_complete)
            self.on_answer_piece(piece, is_complete=is_complete)
        elif verdict is None:
            self._collected = []
            self._collect(self._collected, piece, is_complete)
        else:
            self._detach()
            self._follow(verdict)

    def _begin_answer(self, answer: Answer, head: AnswerHead, *, is_whole: bool) -> None:
        """Nothing is kept from now on, and time counts otherwise; is_whole: no need, because this is the end, too."""
        client, outgoing = self.client, self._outgoing
        self.is_answered = True
        self._answer = answer
        if not outgoing.is_complete:
            client.keep_alive = False
        answer.begin(head, client)
        if not is_whole:
            outgoing.forget_kept()
            self._progress_at = monotonic()
            if outgoing.is_complete:
                client.deadline = self._due

    def on_answer_piece(self, piece: bytes, *, is_complete: bool) -> None:
        """Pass a piece of the body on, through the encoder if there is one; end with the answer's end."""
        answer = self._answer
        if answer is None:
            if self._collected is not None:
                self._collect(self._collected, piece, is_complete)
            return
        if answer.on_body is not None and piece:
            on_body, answer.on_body = answer.on_body, None
            on_body()
        if is_complete:
            last = answer.render_last(piece)
            if last is None:
                self._abort(_ANSWERED)
                return
            self.client.write(last)
            self._finish(_ANSWERED)
            return
        data = answer.render(piece)
        if data:
            self.client.write(data)
        self._progress_at = monotonic()

    @property
    def _due(self) -> float:
        """When an answer that has begun has gone on for too long, or been silent for too long."""
        idle_s = self.call.deadlines.idle_s
        return self._ends_at if idle_s is None else min(self._ends_at, self._progress_at + idle_s)

    def _collect(self, collected: list[bytes], piece: bytes, is_complete: bool) -> None:
        """Keep a piece of a refusal's body, up to the limit."""
        self._num_collected += len(piece)
        collected.append(piece)
        if is_complete:
            self._end_collected()
        elif self._num_collected > self._means.max_error_body_bytes:
            self._detach()
            self._end_collected()

    def _end_collected(self) -> None:
        body = b"".join(self._collected or ())
        self._reply(self.call.on_refusal(body[: self._means.max_error_body_bytes]))

    def _reply(self, reply: Reply) -> None:
        """Answer in the instance's place."""
        if not self.is_request_complete:
            self.client.keep_alive = False
        self.is_answered = True
        self.status_replied = reply.status
        data = reply.render(keep_alive=self.client.keep_alive)
        self.num_bytes_replied = len(data)
        self.client.write(data)
        self._finish(_ANSWERED)

    # When things go wrong

    def on_lost(self, loss: Loss) -> None:
        """The instance's connection ended too early, and is closed."""
        upstream, self._upstream = self._upstream, None
        if not self.is_over and not (upstream is not None and self._try_fresh(upstream)):
            self._fail(loss)

    def _fail(self, loss: Loss) -> None:
        """End the exchange, or begin again, after its target failed."""
        self._detach()
        if self._answer is not None:
            self._break(self._answer, loss)
        elif self._collected is not None:
            self._end_collected()
        else:
            verdict = self.call.on_lost(loss, can_replay=self.can_replay and loss is not Loss.TIMEOUT)
            self._follow(verdict)

    def _break(self, answer: Answer, loss: Loss) -> None:
        """The answer had begun: say so if its form can, else end without the end that would make it look whole."""
        tail = answer.render_failure(loss)
        if tail is None:
            self._abort(_BROKEN)
            return
        self.client.write(tail)
        self._finish(_BROKEN)

    def _abort(self, outcome: Outcome) -> None:
        self._finish(outcome)
        self.client.abort()

    def expire(self, refusal: Reply) -> None:
        """The client's deadline has passed. refusal: the answer if it was the client who was too slow."""
        if self._answer is not None and self.is_request_complete and self._due > monotonic():
            self.client.deadline = self._due  # there was progress, which moves no deadline itself
        elif self._is_waiting and (self.is_request_complete or monotonic() >= self.call.wait_ends_at):
            self._reply(self.call.on_wait_over())
        elif not self.is_request_complete or self.client.is_write_paused:
            self._detach()
            if self.is_answered:
                self._finish(_CLIENT_GONE)
                self.client.abort()
            else:
                self._reply(refusal)
        else:
            self._fail(Loss.TIMEOUT)

    def on_target_down(self, target: Target) -> None:
        """The target was found dead: what it has not answered is not waited for."""
        if self._target is target and (self._upstream is not None or self._connecting is not None):
            self._fail(Loss.UNREACHABLE if self._upstream is None else Loss.RESET)

    def fault(self, refusal: Reply) -> None:
        """The rest of the request cannot be understood, or we failed: answer so, or abort if it is too late."""
        self._detach()
        if self.is_answered:
            self._abort(_CLIENT_GONE)
        else:
            self._reply(refusal)

    def on_client_gone(self) -> None:
        """Nobody waits for the answer: the instance's work ends with its connection, or by the call's word."""
        self._detach()
        self._finish(_CLIENT_GONE)

    def on_client_write_paused(self, is_paused: bool) -> None:
        """Hold the instance back while the client does not take more, and its silence does not count."""
        super().on_client_write_paused(is_paused)
        if not is_paused:
            self._progress_at = monotonic()

    # The end

    def _finish(self, outcome: Outcome) -> None:
        if self.is_over:
            return
        self.is_over = True
        is_complete = self._outgoing.is_complete
        self._outgoing.forget_kept()
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        upstream = self._upstream
        if upstream is not None:
            self._upstream = None
            upstream.release(can_reuse=is_complete)
        self.call.finish(outcome)
        if outcome is not _CLIENT_GONE:
            self.client.exchange_over(is_request_complete=is_complete)

    def __repr__(self) -> str:
        state = (
            "over" if self.is_over else "answered" if self.is_answered else "waiting" if self._is_waiting else "sending"
        )
        return f"<Exchange {state} {self.request!r} to {self._target!r}>"
