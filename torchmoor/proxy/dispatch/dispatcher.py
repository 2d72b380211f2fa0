"""Dispatcher of one variant: its requests go to an instance, or wait (routing/waiting.py) until one can take them.

With late binding an instance gets at most its capacity of running requests. If instances are started on demand, a
request that finds none waits for the start. Whenever a request ends or an instance becomes ready, `on_free` sends
waiting requests on; there is no task and no polling.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from random import Random
from time import monotonic

from torchmoor.config.recovery import RecoverySettings
from torchmoor.config.routing import LateBindingSettings
from torchmoor.config.scaling import ScalingSettings
from torchmoor.errors import BodyTooLargeForInstance, ServiceUnavailable
from torchmoor.metrics.invocations import InvocationMetrics
from torchmoor.proxy.dispatch import unavailable
from torchmoor.proxy.dispatch.chooser import Choice, Chooser, DispatchRequest
from torchmoor.proxy.dispatch.retry_budget import RetryBudget
from torchmoor.proxy.http.message import Request
from torchmoor.proxy.instances.endpoint import Variant
from torchmoor.proxy.instances.instance import SERVING, Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry
from torchmoor.proxy.routing.waiting import Ticket, WaitingBytes, WaitingQueue

PROBE_S = 3.0  # until the health check has found that an instance that lost a request is gone


class Dispatcher:
    """Finds instances for the requests of one variant: at once by the chooser, or after a wait in the queue.

    path: of the variant's model at its instances. on_held: called when a request waits for an instance to be started.
    successor: takes its requests, once the endpoint was updated.
    """

    def __init__(
        self,
        registry: Registry,
        variant: Variant,
        late_binding: LateBindingSettings | None,
        waiting_bytes: WaitingBytes,
        rng: Random,
        *,
        recovery: RecoverySettings,
        are_journaled: bool,
        on_held: Callable[[], None],
    ) -> None:
        self.variant = variant
        self.path = b"/predictions/" + variant.settings.model.encode()
        self.metrics = InvocationMetrics(variant.endpoint, variant.name)
        self.chooser = Chooser(
            variant, self.metrics, rng, binds_late=late_binding is not None, are_journaled=are_journaled
        )
        max_waiting = 0 if late_binding is None else late_binding.max_waiting
        self._queue: WaitingQueue[DispatchRequest] = WaitingQueue(max_waiting=max_waiting, total=waiting_bytes)
        self._on_held = on_held
        self._late_binding = late_binding
        self._place = (variant.endpoint, variant.generation, variant.name)
        self._registry = registry
        self.successor: Dispatcher | None = None
        self.retries = RetryBudget(fraction=recovery.retry_fraction, burst=recovery.retry_burst)
        variant.on_starts_ended = self._route_all_again
        registry.listen(self._on_change)

    def hand_over(self, successor: Dispatcher) -> None:
        """Give the waiting requests, and all others without an instance, to the successor."""
        self.successor = successor
        self._route_all_again()

    def stop(self) -> None:
        """Refuse the waiting requests, and stop reacting to changes of instances: the endpoint is gone."""
        self._registry.unlisten(self._on_change)
        self._route_all_again()

    def _route_all_again(self) -> None:
        self._route_again(lambda ticket: True)

    def _route_again(self, is_meant: Callable[[Ticket[DispatchRequest]], bool]) -> None:
        for ticket in self._queue.take_those(is_meant):
            ticket.owner.route_again()

    @property
    def _scaling(self) -> ScalingSettings | None:
        return self.variant.settings.scaling

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    @property
    def waiting_turns(self) -> dict[str, int]:
        """Return the number of waiting turns of sessions, by the instance that they wait for."""
        return self._queue.turns()

    @property
    def max_wait_s(self) -> float:
        """Return how long a new request may wait for an instance."""
        if self._scaling is not None and self._is_at_zero:
            return self._scaling.max_hold_s
        return 0.0 if self._late_binding is None else self._late_binding.max_wait_s

    @property
    def _is_at_zero(self) -> bool:
        return not self._names_up()

    def _names_up(self) -> frozenset[str]:
        """Return the instances that are up, also those that recover from failures."""
        return frozenset(each.name for each in self.variant.pool.members if each.state is InstanceState.READY)

    def wait(self, request: DispatchRequest) -> Ticket[DispatchRequest]:
        """Return a place in the queue.

        Raises BodyTooLargeForInstance if no instance can ever hold the body, and ServiceUnavailable if the queue is
        full or there is nothing to wait for.
        """
        holder = self._find_holder(request)
        too_large = self._limit_body(request, holder)
        if too_large is not None and request.num_body_bytes // request.body_weight > too_large.limit:
            raise too_large
        if request.session is not None and holder is None and self.chooser.is_bound(request.session):
            raise self._count(ServiceUnavailable(unavailable.SESSION_NOT_READY))
        deadline = request.complete_at + self.max_wait_s
        is_held = holder is None and self._may_hold(request)
        if is_held:
            up = self._names_up()
            request.exclude_only(request.strategy_request.excluded & up)
            if up:  # or seems so
                deadline = monotonic() + PROBE_S
        else:
            self._check_can_wait(request, holder)
        if self._late_binding is None:
            assert self._scaling is not None  # so is_held
            self._queue.max_waiting = self._scaling.max_held
        ticket: Ticket[DispatchRequest] = Ticket(
            request,
            deadline=deadline,
            num_bytes=request.num_body_bytes // request.body_weight,
            principal=_caller_of(request.head),
            home=None if holder is None else holder.name,
        )
        if not self._queue.try_add(ticket):
            raise self._count(ServiceUnavailable(unavailable.QUEUE_FULL))
        if is_held:
            self._on_held()
        return ticket

    def _find_holder(self, request: DispatchRequest) -> Instance | None:
        """Return the instance that holds a request's session, if it can be sent there."""
        if request.session is None:
            return None
        return self.chooser.find_holder(request.session, request.strategy_request.excluded)

    def _check_can_wait(self, request: DispatchRequest, holder: Instance | None) -> None:
        """Raise ServiceUnavailable if no instance that runs now will take the request. holder: its session's."""
        ready = [instance.name for instance in self.variant.pool.members if instance.is_ready]
        if holder is None and not ready:
            raise self._count(unavailable.none_ready())
        is_excluded = holder is None and request.strategy_request.excluded.issuperset(ready)
        if self._late_binding is None or is_excluded:
            raise self._count(ServiceUnavailable(unavailable.ALL_BUSY))

    def _may_hold(self, request: DispatchRequest) -> bool:
        """Return whether a request that no instance can take waits for one to be started.

        A request that was lost with its instance waits for the replacement. Until a probe finds that the instance is
        gone, it still seems ready.
        """
        excluded = request.strategy_request.excluded
        if excluded and not request.was_lost:
            return False
        return self.variant.may_start and self._names_up() <= excluded

    def limit_body(self, request: DispatchRequest) -> BodyTooLargeForInstance | None:
        """Return the error of a body that no instance can hold, with the limit; None without an instance."""
        return self._limit_body(request, self._find_holder(request))

    def _limit_body(self, request: DispatchRequest, holder: Instance | None) -> BodyTooLargeForInstance | None:
        candidates = self.variant.pool.members if holder is None else (holder,)
        most = max((each.max_body_bytes for each in candidates), default=None)
        return None if most is None else BodyTooLargeForInstance(most, request.body_weight)

    def wait_over(self, request: DispatchRequest) -> ServiceUnavailable:
        """Return the answer to a request that has waited too long."""
        if request.strategy_request.excluded and self._may_hold(request):
            return self._count(ServiceUnavailable(unavailable.INSTANCE_LOST))
        if self._scaling is None or not self._is_at_zero:
            return self._count(ServiceUnavailable(unavailable.NONE_FREE_IN_TIME))
        if not self.variant.may_start:
            return self._count(unavailable.none_ready())
        return self._count(unavailable.none_started_in_time(self.variant))

    def _count(self, error: ServiceUnavailable) -> ServiceUnavailable:
        self.metrics.no_capacity += 1
        return error

    def leave(self, ticket: Ticket[DispatchRequest]) -> None:
        self._queue.remove(ticket)

    def on_free(self, instance: Instance) -> None:
        """Send waiting requests to an instance that may have become free."""
        if self._queue.num_waiting:
            self._serve_turns(instance)
            self._serve_others()

    def _serve_turns(self, instance: Instance) -> None:
        while instance.outstanding < instance.capacity and instance.state in SERVING:
            turns = self._queue.turns_at(instance.name)
            ticket = next((each for each in turns if instance.has_body_room(each.owner.num_body_bytes)), None)
            if ticket is None:
                break
            self._queue.take(ticket)
            assert ticket.owner.session is not None  # only turns wait for one instance
            ticket.owner.go(self.chooser.choice_for_turn(instance, ticket.owner.session))

    def _serve_others(self) -> None:
        while self.variant.pool.open_instances and (found := self._find_next()) is not None:
            ticket, choice = found
            self._queue.take(ticket)
            ticket.owner.go(choice)

    def _find_next(self) -> tuple[Ticket[DispatchRequest], Choice] | None:
        """Return the next request that an instance can take now, and the instance."""
        for ticket in self._queue.others:
            choice = self.chooser.choose(ticket.owner)
            if choice is not None:
                return ticket, choice
        return None

    def _on_change(self, instance: Instance) -> None:
        """React to an instance that came, went or changed its state."""
        if (instance.endpoint, instance.generation, instance.variant) != self._place:
            return
        is_known = self.variant.pool.find(instance.name) is instance
        if is_known and instance.state in SERVING:
            self.on_free(instance)
            return
        self.chooser.strategy.forget(instance.name)
        if not is_known:
            self.chooser.forget(instance)
        self._route_again(lambda ticket: ticket.home == instance.name)
        self._route_again(lambda ticket: _was_lost_at(ticket.owner, instance))


def _was_lost_at(request: DispatchRequest, instance: Instance) -> bool:
    return request.was_lost and instance.name in request.strategy_request.excluded


def _caller_of(request: Request) -> bytes:
    """Return the caller, as far as it is known; callers take turns in the queue."""
    if request.principal:
        return request.principal.encode()
    credential = request.find(b"authorization") or b""
    return credential.partition(b"Credential=")[2].partition(b"/")[0] or blake2b(credential, digest_size=8).digest()
