"""Holds the requests of one variant that no instance can take yet, and lets them go when one can.

With late binding an instance gets at most its capacity of running requests. Where instances are started as they are
needed, a request that finds none is held until there is one. Whenever one ends, or an instance becomes ready, what
waits goes on (`on_free`): there is no task, and nothing is looked at again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from time import monotonic

from torchmoor.config.health import RecoverySettings
from torchmoor.config.routing import LateBindingSettings
from torchmoor.errors import ServiceUnavailable
from torchmoor.proxy.dispatch.choice import Choice
from torchmoor.proxy.dispatch.chooser import SERVING, SESSION, SESSION_FAILOVER, Chooser
from torchmoor.proxy.dispatch.retry_budget import RetryBudget
from torchmoor.proxy.dispatch.routing_request import Applicant
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry, Variant
from torchmoor.proxy.routing.waiting import Ticket, WaitingBytes, WaitingQueue

NONE_READY_S = 5  # in Retry-After: an instance that is started again takes some seconds; one that is busy, one


class Dispatcher(Chooser):
    """One variant's queue and budget of retries.

    on_held: called when a request waits for an instance to be started.
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
    ) -> None:
        super().__init__(variant, rng, binds_late=late_binding is not None, are_journaled=are_journaled)
        self.queue: WaitingQueue[Applicant] | None = None
        self.on_held: Callable[[], None] = _nobody
        self._late_binding = late_binding
        self._scaling = variant.settings.scaling
        if late_binding is not None:
            self.queue = WaitingQueue(max_waiting=late_binding.max_waiting, total=waiting_bytes)
        elif self._scaling is not None:
            self.queue = WaitingQueue(max_waiting=self._scaling.max_held, total=waiting_bytes)
        self.retries = RetryBudget(fraction=recovery.retry_fraction, burst=recovery.retry_burst)
        registry.listen(self._on_change)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an instance."""
        return 0 if self.queue is None else self.queue.num_waiting

    @property
    def waiting_turns(self) -> dict[str, int]:
        """Of those the turns of sessions, by the instance that they wait for."""
        return {} if self.queue is None else self.queue.turns()

    @property
    def max_wait_s(self) -> float:
        """How long a request that comes now may wait for an instance."""
        if self._scaling is not None and self._is_at_zero:
            return self._scaling.max_hold_s
        return 0.0 if self._late_binding is None else self._late_binding.max_wait_s

    @property
    def _is_at_zero(self) -> bool:
        return not any(instance.state is InstanceState.READY for instance in self.variant.pool.members)

    def wait(self, applicant: Applicant) -> Ticket[Applicant]:
        """A place in the queue. Raises ServiceUnavailable if there is none, or nothing to wait for."""
        session, excluded = applicant.session, applicant.route_request.excluded
        holder = None if session is None else self.find_holder(session, excluded)
        ready = [instance.name for instance in self.variant.pool.members if instance.is_ready]
        if session is not None and session.is_foreign and holder is None:
            raise self._refusal("The session's instance is not ready. Try again later, or open another session.")
        is_held = holder is None and not excluded and self._scaling is not None and self._is_at_zero
        if not ready and holder is None and not is_held:
            raise self._refusal("No instance of the endpoint is ready. Try again later.", retry_after_s=NONE_READY_S)
        if not is_held and (self._late_binding is None or (holder is None and excluded.issuperset(ready))):
            raise self._refusal("All instances of the endpoint are busy. Try again later.")
        assert self.queue is not None
        ticket: Ticket[Applicant] = Ticket(
            applicant,
            deadline=applicant.wait_ends_at,
            num_bytes=applicant.num_waiting_bytes,
            principal=applicant.principal,
            home=None if holder is None else holder.name,
        )
        if not self.queue.try_add(ticket):
            raise self._refusal("Too many requests wait for an instance of the endpoint. Try again later.")
        if is_held:
            self.on_held()
        return ticket

    def wait_over(self) -> ServiceUnavailable:
        """What a request is told that has waited in vain."""
        if self._scaling is None or not self._is_at_zero:
            return self._refusal("No instance of the endpoint was free in time. Try again later.")
        started = [i.started_at for i in self.variant.pool.members if i.state is InstanceState.STARTING]
        times = [at for at in started if at is not None]
        if not times:
            return self._refusal("No instance of the endpoint could be started in time. Try again later.", NONE_READY_S)
        took_s, last_s = monotonic() - min(times), self.variant.last_start_s
        usual = "" if last_s is None else f"; the last start took {last_s:.0f} s"
        left_s = NONE_READY_S if last_s is None or last_s < took_s else 1 + int(last_s - took_s)
        return self._refusal(
            f"An instance of the endpoint is being started, for {took_s:.0f} s until now{usual}. Try again later.",
            left_s,
        )

    def _refusal(self, message: str, retry_after_s: int = 1) -> ServiceUnavailable:
        self.metrics.no_capacity += 1
        return ServiceUnavailable(message, retry_after_s=retry_after_s)

    def leave(self, ticket: Ticket[Applicant]) -> None:
        """A request waits no longer."""
        assert self.queue is not None
        self.queue.remove(ticket)

    def on_free(self, instance: Instance) -> None:
        """An instance can take more, perhaps: let what waits go there."""
        queue = self.queue
        if queue is not None and queue.num_waiting:
            self._serve_turns(queue, instance)
            self._serve_others(queue)

    def _serve_turns(self, queue: WaitingQueue[Applicant], instance: Instance) -> None:
        while instance.outstanding < instance.capacity and instance.state in SERVING:
            ticket = queue.pop_turn(instance.name)
            if ticket is None:
                break
            reason = SESSION if _home_of(ticket.owner) == instance.name else SESSION_FAILOVER
            ticket.owner.go(self.choice_of(instance, reason))

    def _serve_others(self, queue: WaitingQueue[Applicant]) -> None:
        while self.variant.pool.open_instances:
            chosen: list[Choice] = []
            ticket = queue.pop_other(lambda ticket: self._try_choose(ticket.owner, chosen))  # noqa: B023
            if ticket is None:
                break
            ticket.owner.go(chosen[0])

    def _try_choose(self, applicant: Applicant, chosen: list[Choice]) -> bool:
        choice = self.choose(applicant)
        if choice is not None:
            chosen.append(choice)
        return choice is not None

    def _on_change(self, instance: Instance) -> None:
        """An instance came, went or changed its state."""
        if (instance.endpoint, instance.variant) != (self.variant.endpoint, self.variant.name):
            return
        is_known = self.variant.pool.find(instance.name) is instance
        if is_known and instance.state in SERVING:
            self.on_free(instance)
            return
        self.forget_held(instance)
        if not is_known:
            self.forget(instance)
        if self.queue is not None:
            for ticket in self.queue.take_turns(instance.name):
                ticket.owner.route_again()


def _nobody() -> None:
    """Nobody starts instances here."""


def _home_of(applicant: Applicant) -> str | None:
    return None if applicant.session is None else applicant.session.instance
