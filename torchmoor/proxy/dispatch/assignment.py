"""The instance of one request: chosen and leased, waited for, given up for another.

Holds one lease of the chosen instance, or one place in the queue, or neither; `let_go` gives back what is held.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from time import monotonic

from torchmoor.errors import ApiError, ServiceUnavailable
from torchmoor.metrics.invocations import InvocationMetrics
from torchmoor.proxy.api.validation import INVOCATION_ID
from torchmoor.proxy.dispatch.choice import Choice
from torchmoor.proxy.dispatch.dispatcher import Dispatcher
from torchmoor.proxy.dispatch.gateway import Gateway
from torchmoor.proxy.dispatch.routing_request import RoutingRequest
from torchmoor.proxy.http.call import WAITING, Waiter, Waiting
from torchmoor.proxy.http.exchange import MAX_WAITING_CHUNKED_BYTES
from torchmoor.proxy.http.message import Reply, Request
from torchmoor.proxy.instances.instance import Instance, Lease
from torchmoor.proxy.routing.kv_aware import Expectation
from torchmoor.proxy.routing.strategy import FIRST_ATTEMPT, RouteRequest
from torchmoor.proxy.routing.waiting import Ticket
from torchmoor.wire.session_ids import SessionId

RETRY = "retry"  # why an instance was chosen after another


class Assignment:
    """What an Invocation is made from; not a part of it, because another object a request costs more than a choice.

    expected: what KV_AWARE believes the chosen instance to hold of the prompt. has_failed: it has failed the request.
    waited_s: until an instance was free. num_retries: after the first.
    """

    gateway: Gateway
    request: Request
    dispatcher: Dispatcher
    session: SessionId | None
    metrics: InvocationMetrics
    opens_session = False
    target_model: str | None = None
    route_request: RouteRequest = FIRST_ATTEMPT
    choice: Choice | None = None
    expected: Expectation | None = None
    has_failed = False
    waited_s = 0.0
    num_retries = 0
    _waiter: Waiter | None = None
    _ticket: Ticket[RoutingRequest] | None = None
    _lease: Lease | None = None

    def fail(self, error: ApiError) -> Reply:
        """The error's reply, counted."""
        raise NotImplementedError

    # Choosing

    def exclude(self, instances: frozenset[str]) -> None:
        """Never send the request to these."""
        self.route_request = replace(self.route_request, excluded=self.route_request.excluded | instances)

    def assign(self, waiter: Waiter) -> Instance | Reply | Waiting:
        """Choose and lease an instance; or wait for one, which the waiter will be told of."""
        self._waiter = waiter
        choice = self.dispatcher.choose(self)
        if choice is not None:
            self._take(choice)
            return choice.instance
        try:
            self._ticket = self.dispatcher.wait(self)
        except ServiceUnavailable as error:
            return self.fail(error)
        return WAITING

    def find_other(self, *, is_counted: bool) -> Instance | Waiting | None:
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
        if before is not None:
            self._release(before)
        return WAITING

    def _note_retry(self) -> None:
        self.has_failed = False
        self.num_retries += 1
        self.metrics.retries += 1

    def _take(self, choice: Choice) -> None:
        before, self._lease = self._lease, choice.instance.lease()
        self.choice = choice
        choice.tally.count += 1
        if before is not None:
            self._release(before)
        if self.session is None:
            self.expected = self.dispatcher.on_sent(self, choice.instance)

    def let_go(self) -> None:
        """Give back what is held. May be called again."""
        self._waiter = None  # else the exchange and its call are a cycle, which only the collector could free
        if self._ticket is not None:
            self.dispatcher.leave(self._ticket)
            self._ticket = None
        lease, self._lease = self._lease, None
        if lease is not None:
            self._release(lease)

    def _release(self, lease: Lease) -> None:
        """Give a lease back; what waits may go on."""
        lease.release()
        if self.dispatcher.queue is not None:
            self.dispatcher.on_free(lease.instance)

    # What the chosen instance does

    @property
    def is_repeatable(self) -> bool:
        """True if sending the request a second time, elsewhere, cannot do its work twice.

        A turn is recorded under its invocation id, so an instance that shares the journal answers from there.
        """
        session = self.session
        return session is None or (self.gateway.settings.sessions.are_journaled and not session.is_foreign)

    def note_failure(self, *, is_dead: bool) -> None:
        """The chosen instance has failed this request. is_dead: perhaps it has no worker any more, or is gone."""
        assert self.choice is not None
        instance = self.choice.instance
        self.has_failed = True
        self.gateway.recovery.on_failed(instance)
        if is_dead:
            self.gateway.suspect(instance)

    # RoutingRequest: what its dispatcher asks and says while it waits

    @property
    def wait_ends_at(self) -> float:
        """When a wait for an instance has been too long; of one that has begun as it was then.

        A request that is held stays so when an instance becomes ready and takes others first.
        """
        if self._ticket is not None:
            return self._ticket.deadline
        return self.request.received_at + self.dispatcher.max_wait_s

    @property
    def principal(self) -> bytes:
        """Who asks, as far as it is known; for taking turns while waiting."""
        if self.request.principal:
            return self.request.principal.encode()
        credential = self.request.find(b"authorization") or b""
        return credential.partition(b"Credential=")[2].partition(b"/")[0] or blake2b(credential, digest_size=8).digest()

    @property
    def opening(self) -> bytes:
        """The client's invocation id, as its own."""
        invocation_id = self.request.find(INVOCATION_ID)
        return b"%b %b" % (self.request.principal.encode(), invocation_id) if invocation_id else b""

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
        self._waiter.resume(self.assign(self._waiter))
