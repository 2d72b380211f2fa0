"""A request on the fast path, from its sending to the end of its answer.

If a plain, whole answer arrives, the request ends here. In every other case, an ordinary Exchange takes over the
request's bytes, lease and choice, and continues as on the general path.
"""

from __future__ import annotations

import logging
from time import monotonic

from torchmoor.proxy.api.invocation import Invocation
from torchmoor.proxy.api.operation import Operation
from torchmoor.proxy.api.runtime import DROPPED_FIELDS, answer_lines
from torchmoor.proxy.dispatch.assignment import marking_line
from torchmoor.proxy.dispatch.callers import CallerLease, Callers
from torchmoor.proxy.dispatch.chooser import Choice
from torchmoor.proxy.dispatch.observer import Observer
from torchmoor.proxy.dispatch.record import begin_record, complete_record, record_place
from torchmoor.proxy.http.answer import Loss
from torchmoor.proxy.http.call import FastClient, Outcome, Target
from torchmoor.proxy.http.connection_parts import ConnectionParts
from torchmoor.proxy.http.exchange import Exchange
from torchmoor.proxy.http.field_names import CLOSED_SESSION_ID, CONTINUABLE, INVOCATION_ID, NEW_SESSION_ID
from torchmoor.proxy.http.message import AnswerHead, Reply, Request, date_line
from torchmoor.proxy.http.upstream import UpstreamConnection
from torchmoor.proxy.instances.instance import Lease
from torchmoor.wire.session_ids import SessionId

logger = logging.getLogger(__name__)

# Fields of an answer that change the proxy's state, or need more than sending the answer on.
_SPECIAL = frozenset((NEW_SESSION_ID, CLOSED_SESSION_ID, CONTINUABLE))


class FastOperation:
    """The data that all requests of an operation share.

    end_of_turn, end_of_other: the last lines of heads for instances: of a session's turn, and of any other request.
    """

    def __init__(self, operation: Operation, parts: ConnectionParts) -> None:
        dispatchers = operation.dispatchers
        self.operation = operation
        self.parts = parts
        self.budget = parts.budget
        self.dispatchers = dispatchers
        self.callers = dispatchers.callers
        self.dispatcher = dispatchers.first(operation.endpoint)
        self.metrics = self.dispatcher.metrics
        self.end_of_turn = marking_line(dispatchers.settings, uses_session=True) + b"\r\n"
        self.end_of_other = marking_line(dispatchers.settings, uses_session=False) + b"\r\n"


