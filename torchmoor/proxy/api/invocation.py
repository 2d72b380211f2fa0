"""One request that is sent to an instance, of any dialect: its attempts, its answer, and its counts.

An Invocation has an ApiDialect, which renders answers and errors, and an Assignment, which has the instance.
"""

from __future__ import annotations

from time import monotonic

from torchmoor.errors import (
    ApiError,
    BodyTooLarge,
    ModelError,
    ServiceUnavailable,
    ValidationError,
    invocation_timed_out,
)
from torchmoor.proxy.access.gate import body_too_large
from torchmoor.proxy.api.form_fields import check_form
from torchmoor.proxy.api.operation import Operation, timeout_line
from torchmoor.proxy.api.runtime_members import PREFIX_AWARE_ID
from torchmoor.proxy.api.stream_continuer import StreamContinuer
from torchmoor.proxy.dispatch import unavailable
from torchmoor.proxy.dispatch.assignment import MAX_REPEATS, Assignment
from torchmoor.proxy.dispatch.callers import CallerLease
from torchmoor.proxy.dispatch.chooser import Choice
from torchmoor.proxy.dispatch.dispatcher import Dispatcher
from torchmoor.proxy.dispatch.model_use import ModelUse
from torchmoor.proxy.dispatch.observer import Observation
from torchmoor.proxy.dispatch.record import RequestRecord, begin_record, complete_record, record_place
from torchmoor.proxy.dispatch.refusal import Refusal, read_refusal
from torchmoor.proxy.dispatch.request_sessions import NEW_SESSION, SESSION_KEY
from torchmoor.proxy.dispatch.sequences import SEQUENCE_FIELDS
from torchmoor.proxy.http.answer import Answer, Loss
from torchmoor.proxy.http.call import WAIT, WHOLE_BODY, Judgement, NextStep, Outcome, ReadRefusal, Send, Wait, Waiter
from torchmoor.proxy.http.field_names import CONTENT_TYPE, CONTINUABLE, SESSION_ID
from torchmoor.proxy.http.message import AnswerHead, Reply, Request
from torchmoor.proxy.instances.instance import Lease
from torchmoor.wire import receipt
from torchmoor.wire.session_ids import SessionId

PREFILL_TOKENS = receipt.PREFILL_TOKENS.encode()  # a handler's receipt: computed for this answer
CONTEXT_TOKENS = receipt.CONTEXT_TOKENS.encode()  # of the whole prompt
MAX_SESSION_BODY_BYTES = 16 << 10  # a longer body is forwarded as it arrives, without a search for a session's id
# Local names: a member of an Enum takes long to look up.
_ANSWERED, _BROKEN, _CUT = Outcome.ANSWERED, Outcome.BROKEN, (Outcome.BROKEN, Outcome.FAILED)


