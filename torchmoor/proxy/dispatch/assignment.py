"""The assignment of one request: an instance is chosen and leased, now or after a wait, and replaced if it fails.

An assignment has a lease of the chosen instance, or a place in the queue, or neither, and its caller's lease if
callers are limited; `release` gives them back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import monotonic

from torchmoor.config.settings import ProxySettings
from torchmoor.errors import ApiError, BodyTooLarge, CallerLimited, ServiceUnavailable
from torchmoor.proxy.dispatch.body_weight import weigh_body
from torchmoor.proxy.dispatch.callers import CallerLease, Callers
from torchmoor.proxy.dispatch.chooser import Choice, DispatchRequest
from torchmoor.proxy.dispatch.dispatcher import Dispatcher
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.dispatch.model_use import ModelUse
from torchmoor.proxy.http.answer import Loss
from torchmoor.proxy.http.field_names import (
    CLOSED_SESSION_ID,
    ERROR_CODE,
    INVOCATION_ID,
    NEW_SESSION_ID,
    SESSION_ID,
)
from torchmoor.proxy.http.message import AnswerHead, Request
from torchmoor.proxy.instances.endpoint import Endpoint
from torchmoor.proxy.instances.instance import SERVING, Lease
from torchmoor.proxy.routing.reasons import RETRY, SESSION_FAILOVER
from torchmoor.proxy.routing.strategy import FIRST_ATTEMPT, StrategyRequest
from torchmoor.proxy.routing.waiting import Ticket
from torchmoor.wire import error_codes, headers
from torchmoor.wire.continuation import MARKING
from torchmoor.wire.session_header import read_expiry
from torchmoor.wire.session_ids import SessionId

MARKING_LINE = f"{headers.CONTINUABLE}: {MARKING}\r\n".encode()
SESSION_LIMIT_REACHED = error_codes.SESSION_LIMIT_REACHED.encode()
SESSION_ENDED = frozenset(code.encode() for code in error_codes.SESSION_ENDED)


def marking_line(settings: ProxySettings, *, uses_session: bool) -> bytes:
    """Return the header line that asks for marks in a streamed answer, by which another instance can continue it."""
    if settings.limits.max_continued_bytes == 0 or (uses_session and not settings.sessions.are_journaled):
        return b""
    return MARKING_LINE


# Of one request, before and after its answer has begun. Not a setting: more would let one request end more instances,
# and an endpoint seldom has more.
MAX_REPEATS = 2
Resume = Callable[[ApiError | None], None]
"""Called when a wait has changed: the request is assigned, waits again, or (with an error) cannot be assigned."""


class Assignment:
    """A DispatchRequest (see chooser.py), with its leases and its place in the queue.

    expected: what the strategy expects of the chosen instance's answer. has_failed: the chosen instance has failed the
    request. was_lost: see DispatchRequest. ticket: its place in the queue while it waits. waited_s: seconds until an
    instance was free. num_retries: choices after the first. num_repeats: choices after an instance that had perhaps
    begun the request; at most MAX_REPEATS, because the request may be what ends the instances. num_body_bytes: of the
    request's body, as far as known, times body_weight.

    A plain class without slots: attributes that most requests never change are not set.
    """

    opens_session = False
    body_lines = b""  # header lines with names that only the body has: of a model, of an uploaded file
    strategy_request: StrategyRequest = FIRST_ATTEMPT
    choice: Choice | None = None
    expected: object = None
    has_failed = was_lost = False
    waited_s = 0.0
    num_retries = num_repeats = 0
    _resume: Resume | None = None
    ticket: Ticket[DispatchRequest] | None = None
    lease: Lease | None = None
    _caller_lease: CallerLease | None = None

    def __init__(
        self,
        dispatchers: Dispatchers,
        request: Request,
        dispatcher: Dispatcher,
        session: SessionId | None,
        model: ModelUse | None,
    ) -> None:
        """model: of an endpoint with many models, the one that the request uses."""
        self.head = request
        self.complete_at = request.received_at
        self.dispatcher = dispatcher
        self.session = session
        self.model = model
        self.target_model = None if model is None else model.name
        self.metrics = dispatcher.metrics
        self.body_weight = weigh_body(request)
        self.num_body_bytes = (request.content_length or 0) * self.body_weight
        self._dispatchers = dispatchers

    # Choosing

    def exclude(self, instances: frozenset[str]) -> None:
        """Never send the request to these instances."""
        self.strategy_request = replace(self.strategy_request, excluded=self.strategy_request.excluded | instances)

    def exclude_only(self, instances: frozenset[str]) -> None:
        self.strategy_request = replace(self.strategy_request, excluded=instances)

    def look_at(self, prefix: bytes, prefix_id: bytes) -> None:
        """Give the strategy the body's beginning, and the client's id for it."""
        self.strategy_request = replace(self.strategy_request, prefix=prefix, prefix_id=prefix_id)

    def prefer(self, affinity: int) -> None:
        """Prefer the instance of earlier requests with the same affinity key. affinity: the key's hash."""
        self.strategy_request = replace(self.strategy_request, affinity=affinity)

    def join(self, session: SessionId, dispatcher: Dispatcher) -> None:
        """Assign the request as a turn of a session. It stays counted with the variant that was drawn before."""
        self.session = session
        self.dispatcher = dispatcher

    def enter(self, callers: Callers, address: str) -> None:
        """Count the request for its caller until `release`. Raises CallerLimited."""
        self._caller_lease = callers.lease_request(
            self.head.principal,
            address,
            opens_session=self.opens_session,
            invocation_id=self.head.find(INVOCATION_ID) or b"",
        )

    def assign(self, resume: Resume) -> None:
        """Choose and lease an instance, or wait for one. Raises BodyTooLarge or ServiceUnavailable if it cannot."""
        self._follow()
        choice = self.dispatcher.chooser.choose(self)
        if choice is None:
            self.ticket = self.dispatcher.wait(self)
            self._resume = resume
        else:
            self._take(choice)

    def take_over(self, choice: Choice, lease: Lease, caller_lease: CallerLease | None) -> None:
        """Use an instance that is chosen, counted and leased already. The caller is counted, too."""
        self.choice, self.lease, self._caller_lease = choice, lease, caller_lease

    def _follow(self) -> None:
        """Change to the dispatcher that has replaced this request's, if the endpoint was updated meanwhile."""
        while self.dispatcher.successor is not None:
            self.dispatcher = self.dispatcher.successor

    def try_reassign(self, resume: Resume, *, is_counted: bool, was_lost: bool = False) -> bool:
        """Lease another instance instead of the chosen one, or wait for it. Return False if there is none.

        is_counted: the retry counts against the budget, because the chosen instance may have worked on the request.
        was_lost: wait for the chosen instance's replacement, too, where instances are started on demand.
        """
        self.was_lost = was_lost and self.is_repeatable  # otherwise a replacement cannot answer it
        retries = self.dispatcher.retries
        if is_counted and not retries.try_take(self.dispatcher.metrics.invocations):
            self.metrics.retries_refused += 1
            return False
        self._follow()
        before = self.strategy_request
        self.exclude(frozenset((self.chosen.instance.name,)))
        choice = self.dispatcher.chooser.choose(self)
        if choice is not None:
            self._count_retry()
            self.has_failed = False
            if self.session is None:
                choice = self.dispatcher.chooser.choice_of(choice.instance, RETRY)
            self._take(choice)
            return True
        try:
            self.ticket = self.dispatcher.wait(self)
        except (BodyTooLarge, ServiceUnavailable):
            self.strategy_request = before
            if is_counted:
                retries.release()
            return False
        self._resume = resume
        self._count_retry()
        lease, self.lease = self.lease, None
        if lease is not None:
            self._return(lease)
        return True

    def try_reach(self, resume: Resume) -> bool:
        """Lease an instance for a request that has not reached the chosen one in time. False if that is gone.

        Without another one the request stays with the chosen instance, which may only be busy, until a probe tells.
        """
        instance = self.chosen.instance
        if self.is_repeatable and self.try_reassign(resume, is_counted=False):
            return True
        if instance.state not in SERVING or not self._dispatchers.registry.has(instance):
            return False
        self.has_failed = False
        self._count_retry()
        return True

    def try_continue(self, resume: Resume, loss: Loss) -> bool:
        """Lease another instance, or wait for one, to continue an answer that has begun. False if there is none."""
        instance = self.chosen.instance
        self.complete_at = monotonic()  # the time of the answer so far does not count as a wait
        if loss is Loss.UNANSWERED:
            is_placed = self.try_reach(resume)
        else:
            was_lost = loss is not Loss.REFUSED
            is_placed = self.is_repeatable and self.try_reassign(resume, is_counted=False, was_lost=was_lost)
        if not is_placed:
            return False
        if loss is Loss.UNREACHABLE:
            self._dispatchers.report_unreachable(instance)
        elif loss is not Loss.REFUSED:
            self._dispatchers.recovery.on_failed(instance)
            self._dispatchers.suspect(instance)
        return True

    def _count_retry(self) -> None:
        self.num_retries += 1
        self.metrics.retries += 1

    def _take(self, choice: Choice) -> None:
        if self.model is not None:
            self.model.begin(choice.instance.name)
        before, self.lease = self.lease, choice.instance.lease(self.num_body_bytes)
        self.choice = choice
        choice.tally.count += 1
        if before is not None:
            self._return(before)
        if self.session is None:
            self.expected = self.dispatcher.chooser.on_sent(self, choice.instance)
        elif choice.reason is SESSION_FAILOVER:
            self._dispatchers.moved_sessions.note(self.session, choice.instance)

    def release(self) -> None:
        """Give back the lease or the place in the queue. May be called again."""
        self._resume = None  # breaks a cycle through the invocation, which only the garbage collector would free
        if self.ticket is not None:
            self.dispatcher.leave(self.ticket)
            self.ticket = None
        lease, self.lease = self.lease, None
        if lease is not None:
            self._return(lease)
        if self._caller_lease is not None:
            self._caller_lease.release()

    def _return(self, lease: Lease) -> None:
        if self.model is not None:
            self.model.end(lease.instance.name)
        lease.release()
        self.dispatcher.on_free(lease.instance)

    @property
    def wait_ends_at(self) -> float:
        """When the wait fails.

        This time is fixed, because an instance that becomes ready may take other requests first.
        """
        assert self.ticket is not None
        return self.ticket.deadline

    # Results of the chosen instance

    @property
    def chosen(self) -> Choice:
        """The choice of the instance that has the request."""
        assert self.choice is not None
        return self.choice

    @property
    def is_repeatable(self) -> bool:
        """True if another instance can get the request without its work being done twice.

        A turn is recorded under its invocation id, so an instance that shares the journal answers from there.
        """
        session = self.session
        if session is None:
            return True
        return self._dispatchers.settings.sessions.are_journaled and not self.dispatcher.chooser.is_bound(session)

    @property
    def marking_line(self) -> bytes:
        uses_session = self.session is not None or self.opens_session
        return marking_line(self._dispatchers.settings, uses_session=uses_session)

    def note_failure(self, *, is_dead: bool) -> None:
        """Count a failure of the chosen instance. is_dead: it may be gone or without a worker, so it is probed."""
        instance = self.chosen.instance
        self.has_failed = True
        self._dispatchers.recovery.on_failed(instance)
        if is_dead:
            self._dispatchers.suspect(instance)

    def note_timeout(self, time_limit_s: float) -> None:
        """Count a failure of the chosen instance, unless the wait for it took more than half of the limit."""
        if 2 * self.waited_s > time_limit_s:
            self.has_failed = True
        else:
            self.note_failure(is_dead=False)

    def note_first_piece(self) -> None:
        """End the trial of a half-open breaker, if the request is one: its answer has begun, and may take long."""
        lease = self.lease
        if lease is not None and lease.try_end_trial():
            self.dispatcher.on_free(lease.instance)

    def note_answer(self) -> None:
        """Reset the chosen instance's count of successive failures, unless it has failed this request."""
        choice = self.choice
        if choice is not None and not self.has_failed:
            self._dispatchers.recovery.on_answered(choice.instance)

    # Sessions

    @property
    def own_lines(self) -> bytes:
        """All header lines that depend on the caller and on the chosen instance."""
        return self.caller_lines + self.sequence_lines + self.marking_line + self.body_lines

    @property
    def caller(self) -> str:
        """Return the caller for which the request is counted; "" if callers are not limited."""
        return "" if self._caller_lease is None else self._caller_lease.caller

    @property
    def caller_lines(self) -> bytes:
        """The header lines about a limited caller."""
        lease = self._caller_lease
        return b"" if lease is None else lease.header_lines(self.head, opens_session=self.opens_session)

    @property
    def sequence_lines(self) -> bytes:
        """The header lines of the session, for an instance that batches sequences."""
        instance = self.chosen.instance
        if not instance.batches_sequences:
            return b""
        if self.session is None and self.opens_session:
            return self._dispatchers.sequences.begin(instance, self.head.principal)
        return b"" if self.session is None else self._dispatchers.sequences.go_on(self.session)

    def find_session_refusal(self, head: AnswerHead) -> CallerLimited | None:
        """Return the error if an instance refused to open a session because of the caller's limit."""
        is_refusal = head.status >= 400 and head.find(ERROR_CODE) == SESSION_LIMIT_REACHED
        return self._caller_lease.refuse_session() if is_refusal and self._caller_lease is not None else None

    def note_session(self, endpoint: Endpoint, head: AnswerHead) -> None:
        """Note that an answer has opened, continued, closed or not found a session."""
        session = self.session
        is_named = NEW_SESSION_ID in head.layout.places  # also of a session's stored answer
        if (is_named or self.opens_session) and head.status < 300:
            opened = head.find(NEW_SESSION_ID if is_named else SESSION_ID)
            if opened:
                self._note_opened(endpoint, opened)
        if session is None:
            return
        if head.status < 300 and CLOSED_SESSION_ID in head.layout.places:
            self._dispatchers.sessions.on_closed(endpoint, self.head.principal, session)
            self._dispatchers.moved_sessions.on_closed(session, self.chosen.instance)
            if self._caller_lease is not None:
                self._caller_lease.on_closed((endpoint.name, session.text), session.expires_at)
        elif self._caller_lease is not None:
            is_lost = head.status >= 400 and head.find(ERROR_CODE) in SESSION_ENDED
            self._caller_lease.on_turn((endpoint.name, session.text), is_lost=is_lost)

    def _note_opened(self, endpoint: Endpoint, raw: bytes) -> None:
        session = self._dispatchers.sessions.on_opened(endpoint, self.head.principal, raw, self.chosen.instance)
        expires_at = read_expiry(raw)
        if session is not None and expires_at is not None and self._caller_lease is not None:
            last_at = session.expires_at or expires_at
            self._caller_lease.on_opened((endpoint.name, session.text), expires_at=expires_at, last_at=last_at)

    # DispatchRequest: called by the dispatcher

    def go(self, choice: Choice) -> None:
        resume = self._resume
        assert resume is not None
        self.ticket = self._resume = None
        self.has_failed = False
        self.waited_s = monotonic() - self.complete_at
        self.metrics.queue_latency.observe(self.waited_s)
        self._take(choice)
        resume(None)

    def route_again(self) -> None:
        resume = self._resume
        assert resume is not None
        self.ticket = self._resume = None
        try:
            self.assign(resume)
        except ApiError as error:
            resume(error)
        else:
            resume(None)
