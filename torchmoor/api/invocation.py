"""One forwarded request, whatever its dialect: where it goes, when it goes elsewhere, and what is counted of it.

A dialect says how an answer and an error look; this class says which instance and how often. It holds one lease of
the chosen instance from `route` to `finish`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from time import monotonic

from torchmoor.api.dispatcher import Applicant, Choice, Dispatcher
from torchmoor.api.gateway import Gateway
from torchmoor.api.observer import Trace
from torchmoor.api.validation import INFERENCE_ID, INVOCATION_ID, PREFIX_AWARE_ID, SESSION_ID, Heard
from torchmoor.errors import ApiError, ModelError, ServiceUnavailable, ValidationError
from torchmoor.fleet.instance import Instance, Lease
from torchmoor.fleet.registry import Endpoint
from torchmoor.http.call import WAITING, Answer, Deadlines, Loss, Outcome, Waiter, Waiting
from torchmoor.http.exchange import MAX_WAITING_CHUNKED_BYTES
from torchmoor.http.fields import Headers
from torchmoor.http.message import BodyCheck, Reply, Request
from torchmoor.routing.kv_aware import Expectation
from torchmoor.routing.sessions import NEW_SESSION, SessionId
from torchmoor.routing.strategy import FIRST_ATTEMPT, RouteRequest
from torchmoor.routing.waiting import Ticket

ERROR_HEADER = b"x-torchmoor-error"
REFUSED_FOR_NOW = frozenset((b"Overloaded", b"OutOfMemory", b"JournalUnavailable"))
TORCHSERVE_BUSY = frozenset((503, 507))  # queue full or no worker; worker died
WORKER_DIED = 500  # what TorchServe answers for a request that its worker took along; or a handler's own, not of ours
# An instance gets this much longer than the client: who waited too long is told so by the proxy, in the API's words.
TIMEOUT_GRACE_S = 1.0
RETRY = "retry"  # why an instance was chosen after another
PREFILL_TOKENS = b"x-torchmoor-prefill-tokens"  # a handler's receipt: computed for this answer
CONTEXT_TOKENS = b"x-torchmoor-context-tokens"  # of the whole prompt
_BROKEN = Outcome.BROKEN
MAX_RESETS = 1  # second attempts after a connection ended with the request perhaps begun

TIMED_OUT = (
    "Your invocation timed out while waiting for a response from container primary. "
    "Review the latency metrics for each container in Amazon CloudWatch, resolve the issue, and try again."
)


class Operation:
    """What all requests for one operation of an endpoint share."""

    __slots__ = ("gateway", "endpoint", "deadlines", "max_body_bytes", "endpoint_line")

    def __init__(self, gateway: Gateway, endpoint: Endpoint, deadlines: Deadlines, max_body_bytes: int) -> None:
        self.gateway = gateway
        self.endpoint = endpoint
        self.deadlines = deadlines
        self.max_body_bytes = max_body_bytes
        self.endpoint_line = b"x-torchmoor-endpoint: %b\r\n" % endpoint.name.encode()


class Invocation:
    """A Call (see torchmoor.http.call) with everything but the dialect's own words.

    No slots: an invocation is made for each request, and what most of them never change is not set.
    """

    num_prefix_bytes = 0
    _body_check: BodyCheck | None = None
    _principal_line = b""
    opens_session = False
    route_request = FIRST_ATTEMPT
    choice: Choice | None = None
    status = 0  # that the client was told
    _waiter: Waiter | None = None
    _ticket: Ticket[Applicant] | None = None
    _lease: Lease | None = None
    _num_resets = 0
    sent_at = 0.0  # to the chosen instance, in monotonic seconds
    first_piece_at = 0.0  # when its answer's body began, where somebody wants to know
    waited_s = 0.0  # for an instance to be free
    num_retries = 0
    error_kind = ""  # what the client was told, or the handler's own code where that passes
    status_refused = 0  # the instance's own, of an answer that is an error
    answer_headers: Headers | None = None
    operation_name = ""
    trace: Trace | None = None  # where requests are traced
    _has_failed = False  # the chosen instance, this request
    _expected: Expectation | None = None  # what KV_AWARE believes to be held of the prompt

    def __init__(
        self,
        operation: Operation,
        request: Request,
        heard: Heard,
        *,
        request_id: bytes,
        dispatcher: Dispatcher,
        session: SessionId | None,
        path: bytes | None = None,
    ) -> None:
        """path: at the instance, if not its model's."""
        self.operation = operation
        self.request = request
        self.request_id = request_id
        self.dispatcher = dispatcher
        self.session = session
        self.metrics = dispatcher.metrics
        self.max_body_bytes = operation.max_body_bytes
        self.deadlines = operation.deadlines
        self._path = path or dispatcher.path
        self._heard = heard
        if session is None:
            self.num_prefix_bytes = dispatcher.num_prefix_bytes
            self.opens_session = heard.members.get(SESSION_ID) == NEW_SESSION
        if request.principal:
            self._principal_line = b"x-torchmoor-principal: %b\r\n" % request.principal.encode()
        if request.body_check is not None:
            self._body_check = request.body_check
            self.max_body_bytes = min(self.max_body_bytes, request.body_check.max_body_bytes)
            self.num_prefix_bytes = self.max_body_bytes + 1  # all of it
        dispatcher.metrics.invocations += 1
        if operation.gateway.observer is not None:
            self.trace = operation.gateway.observer.begin_trace(request)

    @property
    def gateway(self) -> Gateway:
        """Where instances are chosen."""
        return self.operation.gateway

    @property
    def endpoint(self) -> Endpoint:
        """Whose invocation it is."""
        return self.operation.endpoint

    @property
    def members(self) -> Mapping[bytes, bytes]:
        """What its header fields say to the API, by header name."""
        return self._heard.members

    @property
    def wait_ends_at(self) -> float:
        """When a wait for an instance has been too long."""
        return self.request.received_at + self.dispatcher.max_wait_s

    # The dialect's part

    def error(self, error: ApiError) -> Reply:
        """The error in the dialect's form."""
        raise NotImplementedError

    def answer(self, status: int, reason: bytes, headers: Headers) -> Answer | None:
        """The answer as the client gets it; None to read its body and call on_refusal."""
        raise NotImplementedError

    def on_refusal(self, body: bytes) -> Reply:
        """The answer for a body that was asked for."""
        raise NotImplementedError

    # Call

    def route(self, prefix: bytes, waiter: Waiter) -> Instance | Reply | Waiting:
        """Choose and lease an instance, or wait for one."""
        self._waiter = waiter
        if self._body_check is not None:
            self.num_prefix_bytes = 0 if self.session is not None else self.dispatcher.num_prefix_bytes
            try:
                self._body_check.verify(prefix)
            except ApiError as error:
                return self.fail(error)
        if self.num_prefix_bytes:
            self.route_request = RouteRequest(prefix=prefix, prefix_id=self._heard.members.get(PREFIX_AWARE_ID, b""))
        return self._choose_or_wait()

    def _choose_or_wait(self) -> Instance | Reply | Waiting:
        choice = self.dispatcher.choose(self)
        if choice is not None:
            self._take(choice)
            return choice.instance
        try:
            self._ticket = self.dispatcher.wait(self)
        except ServiceUnavailable as error:
            return self.fail(error)
        return WAITING

    def on_wait_over(self) -> Reply:
        """No instance was free in time."""
        return self.fail(self.dispatcher.wait_over())

    # Applicant

    @property
    def principal(self) -> bytes:
        """Who asks, as far as it is known; for taking turns while waiting."""
        if self.request.principal:
            return self.request.principal.encode()
        credential = find_field(self.request.headers, b"authorization") or b""
        return credential.partition(b"Credential=")[2].partition(b"/")[0] or blake2b(credential, digest_size=8).digest()

    @property
    def body_bytes(self) -> int:
        """The declared length, 0 if there is none."""
        return self.request.content_length or 0

    @property
    def num_waiting_bytes(self) -> int:
        """The declared length; a body without one is taken up to a limit only while it waits."""
        return MAX_WAITING_CHUNKED_BYTES if self.request.is_chunked else self.body_bytes

    def go(self, choice: Choice) -> None:
        """An instance is free: take it."""
        assert self._waiter is not None
        self._ticket = None
        self.waited_s = monotonic() - self.request.received_at
        self.metrics.queue_latency.observe(self.waited_s)
        self._take(choice)
        self._waiter.resume(choice.instance)

    def route_again(self) -> None:
        """The instance that was waited for is gone: another, or another wait."""
        assert self._waiter is not None
        self._ticket = None
        self._waiter.resume(self._choose_or_wait())

    # Call, once there is an instance

    def request_head(self, framing: bytes, time_left_s: float) -> bytes:
        """The request as the chosen instance gets it."""
        assert self.choice is not None
        self.sent_at = monotonic()
        request_id, members = self.request_id, self._heard.members
        invocation_line = b"" if INVOCATION_ID in members else b"amz-sdk-invocation-id: %b\r\n" % request_id
        return (
            b"%b %b HTTP/1.1\r\n%b%b%b%b%bx-torchmoor-request-id: %b\r\nx-amzn-sagemaker-inference-id: %b\r\n%b"
            b"x-torchmoor-timeout-ms: %d\r\n\r\n"
        ) % (
            self.request.method,
            self._path,
            self.choice.request_line,
            framing,
            b"".join(self._heard.lines) if self.trace is None else self.trace.mark(self._heard.lines),
            self.operation.endpoint_line,
            self._principal_line,
            request_id,
            members.get(INFERENCE_ID) or request_id,
            invocation_line,
            max(0.0, time_left_s + TIMEOUT_GRACE_S) * 1000,
        )

    def on_abandoned(self) -> None:
        """The instance shall stop; a closed connection alone does not tell it before it has something to say."""
        assert self.choice is not None
        path = self._path.partition(b"?")[0]
        self.gateway.cancellations.cancel(self.choice.instance, path, self.request_id)

    def on_answer(
        self, status: int, reason: bytes, headers: Headers, *, can_replay: bool
    ) -> Answer | Instance | Waiting | None:
        """Pass the answer on, or go elsewhere if the instance could not take the request.

        A session's turn leaves its instance only if that has no worker, not because the instance is busy.
        """
        assert self.choice is not None
        if self.gateway.observer is not None:
            self.status_refused = status if status >= 400 else 0
            self.answer_headers = headers
        if status >= 400 and can_replay:
            code = find_field(headers, ERROR_HEADER)
            is_without_worker = code is None and status in TORCHSERVE_BUSY
            if is_without_worker:
                self._note_failure(is_dead=True)
            elif code is None and status == WORKER_DIED:
                # If it is the handler's own word, the instance is well and the next one will say the same.
                is_without_worker = True
                self.gateway.suspect(self.choice.instance)
            if (is_without_worker and self._is_repeatable) or (code in REFUSED_FOR_NOW and self.session is None):
                other = self._find_other(is_counted=True)
                if other is not None:
                    return other
        if self._expected is not None:
            self._read_receipt(headers)
        answer = self.answer(status, reason, headers)
        if answer is not None:
            self.status = status
        return answer

    def _read_receipt(self, headers: Headers) -> None:
        """Tell KV_AWARE how much of a prompt that it believed to be held was held."""
        assert self.choice is not None
        num_context = find_field(headers, CONTEXT_TOKENS) or b""
        num_prefill = find_field(headers, PREFILL_TOKENS) or b""
        if self._expected is not None and num_context.isdigit() and num_prefill.isdigit():
            num_tokens, num_kept = int(num_context), int(num_context) - int(num_prefill)
            self.dispatcher.on_receipt(self.choice.instance, self._expected, num_kept=num_kept, num_tokens=num_tokens)

    def on_lost(self, loss: Loss, *, can_replay: bool) -> Instance | Reply | Waiting:
        """Go elsewhere if that cannot do the work twice, else say what happened."""
        assert self.choice is not None
        instance = self.choice.instance
        if loss is Loss.TIMEOUT:
            self._note_failure(is_dead=False)
            return self.fail(self.timeout_error())
        if loss is Loss.UNREACHABLE:
            self.gateway.report_unreachable(instance)
        else:
            # A reset alone condemns nobody: it may be one worker, or one request. A probe will tell.
            self._note_failure(is_dead=True)
        is_safe = loss is Loss.UNREACHABLE or (self._is_repeatable and self._num_resets < MAX_RESETS)
        if loss is Loss.RESET:
            self._num_resets += 1
        if can_replay and is_safe:
            other = self._find_other(is_counted=loss is not Loss.UNREACHABLE)
            if other is not None:
                return other
        return self.fail(ServiceUnavailable("The instance that was to answer is gone. Try again later."))

    def on_body_too_large(self) -> Reply:
        """The body is longer than the dialect allows."""
        return self.fail(body_too_large(self.max_body_bytes))

    def on_first_piece(self) -> None:
        """The answer's body begins."""
        if self.gateway.observer is not None:
            self.first_piece_at = monotonic()

    def finish(self, outcome: Outcome) -> None:
        """Give the lease back and count."""
        if self._ticket is not None:
            self.dispatcher.leave(self._ticket)
            self._ticket = None
        waiter, self._waiter = self._waiter, None  # a cycle otherwise, which only the collector could free
        lease, self._lease = self._lease, None
        self._release(lease)
        if self._body_check is not None:
            self._body_check.release()
        now = monotonic()
        metrics = self.metrics
        if self.sent_at:
            total = now - self.request.received_at
            model = now - self.sent_at
            metrics.model_latency.observe(model)
            metrics.overhead_latency.observe(total - model)
        if self.status >= 400:
            metrics.count_status(self.status)
        if outcome is _BROKEN:
            metrics.mid_stream_errors += 1
            self._note_failure(is_dead=True)
        elif (
            outcome is Outcome.ANSWERED
            and self.choice is not None
            and self.choice.instance.breaker.num_failures
            and not self._has_failed
        ):
            self.gateway.recovery.on_answered(self.choice.instance)
        if self.gateway.observer is not None:
            self.gateway.observer.on_end(self, waiter, outcome, now)

    # Parts of the above

    @property
    def _is_repeatable(self) -> bool:
        """True if sending the request a second time, elsewhere, cannot do its work twice.

        A turn is recorded under its invocation id, so an instance that shares the journal answers from there.
        """
        return self.session is None or self.gateway.settings.sessions.are_journaled

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

    def _take(self, choice: Choice) -> None:
        before, self._lease = self._lease, choice.instance.lease()
        self.choice = choice
        choice.tally.count += 1
        if before is not None:
            self._release(before)
        self._expected = self.dispatcher.on_sent(self, choice.instance)

    def _release(self, lease: Lease | None) -> None:
        """Give a lease back; what waits may go on."""
        if lease is not None:
            lease.release()
            self.dispatcher.on_free(lease.instance)

    def _note_failure(self, *, is_dead: bool) -> None:
        """The chosen instance has failed this request. is_dead: perhaps it has no worker any more, or is gone."""
        assert self.choice is not None
        instance = self.choice.instance
        self._has_failed = True
        self.gateway.recovery.on_failed(instance)
        if is_dead:
            self.gateway.suspect(instance)

    def _find_other(self, *, is_counted: bool) -> Instance | Waiting | None:
        """Lease another instance instead of the chosen one, or wait for it; None if there is none: nothing changes.

        is_counted: the chosen one may have worked on the request, so the budget for that is asked.
        """
        assert self.choice is not None
        if is_counted and not self.dispatcher.retries.try_take(self.metrics.invocations):
            self.metrics.retries_refused += 1
            return None
        request = self.route_request
        self.route_request = replace(request, excluded=request.excluded | {self.choice.instance.name})
        choice = self.dispatcher.choose(self)
        if choice is not None:
            is_turn = self.session is not None
            self._note_retry()
            self._take(choice if is_turn else self.dispatcher.choice_of(choice.instance, RETRY))
            return choice.instance
        try:
            self._ticket = self.dispatcher.wait(self)
        except ServiceUnavailable:
            self.route_request = request
            return None
        self._note_retry()
        before, self._lease = self._lease, None
        self._release(before)
        return WAITING

    def _note_retry(self) -> None:
        self._has_failed = False
        self.num_retries += 1
        self.metrics.retries += 1


def find_field(headers: Headers, name: bytes) -> bytes | None:
    """The first value of a field."""
    for field in headers:
        if field.name == name:
            return field.value
    return None


def body_too_large(limit: int) -> ValidationError:
    """The refusal of a body above a limit."""
    return ValidationError(f"The request body is longer than the limit of {limit} bytes.")