class Invocation:
    """A Call and its Forwarding (see torchmoor.proxy.http.call).

    A plain class without slots: attributes that most requests never change are not set.
    """

    _too_large: BodyTooLarge | None = None  # for every instance, if that limits the body more than the API does
    _status = 0  # sent to the client
    _error_kind = ""
    _soonest_retry_s: int | None = None  # of the instances that have refused the request
    _sent_at = _answered_at = 0.0  # to and by the chosen instance, in monotonic seconds
    _answer_head: AnswerHead | None = None  # the last that an instance gave
    _waiter: Waiter | None = None
    _observation: Observation | None = None

    def __init__(
        self,
        operation: Operation,
        request: Request,
        *,
        request_id: bytes,
        dispatcher: Dispatcher,
        session: SessionId | None,
        path: bytes | None = None,
        model: str | None = None,
    ) -> None:
        """path: at the instance, if not its model's. model: the one that is meant, of an endpoint with many."""
        self.operation = operation
        self.request = request
        self.request_id = request_id
        self.deadlines = operation.deadlines
        self.max_body_bytes = operation.max_body_bytes
        self._dispatchers = operation.dispatchers
        self._dialect = operation.dialect
        self._metrics = dispatcher.metrics
        self._path = path
        use = None if model is None else ModelUse(dispatcher, model.removeprefix("/"))  # as instances report it
        self.assignment = Assignment(self._dispatchers, request, dispatcher, session, use)
        if session is None:
            self.assignment.opens_session = request.find(SESSION_ID) == NEW_SESSION
        if request.body_check is not None:
            self.max_body_bytes = min(self.max_body_bytes, request.body_check.max_body_bytes)
        self._metrics.invocations += 1
        if self._dispatchers.observer is not None:
            self._observation = Observation(self._dispatchers.observer, request)

    def _may_name_session(self) -> bool:
        """Return True if the body, without a header for it, may name the session that the request belongs to."""
        assignment, length = self.assignment, self.request.content_length or 0
        return (
            assignment.session is None
            and assignment.model is None
            and not assignment.opens_session
            and self._dialect.names_sessions_in_body
            and 0 < length <= MAX_SESSION_BODY_BYTES
        )

    def _num_prefix_bytes(self) -> int:
        """Return how many of the body's first bytes the strategy reads: none if another rule chooses the instance."""
        assignment = self.assignment
        is_strategy_asked = assignment.session is None and assignment.model is None
        return assignment.dispatcher.chooser.strategy.num_prefix_bytes if is_strategy_asked else 0

    # Call

    @property
    def num_read_bytes(self) -> int:
        """Return the whole body for a signature, a form or a session's id, else what the strategy reads."""
        is_read = self.request.body_check is not None or self.assignment.body_weight > 1 or self._may_name_session()
        return WHOLE_BODY if is_read else self._num_prefix_bytes()

    @property
    def wait_ends_at(self) -> float:
        return self.assignment.wait_ends_at

    def route(self, body: bytes, waiter: Waiter) -> NextStep:
        """Check the body, find its session, count the request for its caller, and assign an instance."""
        self._waiter = waiter
        try:
            self._read_body(body)
            if self._dispatchers.callers is not None:  # a signature is verified by now
                self.assignment.enter(self._dispatchers.callers, waiter.source)
            self.assignment.complete_at = waiter.complete_at
            if self.request.is_chunked:
                self.assignment.num_body_bytes = waiter.num_bytes_in * self.assignment.body_weight
            self.assignment.assign(self._resume)
        except ApiError as error:
            return self.fail(error)
        return self._place()

    def take_over(
        self, waiter: Waiter, choice: Choice, lease: Lease, caller_lease: CallerLease | None, sent_at: float
    ) -> Send:
        """Continue a request that the fast path has counted, and sent to an instance that it leased."""
        self._metrics.invocations -= 1  # counted twice
        self._waiter, self._sent_at = waiter, sent_at
        self.assignment.take_over(choice, lease, caller_lease)
        return Send(choice.instance, self)

    def _read_body(self, body: bytes) -> None:
        request = self.request
        if request.body_check is not None:
            request.body_check.verify(body)
        if self.assignment.body_weight > 1:
            try:
                check_form(request.find(CONTENT_TYPE), body, self._dispatchers.settings.limits.max_form_fields)
            except ValidationError:
                self._metrics.forms_refused += 1
                raise
        if self._may_name_session() and SESSION_KEY in body:
            self._find_session(body)
        num_prefix_bytes = self._num_prefix_bytes()
        if num_prefix_bytes:
            self.assignment.look_at(body[:num_prefix_bytes], request.find(PREFIX_AWARE_ID) or b"")

    def _find_session(self, body: bytes) -> None:
        endpoint = self.operation.endpoint
        session = self._dispatchers.sessions.find_in_body(endpoint, self.request.principal, body)
        if session is None:
            return
        self.assignment.join(session, self._dispatchers.choose(endpoint, session, None))

    def _place(self) -> Send | Wait:
        return Send(self.assignment.chosen.instance, self) if self.assignment.ticket is None else WAIT

    def _resume(self, error: ApiError | None) -> None:
        assert self._waiter is not None
        self._waiter.resume(self._place() if error is None else self.fail(error))

    def on_wait_over(self) -> Reply:
        return self.fail(self.assignment.dispatcher.wait_over(self.assignment))

    def on_body_too_large(self) -> Reply:
        return self.fail(self._too_large or body_too_large(self.request, self.max_body_bytes))

    def limit_body(self, waiter: Waiter) -> None:
        self._waiter, assignment = waiter, self.assignment
        if (too_large := assignment.dispatcher.limit_body(assignment)) and too_large.limit < self.max_body_bytes:
            self.max_body_bytes, self._too_large = too_large.limit, too_large

    def on_body_dropped(self) -> Reply:
        return self.fail(ServiceUnavailable(unavailable.TOO_MANY_BODIES))

    def finish(self, outcome: Outcome) -> None:
        """Release what is held, then count and record the invocation."""
        now = monotonic()
        is_usual = outcome is _ANSWERED and self._status < 400 and not self.assignment.num_retries
        if self._observation is not None or not (is_usual and self._dispatchers.decisions.try_leave_out(now)):
            self._record(outcome, now)
        self._waiter = None  # breaks the cycle with the exchange, which only the garbage collector would free
        self.assignment.release()
        metrics = self._metrics
        if self._sent_at:
            model_s = now - self._sent_at
            metrics.observe(model_s, now - self.request.received_at - model_s)
        if self._status >= 400:
            metrics.count_status(self._status, 0 if self._answer_head is None else self._answer_head.status)
        if outcome is _ANSWERED:
            self.assignment.note_answer()
        elif outcome in _CUT:
            metrics.count_broken()
            if outcome is _BROKEN:
                self.assignment.note_failure(is_dead=True)

    # Forwarding

    def request_head(self, framing: bytes, time_left_s: float | None, given: frozenset[bytes] = frozenset()) -> bytes:
        """Render the request as the chosen instance gets it. given: names of fields that `framing` has."""
        self._sent_at = self._sent_at if self._status else monotonic()
        request, operation, dialect, assignment = self.request, self.operation, self._dialect, self.assignment
        trace_line = b"" if self._observation is None else self._observation.trace_line
        held_back = dialect.held_back
        if self._observation is not None:
            held_back |= self._observation.replaced_fields
        if assignment.chosen.instance.batches_sequences:
            held_back |= SEQUENCE_FIELDS
        if given:
            held_back |= given
        parts = operation.begin_head(
            request,
            self.request_id,
            assignment.chosen,
            self._path or assignment.dispatcher.path,
            framing=framing,
            held_back=held_back,
            timeout_line=operation.timeout_line if time_left_s is None else timeout_line(time_left_s),
        )
        return b"".join((*parts, assignment.own_lines, dialect.added_lines(request), trace_line, b"\r\n"))

    def on_abandoned(self) -> None:
        """Cancel the request at the instance, which notices a closed connection only when it sends something."""
        path = (self._path or self.assignment.dispatcher.path).partition(b"?")[0]
        self._dispatchers.cancellations.send(self.assignment.chosen.instance, path, self.request_id.decode())

    def on_answer(self, head: AnswerHead, *, can_replay: bool) -> Judgement:
        """Deliver the answer, or send the request to another instance if this one could not take it."""
        assignment = self.assignment
        if assignment.model is not None:
            assignment.model.on_answer(head, assignment.chosen.instance.name, self._sent_at)
        if can_replay and head.status >= 400 and self._reassign_refused(head):
            return self._place()
        if assignment.expected is not None:
            self._read_receipt(assignment.expected, head)
        self._answer_head, self._answered_at = head, monotonic()
        assignment.note_session(self.operation.endpoint, head)
        limited = assignment.find_session_refusal(head)
        if limited is not None:
            return ReadRefusal(lambda body: self.fail(limited))
        dialect, chosen = self._dialect, assignment.chosen
        answer = dialect.answer(head, self.request_id)
        if not isinstance(answer, Answer):
            explain = answer
            return ReadRefusal(lambda body: self.fail(explain(head, body)))
        answer.lines += (chosen.runtime_lines if dialect.names_variant else chosen.answer_lines,)
        if dialect.is_stream(head):
            answer.on_body = self._note_first_chunk
        self._status = head.status
        if self._observation is not None:
            answer = self._observation.watch(answer)
        start = head.find(CONTINUABLE)
        if start is not None:
            answer.continuer = StreamContinuer(
                start.decode("latin-1"), assignment, self._place, self._resume, self.request_head, self._note_refusal
            )
        return answer

    def _reassign_refused(self, head: AnswerHead) -> bool:
        """Assign another instance if this one's refusal says that it cannot serve the request now.

        A session's turn leaves its instance only if that has no worker, not because the instance is busy.
        """
        assignment, refusal = self.assignment, self._note_refusal(head)
        is_gone = refusal.is_busy or refusal.has_died
        may_leave = assignment.is_repeatable if is_gone else refusal.is_for_now and assignment.session is None
        has_tried_enough = refusal.has_died and assignment.num_repeats >= MAX_REPEATS
        if not may_leave or has_tried_enough or not assignment.try_reassign(self._resume, is_counted=True):
            return False
        assignment.num_repeats += refusal.has_died
        wait_s, before = head.retry_after_s, self._soonest_retry_s
        if refusal.is_for_now and wait_s is not None:
            self._soonest_retry_s = wait_s if before is None else min(before, wait_s)
        return True

    def _note_refusal(self, head: AnswerHead) -> Refusal:
        """Read an instance's refusal; have the instance probed if it seems to have no worker."""
        refusal = read_refusal(head)
        if refusal.is_busy:
            self.assignment.note_failure(is_dead=True)
        elif refusal.has_died:
            # If the handler itself answers so, the instance is well and the next one will answer the same.
            self._dispatchers.suspect(self.assignment.chosen.instance)
        return refusal

    def _read_receipt(self, expected: object, head: AnswerHead) -> None:
        """Report to the strategy how much of a prompt the instance had in its KV cache."""
        num_tokens, num_prefill = head.find_number(CONTEXT_TOKENS), head.find_number(PREFILL_TOKENS)
        if num_tokens is not None and num_prefill is not None:
            num_kept = num_tokens - num_prefill
            assignment = self.assignment
            strategy, name = assignment.dispatcher.chooser.strategy, assignment.chosen.instance.name
            strategy.check(name, expected, num_kept=num_kept, num_tokens=num_tokens)

    def on_lost(self, loss: Loss, *, can_replay: bool) -> NextStep:
        """Send the request to another instance if it may be repeated, else report the loss."""
        assignment, instance = self.assignment, self.assignment.chosen.instance
        if loss is Loss.SHORTAGE:
            assignment.has_failed = True  # the loss says nothing about the instance
            self._metrics.shortages += 1
            return self.fail(ServiceUnavailable(unavailable.NO_CONNECTION))
        if loss is Loss.TIMEOUT:
            assignment.note_timeout(self.deadlines.first_byte_s)
            return self.fail(self._timeout_error())
        if loss is Loss.UNREACHABLE:
            self._dispatchers.report_unreachable(instance)
        else:
            # One such loss does not mark the instance as failed: it may concern one worker, one request, one lost
            # packet or the name servers. A probe decides.
            assignment.note_failure(is_dead=True)
        if loss is Loss.UNANSWERED:
            is_placed = can_replay and assignment.try_reach(self._resume)
        else:
            was_sent = loss is Loss.RESET
            is_safe = not was_sent or (assignment.is_repeatable and assignment.num_repeats < MAX_REPEATS)
            assignment.num_repeats += was_sent
            may_go = can_replay and is_safe
            is_placed = may_go and assignment.try_reassign(self._resume, is_counted=was_sent, was_lost=True)
        return self._place() if is_placed else self.fail(ServiceUnavailable(unavailable.INSTANCE_LOST))

    def _timeout_error(self) -> ApiError:
        model = self.assignment.model
        error = None if model is None else model.find_timeout_error(self.assignment.chosen.instance.name)
        return error or invocation_timed_out()

    def fail(self, error: ApiError) -> Reply:
        """Render an error, and count it."""
        if isinstance(error, ModelError):
            self._metrics.model_errors += 1
        if error.retry_after_s is not None and self._soonest_retry_s is not None:
            error.retry_after_s = min(error.retry_after_s, self._soonest_retry_s)
        reply = self._dialect.error(error, self.request_id, self.operation.endpoint)
        self._status = self._status or reply.status  # the status of an answer that has begun stays
        self._error_kind = error.kind
        return reply

    def _note_first_chunk(self) -> None:
        now = monotonic()
        model_s = now - self._sent_at
        self._metrics.observe_first_chunk(model_s, now - self.request.received_at - model_s)
        self.assignment.note_first_piece()

    # The record

    def _record(self, outcome: Outcome, now: float) -> None:
        """Record the invocation as a decision and for the observer; most do not need it."""
        record = self._make_record(outcome, now)
        if self._dispatchers.decisions.note(record, now) or self._observation is not None:
            self._add_details(record)
        if self._observation is not None:
            self._observation.end(record)

    def _make_record(self, outcome: Outcome, now: float) -> RequestRecord:
        assignment, operation = self.assignment, self._dialect.operation_name
        record = begin_record(self.request, self.request_id, outcome, now)
        record_place(record, assignment.dispatcher.variant, operation, assignment.choice, assignment.session)
        record.status = self._status or None
        if assignment.num_retries:
            record.num_retries = assignment.num_retries
        if assignment.waited_s:
            record.waited_s = assignment.waited_s
        if self._sent_at:
            record.upstream_s = now - self._sent_at
        if self._answered_at:
            record.answered_s = self._answered_at - self.request.received_at
        if self._error_kind:
            record.error_type = self._error_kind
        elif outcome in _CUT:
            record.error_type = "MidStreamError"
        return record

    def _add_details(self, record: RequestRecord) -> None:
        waiter, assignment, num_tokens = self._waiter, self.assignment, None
        if waiter is not None:
            record.status = record.status or waiter.status_replied or None
            record.num_bytes_in, record.num_bytes_out = waiter.num_bytes_in, waiter.num_bytes_replied
            num_tokens = waiter.num_tokens
        record.target_model = assignment.target_model
        variant, opens_session = assignment.dispatcher.variant, assignment.opens_session
        complete_record(
            record, self.request, variant, self._answer_head, opens_session=opens_session, num_tokens=num_tokens
        )
