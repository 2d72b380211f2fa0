"""One forwarded request, whatever its dialect: where it goes, when it goes elsewhere, and what is counted of it.

A dialect says how an answer and an error look, an `Assignment` which instance it is; this class joins the two, says
how often a request is sent, and counts.
"""

from __future__ import annotations

from time import monotonic

from torchmoor.errors import ApiError, ModelError
from torchmoor.proxy.api.operation import Operation, body_too_large, timeout_line
from torchmoor.proxy.api.validation import (
    INFERENCE_ID,
    INVOCATION_ID,
    PREFIX_AWARE_ID,
    SESSION_ID,
    TARGET_MODEL,
)
from torchmoor.proxy.dispatch import unavailable
from torchmoor.proxy.dispatch.assignment import Assignment
from torchmoor.proxy.dispatch.dispatcher import Dispatcher
from torchmoor.proxy.dispatch.gateway import NEW_SESSION, SESSION_KEY
from torchmoor.proxy.dispatch.observer import TRACEPARENT, Observer, Trace
from torchmoor.proxy.dispatch.record import Record, begin_record
from torchmoor.proxy.http.answer import Answer, Loss, WatchedAnswer
from torchmoor.proxy.http.call import Outcome, Waiter, Waiting
from torchmoor.proxy.http.message import AnswerHead, BodyCheck, Reply, Request
from torchmoor.proxy.instances.instance import Instance
from torchmoor.proxy.instances.registry import Endpoint
from torchmoor.proxy.routing.kv_aware import Expectation
from torchmoor.proxy.routing.strategy import RouteRequest
from torchmoor.wire import error_codes, headers
from torchmoor.wire.session_hash import session_hash
from torchmoor.wire.session_ids import SessionId

ERROR_HEADER = headers.ERROR.encode()
REFUSED_FOR_NOW = frozenset(code.encode() for code in error_codes.REFUSED_FOR_NOW)
TORCHSERVE_BUSY = frozenset((503, 507))  # queue full or no worker; worker died
WORKER_DIED = 500  # what TorchServe answers for a request that its worker took along; or a handler's own, not of ours
NEW_SESSION_ID = headers.NEW_SESSION_ID.encode()
CLOSED_SESSION_ID = headers.CLOSED_SESSION_ID.encode()
PREFILL_TOKENS = headers.PREFILL_TOKENS.encode()  # a handler's receipt: computed for this answer
CONTEXT_TOKENS = headers.CONTEXT_TOKENS.encode()  # of the whole prompt
_PRINCIPAL_LINE = f"{headers.PRINCIPAL}: ".encode()
_REQUEST_ID_LINE = f"{headers.REQUEST_ID}: ".encode()
_INFERENCE_ID_LINE = f"\r\n{headers.INFERENCE_ID}: ".encode()
_INVOCATION_ID_LINE = f"{headers.INVOCATION_ID}: ".encode()
# Looking a member up in its Enum takes longer than many a step here.
_ANSWERED, _BROKEN = Outcome.ANSWERED, Outcome.BROKEN
_TRACE_FIELDS = frozenset((TRACEPARENT,))
MAX_RESETS = 1  # second attempts after a connection ended with the request perhaps begun

TIMED_OUT = (
    "Your invocation timed out while waiting for a response from container primary. "
    "Review the latency metrics for each container in Amazon CloudWatch, resolve the issue, and try again."
)