class FastRequest:
    """The exchange of both connections, as long as nothing unusual happens; see RunningRequest and AnswerReceiver."""

    __slots__ = (
        *("_shared", "_client", "_request", "_body", "_choice", "_session"),
        *("_request_id", "_lease", "_caller_lease", "_upstream", "_sent_at"),
    )

    is_answered = False
    is_request_complete = True

    _request_id: bytes
    _lease: Lease
    _upstream: UpstreamConnection
    _sent_at: float

    def __init__(
        self,
        shared: FastOperation,
        client: FastClient,
        request: Request,
        body: bytes,
        choice: Choice,
        session: SessionId | None,
    ) -> None:
        self._shared = shared
        self._client = client
        self._request = request
        self._body = body
        self._choice = choice
        self._session = session
        self._caller_lease: CallerLease | None = None

    def send(self, num_body_bytes: int) -> None:
        """Count the request, and write it to an idle connection of the chosen instance.

        num_body_bytes: the body's weighed length. The replay budget counts it already.
        """
        shared, request, choice = self._shared, self._request, self._choice
        operation, instance = shared.operation, choice.instance
        shared.metrics.invocations += 1
        choice.tally.count += 1
        self._lease = instance.lease(num_body_bytes)
        callers = shared.callers
        caller_lines = b"" if callers is None else self._enter(callers)
        self._upstream = upstream = instance.idle.pop()
        self._request_id = request_id = shared.dispatchers.new_request_id()
        self._sent_at = monotonic()
        head = operation.begin_head(
            request,
            request_id,
            choice,
            shared.dispatcher.path,
            framing=request.framing_line,
            held_back=operation.dialect.held_back,
            timeout_line=operation.timeout_line,
        )
        self._client.deadline = request.received_at + operation.deadlines.first_byte_s
        self._client.exchange = upstream.exchange = self
        end = shared.end_of_other if self._session is None else shared.end_of_turn
        upstream.transport.write(b"".join((*head, caller_lines, end, self._body)))

    def _enter(self, callers: Callers) -> bytes:
        """Count the request for its caller, which has room for it; return the header lines about the caller."""
        request = self._request
        address = "" if request.principal else self._client.source
        invocation_id = request.find(INVOCATION_ID) or b""
        self._caller_lease = lease = callers.lease_request(request.principal, address, invocation_id=invocation_id)
        return lease.header_lines(request, opens_session=False)

    def on_answer(self, head: AnswerHead, piece: bytes, *, is_complete: bool) -> None:
        if is_complete and self._try_finish(head, piece):
            return
        self._become_exchange().on_answer(head, piece, is_complete=is_complete)

    def _try_finish(self, head: AnswerHead, piece: bytes) -> bool:
        """Deliver a whole answer and end, or change nothing and return False."""
        client, request, shared, choice = self._client, self._request, self._shared, self._choice
        layout = head.layout
        if head.status != 200 or layout.length is None or not _SPECIAL.isdisjoint(layout.places):
            return False
        if not client.keep_alive or choice.instance.breaker.num_failures or shared.dispatcher.num_waiting:
            return False
        now = monotonic()
        if not shared.dispatchers.decisions.try_leave_out(now):  # else the general path records the decision
            return False
        lines = answer_lines(head.line.client_line, head, DROPPED_FIELDS, self._request_id)
        framing = head.fields[layout.length].line
        data = b"".join((*lines, choice.runtime_lines, date_line(), request.answer_lines, framing, b"\r\n", piece))
        client.write(data)
        observer = shared.dispatchers.observer
        if observer is not None:
            self._observe(observer, head, piece, len(data), now)
        shared.budget.release(len(self._body))
        self._upstream.release(can_reuse=True)
        self._lease.release()
        if self._caller_lease is not None:
            self._leave(self._caller_lease)
        sent_at = self._sent_at
        shared.metrics.observe(now - sent_at, sent_at - request.received_at)
        client.exchange_over(is_request_complete=True)
        return True

    def _observe(self, observer: Observer, head: AnswerHead, body: bytes, num_bytes_out: int, now: float) -> None:
        """Give the observer the record of a whole answer. A failure is logged: the lease must still be released."""
        shared, request = self._shared, self._request
        try:
            variant, dialect = shared.dispatcher.variant, shared.operation.dialect
            record = begin_record(request, self._request_id, Outcome.ANSWERED, now)
            record_place(record, variant, dialect.operation_name, self._choice, self._session)
            complete_record(record, request, variant, head)
            record.status = head.status
            record.num_bytes_in, record.num_bytes_out = len(self._body), num_bytes_out
            record.upstream_s = now - self._sent_at
            record.answered_s = record.total_s
            record.first_byte_s = record.total_s if body else None
            observer.on_end(record)
        except Exception:
            logger.exception("request not recorded request_id=%s", self._request_id.decode())

    def _leave(self, lease: CallerLease) -> None:
        """Note the caller's turn, and stop counting its request."""
        session = self._session
        if session is not None:
            lease.on_turn((self._shared.operation.endpoint.name, session.text), is_lost=False)
        lease.release()

    def _become_exchange(self) -> Exchange:
        """Let the general path continue from here."""
        shared, client, request = self._shared, self._client, self._request
        shared.budget.release(len(self._body))  # the exchange takes it again
        call = Invocation(
            shared.operation,
            request,
            request_id=self._request_id,
            dispatcher=shared.dispatcher,
            session=self._session,
        )
        exchange = Exchange(client, request, call, shared.parts, self._body, True)
        sending = call.take_over(exchange, self._choice, self._lease, self._caller_lease, self._sent_at)
        exchange.take_over(sending, self._upstream, self._sent_at)
        if client.exchange is self:  # it has not left
            client.exchange = exchange
        return exchange

    # Everything else is left to the general path

    def on_answer_piece(self, piece: bytes, *, is_complete: bool) -> None:
        self._become_exchange().on_answer_piece(piece, is_complete=is_complete)

    def on_request_piece(self, piece: bytes, *, is_complete: bool) -> None:
        self._become_exchange().on_request_piece(piece, is_complete=is_complete)

    def on_lost(self, loss: Loss) -> None:
        self._become_exchange().on_lost(loss)

    def on_client_gone(self) -> None:
        self._become_exchange().on_client_gone()

    def on_client_write_paused(self, is_paused: bool) -> None:
        """Also called while the answer is written, so it must not become an exchange here."""
        if is_paused:
            self._upstream.pause_reading()
        else:
            self._upstream.resume_reading()

    def on_target_down(self, target: Target) -> None:
        if target is self._choice.instance:
            self._become_exchange().on_target_down(target)

    def expire(self, refusal: Reply) -> None:
        self._become_exchange().expire(refusal)

    def fault(self, refusal: Reply) -> None:
        self._become_exchange().fault(refusal)

    def __repr__(self) -> str:
        return f"<FastRequest {self._request!r} to {self._choice.instance!r}>"