class Invocation(Assignment):
    """A Call (see torchmoor.proxy.http.call) with everything but the dialect's own words.

    No slots: an invocation is made for each request, and what most of them never change is not set.

    status: that the client was told; error_kind: and the kind of error. held_back: names of fields that do not pass on,
    beside those that never do. sent_at: to the chosen instance, in monotonic seconds. Only where there is an observer:
    answer_head, the last one that an instance gave; watched, the answer that passed; trace.
    """

    operation_name = ""
    may_name_session = True  # in the body, without a header

    num_prefix_bytes = 0
    status = 0
    held_back: frozenset[bytes] = frozenset()
    _body_check: BodyCheck | None = None
    _must_read_body = False  # for a session's id
    _num_resets = 0
    error_kind = ""
    sent_at = 0.0
    observer: Observer | None = None
    answer_head: AnswerHead | None = None
    watched: WatchedAnswer | None = None
    trace: Trace | None = None
    _trace_line = b""

    def __init__(
        self,
        operation: Operation,
        request: Request,
        *,
        request_id: bytes,
        dispatcher: Dispatcher,
        session: SessionId | None,
        path: bytes | None = None,
    ) -> None:
        """path: at the instance, if not its model's."""
        self.operation = operation
        self.gateway = operation.gateway
        self.request = request
        self.request_id = request_id
        self.dispatcher = dispatcher
        self.session = session
        self.metrics = dispatcher.metrics
        self.max_body_bytes = operation.max_body_bytes
        self.deadlines = operation.deadlines
        self._path = path or dispatcher.path
        if session is None:
            self.num_prefix_bytes = dispatcher.num_prefix_bytes
            self.opens_session = request.find(SESSION_ID) == NEW_SESSION
            length = request.content_length or 0
            if self.may_name_session and not self.opens_session and 0 < length <= operation.max_session_body_bytes:
                self._must_read_body = True
                self.num_prefix_bytes = max(length, self.num_prefix_bytes)
        if request.body_check is not None:
            self._body_check = request.body_check
            self.max_body_bytes = min(self.max_body_bytes, request.body_check.max_body_bytes)
            self.num_prefix_bytes = self.max_body_bytes + 1  # all of it
        dispatcher.metrics.invocations += 1
        if self.gateway.observer is not None:
            self.observer = self.gateway.observer
            self.trace = self.observer.begin_trace(request)
            if self.trace is not None:
                self.held_back |= _TRACE_FIELDS
                self._trace_line = self.trace.line

    @property
    def endpoint(self) -> Endpoint:
        """Whose invocation it is."""
        return self.operation.endpoint

    # The dialect's part

    def error(self, error: ApiError) -> Reply:
        """The error in the dialect's form."""
        raise NotImplementedError

    def answer(self, head: AnswerHead) -> Answer | None:
        """The answer as the client gets it; None to read its body and call on_refusal."""
        raise NotImplementedError

    def on_refusal(self, body: bytes) -> Reply:
        """The answer for a body that was asked for."""
        raise NotImplementedError

    # Call

    def route(self, prefix: bytes, waiter: Waiter) -> Instance | Reply | Waiting:
        """Choose and lease an instance, or wait for one."""
        if self._body_check is not None:
            self.num_prefix_bytes = 0 if self.session is not None else self.dispatcher.num_prefix_bytes
            try:
                self._body_check.verify(prefix)
            except ApiError as error:
                return self.fail(error)
        if self._must_read_body:
            self.num_prefix_bytes = self.dispatcher.num_prefix_bytes
            if SESSION_KEY in prefix:
                self._find_session(prefix)
        if self.num_prefix_bytes and self.session is None:
            prefix_id = self.request.find(PREFIX_AWARE_ID) or b""
            excluded = self.route_request.excluded
            self.route_request = RouteRequest(excluded=excluded, prefix=prefix, prefix_id=prefix_id)
        return self.assign(waiter)

    def _find_session(self, body: bytes) -> None:
        """Go by the session that the body names, if it does. It is counted with the variant that was drawn for it."""
        session = self.gateway.find_session_in(self.endpoint, self.request.principal, body)
        if session is None:
            return
        drawn, self.session = self.dispatcher, session
        self.dispatcher = self.gateway.dispatcher_for(self.endpoint, session, None)
        if self._path == drawn.path:
            self._path = self.dispatcher.path

    def on_wait_over(self) -> Reply:
        """No instance was free in time."""
        return self.fail(self.dispatcher.wait_over())

    def request_head(self, framing: bytes, time_left_s: float | None) -> bytes:
        """The request as the chosen instance gets it."""
        assert self.choice is not None
        self.sent_at = monotonic()
        request, request_id, operation = self.request, self.request_id, self.operation
        places = request.layout.places
        parts = [
            request.method,
            b" ",
            self._path,
            self.choice.request_line,
            framing,
            request.lines(self.held_back),
            operation.endpoint_line,
            _REQUEST_ID_LINE,
            request_id,
            _INFERENCE_ID_LINE,
            (request.find(INFERENCE_ID) or request_id) if INFERENCE_ID in places else request_id,
            operation.timeout_line if time_left_s is None else timeout_line(time_left_s),
        ]
        if INVOCATION_ID not in places:
            parts += (_INVOCATION_ID_LINE, request_id, b"\r\n")
        parts += (self.added_lines(), self._trace_line, b"\r\n")
        return b"".join(parts)

    def added_lines(self) -> bytes:
        """What the dialect and the proxy tell the instance beside the fields that pass."""
        principal = self.request.principal
        return b"%b%b\r\n" % (_PRINCIPAL_LINE, principal.encode()) if principal else b""

    def on_abandoned(self) -> None:
        """The instance shall stop; a closed connection alone does not tell it before it has something to say."""
        assert self.choice is not None
        path = self._path.partition(b"?")[0]
        self.gateway.cancellations.cancel(self.choice.instance, path, self.request_id)

    def on_answer(self, head: AnswerHead, *, can_replay: bool) -> Answer | Instance | Waiting | None:
        """Pass the answer on, or go elsewhere if the instance could not take the request."""
        if can_replay and head.status >= 400:
            other = self._find_abler(head)
            if other is not None:
                return other
        if self.expected is not None:
            self._read_receipt(self.expected, head)
        answer = self.answer(head)
        if answer is not None:
            self.status = head.status
            if self.opens_session:
                self._note_opened(head)
            elif self.session is not None and CLOSED_SESSION_ID in head.layout.places:
                self.gateway.on_closed(self.endpoint, self.request.principal, self.session)
        return answer if self.observer is None else self._watch(head, answer)

    def _note_opened(self, head: AnswerHead) -> None:
        opened = head.find(NEW_SESSION_ID) or head.find(SESSION_ID)
        if opened and head.status < 300:
            assert self.choice is not None
            self.gateway.on_opened(self.endpoint, self.request.principal, opened, self.choice.instance)

    def _watch(self, head: AnswerHead, answer: Answer | None) -> Answer | None:
        """Keep what the observer will be told."""
        self.answer_head = head
        if answer is not None:
            answer = self.watched = WatchedAnswer(answer)
        return answer

    def _find_abler(self, head: AnswerHead) -> Instance | Waiting | None:
        """Another instance, if this one's refusal says that it cannot serve the request now.

        A session's turn leaves its instance only if that has no worker, not because the instance is busy.
        """
        assert self.choice is not None
        status, code = head.status, head.find(ERROR_HEADER)
        is_without_worker = code is None and status in TORCHSERVE_BUSY
        if is_without_worker:
            self.note_failure(is_dead=True)
        elif code is None and status == WORKER_DIED:
            # If it is the handler's own word, the instance is well and the next one will say the same.
            is_without_worker = True
            self.gateway.suspect(self.choice.instance)
        if (is_without_worker and self.is_repeatable) or (code in REFUSED_FOR_NOW and self.session is None):
            return self.find_other(is_counted=True)
        return None

    def _read_receipt(self, expected: Expectation, head: AnswerHead) -> None:
        """Tell KV_AWARE how much of a prompt that it believed to be held was held."""
        assert self.choice is not None
        num_context = head.find(CONTEXT_TOKENS) or b""
        num_prefill = head.find(PREFILL_TOKENS) or b""
        if num_context.isdigit() and num_prefill.isdigit():
            num_tokens, num_kept = int(num_context), int(num_context) - int(num_prefill)
            self.dispatcher.on_receipt(self.choice.instance, expected, num_kept=num_kept, num_tokens=num_tokens)

    def on_lost(self, loss: Loss, *, can_replay: bool) -> Instance | Reply | Waiting:
        """Go elsewhere if that cannot do the work twice, else say what happened."""
        assert self.choice is not None
        instance = self.choice.instance
        if loss is Loss.TIMEOUT:
            self.note_failure(is_dead=False)
            return self.fail(self.timeout_error())
        if loss is Loss.UNREACHABLE:
            self.gateway.report_unreachable(instance)
        else:
            # A reset alone condemns nobody: it may be one worker, or one request; and a packet can get lost. A probe
            # will tell.
            self.note_failure(is_dead=True)
        was_sent = loss is Loss.RESET
        is_safe = not was_sent or (self.is_repeatable and self._num_resets < MAX_RESETS)
        self._num_resets += was_sent
        if can_replay and is_safe:
            other = self.find_other(is_counted=was_sent)
            if other is not None:
                return other
        return self.fail(unavailable.instance_lost())

    def on_body_too_large(self) -> Reply:
        """The body is longer than the dialect allows."""
        return self.fail(body_too_large(self.max_body_bytes))

    def finish(self, outcome: Outcome) -> None:
        """Release what is held, then count and record the invocation."""
        now = monotonic()
        record = self._record(outcome, now)
        self.gateway.decisions.note(record, now)
        if self.observer is not None:
            self.observer.on_end(record, self.trace)
        self.let_go()
        if self._body_check is not None:
            self._body_check.release()
        metrics = self.metrics
        if self.sent_at:
            model_s = now - self.sent_at
            metrics.observe(model_s, now - self.request.received_at - model_s)
        if self.status >= 400:
            metrics.count_status(self.status)
        if outcome is _ANSWERED:
            choice = self.choice
            if choice is not None and not self.has_failed and choice.instance.breaker.num_failures:
                self.gateway.recovery.on_answered(choice.instance)
        elif outcome is _BROKEN:
            metrics.mid_stream_errors += 1
            self.note_failure(is_dead=True)

    def _record(self, outcome: Outcome, now: float) -> Record:
        record = begin_record(self.request, self.request_id, outcome, now)
        variant = self.dispatcher.variant
        record.endpoint = variant.endpoint
        record.variant = variant.name
        record.operation = self.operation_name
        record.status = self.status or None
        if self.choice is not None:
            record.instance, record.routing_reason = self.choice.instance.name, self.choice.reason
        if self.session is not None:
            record.session = session_hash(self.session.text)
        if self.num_retries:
            record.num_retries = self.num_retries
        if self.waited_s:
            record.waited_s = self.waited_s
        if self.error_kind:
            record.error_type = self.error_kind
        elif outcome is _BROKEN:
            record.error_type = "MidStreamError"
        if self.observer is not None:
            self._record_details(record, now)
        return record

    def _record_details(self, record: Record, now: float) -> None:
        """Add what only an observer reads."""
        request, waiter, watched, head = self.request, self._waiter, self.watched, self.answer_head
        record.model = self.dispatcher.variant.settings.model
        if waiter is not None:
            record.status = record.status or waiter.status_replied or None
            record.num_bytes_in, record.num_bytes_out = waiter.num_bytes_in, waiter.num_bytes_replied
        if self.sent_at:
            record.upstream_s = now - self.sent_at
        if watched is not None:
            record.num_bytes_out += watched.num_bytes
            if watched.began_at:
                record.first_byte_s = watched.began_at - request.received_at
        inference_id, target_model = request.find(INFERENCE_ID), request.find(TARGET_MODEL)
        if inference_id is not None:
            record.inference_id = inference_id.decode("latin-1")
        if target_model is not None:
            record.target_model = target_model.decode("latin-1")
        if head is None:
            return
        opened = head.find(NEW_SESSION_ID) or head.find(SESSION_ID) if self.opens_session else None
        if opened:
            record.session = session_hash(opened.partition(b";")[0].strip())
        if head.status >= 400:
            record.status_refused = head.status
            code = head.find(ERROR_HEADER)  # passes to the client in some dialects
            record.error_type = record.error_type or (code.decode("latin-1") if code else None)
        tokens = head.find(CONTEXT_TOKENS)
        if tokens is not None and tokens.isdigit():
            record.num_context_tokens = int(tokens)

    # Parts of the above

    def fail(self, error: ApiError) -> Reply:
        """The error's reply, counted."""
        self.status = error.status
        self.error_kind = error.kind
        if isinstance(error, ModelError):
            self.metrics.model_errors += 1
        return self.error(error)

    def timeout_error(self) -> ApiError:
        """What a client is told whose model did not answer in time."""
        return ModelError(
            f'Received server error (0) from primary with message "{TIMED_OUT}"',
            original_status=0,
            original_message=TIMED_OUT,
        )
