"""Chooses instances for the requests of one variant, and holds those that no instance can take yet.

With late binding an instance gets at most its capacity of running requests. Where instances are started as they are
needed, a request that finds none is held until there is one. Whenever one ends, or an instance becomes ready, what
waits goes on (`on_free`): there is no task, and nothing is looked at again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from time import monotonic
from typing import Protocol

from torchmoor.api.retry_budget import RetryBudget
from torchmoor.errors import ServiceUnavailable
from torchmoor.fleet.instance import Instance, InstanceState
from torchmoor.fleet.registry import Registry, Variant
from torchmoor.metrics import InvocationMetrics, Tally
from torchmoor.routing.kv_aware import Expectation, KvAware
from torchmoor.routing.least_outstanding import LeastOutstanding
from torchmoor.routing.prefix_aware import PrefixAware
from torchmoor.routing.random import RandomChoice
from torchmoor.routing.sessions import SessionId, find_roomiest, place_of, rendezvous
from torchmoor.routing.strategy import RouteRequest, Strategy
from torchmoor.routing.waiting import Ticket, WaitingBytes, WaitingQueue
from torchmoor.settings import LateBindingSettings, RecoverySettings, VariantSettings

SESSION = "session"
SESSION_FAILOVER = "session-failover"
SESSION_ROOM = "session-room"

_SERVING = frozenset((InstanceState.READY, InstanceState.DRAINING))
MAX_REMEMBERED_OPENINGS = 4096  # a client sends one again within seconds
NONE_READY_S = 5  # in Retry-After: an instance that is started again takes some seconds; one that is busy, one


class Choice:
    """An instance, why it was chosen, and the header lines that both mean; kept, because they are made often.

    request_line: the end of the first line, and the instance's own name. answer_lines: say where an answer comes from;
    runtime_lines: with the variant, for the runtime API. Both begin with the end of the line before them, which is the
    request's id. tally: how often its reason was one, over all instances of the variant.
    """

    __slots__ = ("instance", "reason", "tally", "request_line", "answer_lines", "runtime_lines")

    def __init__(self, instance: Instance, reason: str, variant: bytes, tally: Tally) -> None:
        self.instance = instance
        self.reason = reason
        self.tally = tally
        self.request_line = b" HTTP/1.1\r\nhost: %b:%d\r\n" % (instance.host.encode(), instance.port)
        self.answer_lines = b"\r\nx-torchmoor-instance: %b\r\nx-amzn-sagemaker-invoked-routing-reason: %b\r\n" % (
            instance.name.encode(),
            reason.encode(),
        )
        self.runtime_lines = b"\r\nx-amzn-invoked-production-variant: %b%b" % (variant, self.answer_lines)


class Applicant(Protocol):
    """A request, as its dispatcher sees it.

    opens_session: it will open one. target_model: which of many it is for. wait_ends_at: in monotonic seconds.
    principal: who asks.
    """

    session: SessionId | None
    opens_session: bool
    target_model: str | None
    route_request: RouteRequest

    @property
    def wait_ends_at(self) -> float:
        """When the wait has been too long."""
        ...

    @property
    def principal(self) -> bytes:
        """Whose request it is, for taking turns."""
        ...

    @property
    def opening(self) -> bytes:
        """Of one that opens a session: the same when its client sends it again; b"" if that cannot be known."""
        ...

    @property
    def body_bytes(self) -> int:
        """The declared length of its body; 0 if it has none."""
        ...

    @property
    def num_waiting_bytes(self) -> int:
        """The most bytes of its body that are held while it waits."""
        ...

    def go(self, choice: Choice) -> None:
        """The wait is over: this instance is to be taken."""
        ...

    def route_again(self) -> None:
        """The instance that it waited for is gone; its ticket is void."""
        ...


class Others(Protocol):
    """The other proxy processes of this host, as one variant's dispatcher sees them."""

    def refresh(self) -> None:
        """Take over what they have counted."""
        ...

    def comes_before(self, deadline: float) -> bool:
        """True if a request that waits there, and could go anywhere, is due sooner."""
        ...

    def has_turn_for(self, instance: Instance) -> bool:
        """True if a session's turn waits there for this instance."""
        ...

    def tell_waiting(self, deadline: float | None, home: str | None, num_turns: int) -> None:
        """Tell them when the next request that waits here is due, and how many turns wait for the instance `home`."""
        ...

    def pass_on(self, instance: Instance | None) -> None:
        """There is room that nobody here shall have, at this instance or at any: wake whoever shall."""
        ...


class Dispatcher:
    """One variant's strategy, queue and metrics.

    others: None where this process is the only one. on_held: called when a request waits for an instance to be started.
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
        self.variant = variant
        self.name = variant.name.encode()
        self.path = b"/predictions/" + variant.settings.model.encode()
        self.metrics = InvocationMetrics(variant.endpoint, variant.name)
        self.strategy = make_strategy(variant.settings, rng)
        self.num_prefix_bytes = self.strategy.num_prefix_bytes
        self.queue: WaitingQueue[Applicant] | None = None
        self.on_held: Callable[[], None] = _nobody
        self._late_binding = late_binding
        self._scaling = variant.settings.scaling
        if late_binding is not None:
            self.queue = WaitingQueue(max_waiting=late_binding.max_waiting, total=waiting_bytes)
        elif self._scaling is not None:
            self.queue = WaitingQueue(max_waiting=self._scaling.max_held, total=waiting_bytes)
        self.retries = RetryBudget(fraction=recovery.retry_fraction, burst=recovery.retry_burst)
        self.others: Others | None = None
        self._registry = registry
        self._are_journaled = are_journaled
        self._kv = self.strategy if isinstance(self.strategy, KvAware) else None
        self._choices: dict[tuple[str, str], Choice] = {}
        self._openings: dict[bytes, str] = {}  # which instance was sent them, the oldest first
        registry.listen(self._on_change)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an instance."""
        return 0 if self.queue is None else self.queue.num_waiting

    @property
    def max_wait_s(self) -> float:
        """How long a request that comes now may wait for an instance."""
        if self._scaling is not None and self._is_at_zero:
            return self._scaling.max_hold_s
        return 0.0 if self._late_binding is None else self._late_binding.max_wait_s

    @property
    def _is_at_zero(self) -> bool:
        return not any(instance.state is InstanceState.READY for instance in self.variant.pool.members)

    # Choosing

    def choose(self, applicant: Applicant) -> Choice | None:
        """The instance for a request, or None if none can take it now.

        A session's requests go to the instance that opened it; while that one does not take them, to the one that
        all proxies agree on. A request for one of many models goes by what instances hold.
        """
        request, pool, others = applicant.route_request, self.variant.pool, self.others
        if others is not None and (applicant.session is None or self.queue is not None):
            others.refresh()
        if applicant.session is not None:
            return self._choose_for_session(applicant.session, request.excluded)
        if others is not None and self._late_binding is not None and others.comes_before(applicant.wait_ends_at):
            return None
        if applicant.opens_session:
            self.variant.opens_sessions = True
        models = self.variant.models
        if models is not None and applicant.target_model is not None:
            placed = models.choose(applicant.target_model, pool, request.excluded)
            return None if placed is None else self.choice_of(placed.instance, placed.reason)
        if applicant.opens_session:
            again = self._find_opener(applicant)
            if again is not None:
                return self.choice_of(again, SESSION)
            roomiest = find_roomiest(pool, request.excluded)
            if roomiest is not None:
                return self.choice_of(roomiest, SESSION_ROOM)
        pick = self.strategy.choose(request, pool)
        return None if pick is None else self.choice_of(pick.instance, pick.reason)

    def _choose_for_session(self, session: SessionId, excluded: frozenset[str]) -> Choice | None:
        home = self._choices.get((session.instance, SESSION))
        if home is not None and self._late_binding is None and not excluded:
            instance = home.instance
            if instance.is_ready and instance.share == 1.0:  # as nearly always; the rest says the same, for all cases
                return home
        return self._choose_holder(session, excluded)

    def _choose_holder(self, session: SessionId, excluded: frozenset[str]) -> Choice | None:
        instance = self._find_holder(session, excluded)
        if instance is None or (self._late_binding is not None and instance.outstanding >= instance.capacity):
            return None
        return self.choice_of(instance, SESSION if instance.name == session.instance else SESSION_FAILOVER)

    def _find_holder(self, session: SessionId, excluded: frozenset[str]) -> Instance | None:
        """The instance that serves a session, busy or not; None only if there is none that could."""
        home = self.variant.pool.find(session.instance)
        if home is not None and (home.state not in _SERVING or home.name in excluded):
            home = None
        if session.is_foreign or (home is not None and self._keeps(home, session)):
            return home
        others = (i for i in self.variant.pool.members if i is not home and i.name not in excluded)
        return rendezvous(session.text, others) or home

    def _keeps(self, home: Instance, session: SessionId) -> bool:
        """True if a session is served by its own instance although others might.

        With a journal any instance can, so one that drains or fails hands its sessions over, and one that comes back
        takes them back by and by. Without, nobody else knows them.
        """
        if not self._are_journaled:
            return True
        return home.is_ready and (home.share == 1.0 or place_of(session.text) < home.share)

    def _find_opener(self, applicant: Applicant) -> Instance | None:
        """The instance that was sent this very opening before: it answers with the session that it opened then."""
        name = self._openings.get(applicant.opening)
        instance = None if name is None else self.variant.pool.find(name)
        if instance is None or not instance.is_ready or instance.name in applicant.route_request.excluded:
            return None
        return instance if instance.outstanding < instance.capacity else None

    def choice_of(self, instance: Instance, reason: str) -> Choice:
        """The Choice of an instance for a reason, made once."""
        key = (instance.name, reason)
        choice = self._choices.get(key)
        if choice is None or choice.instance is not instance:
            choice = self._choices[key] = Choice(instance, reason, self.name, self.metrics.tally(reason))
        return choice

    # What instances hold

    def on_sent(self, applicant: Applicant, instance: Instance) -> Expectation | None:
        """A request goes to an instance. Returns what KV_AWARE believes to be held of it there, for on_receipt."""
        if applicant.opens_session:
            if instance.session_room:
                instance.session_room -= 1
            if not self._are_journaled and applicant.opening:  # with a journal, any instance knows what was opened
                self._openings.pop(applicant.opening, None)
                if len(self._openings) >= MAX_REMEMBERED_OPENINGS:
                    del self._openings[next(iter(self._openings))]
                self._openings[applicant.opening] = instance.name
        if self._kv is None or applicant.session is not None:
            return None
        return self._kv.record(applicant.route_request, instance.name, body_bytes=applicant.body_bytes)

    def on_receipt(self, instance: Instance, expected: Expectation, *, num_kept: int, num_tokens: int) -> None:
        """An answer tells how many of the prompt's tokens the instance held."""
        if self._kv is not None:
            self._kv.check(instance.name, expected, num_kept=num_kept, num_tokens=num_tokens)

    # Waiting

    def wait(self, applicant: Applicant) -> Ticket[Applicant]:
        """A place in the queue. Raises ServiceUnavailable if there is none, or nothing to wait for."""
        session, excluded = applicant.session, applicant.route_request.excluded
        holder = None if session is None else self._find_holder(session, excluded)
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
        self._tell_waiting(ticket.home)
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
        self._tell_waiting(ticket.home)

    def on_free(self, instance: Instance) -> None:
        """An instance can take more, perhaps: let what waits go there."""
        queue, others = self.queue, self.others
        if queue is None:
            return
        if others is not None:
            others.refresh()
        if queue.num_waiting:
            self._serve_turns(queue, instance)
            if others is None or not others.has_turn_for(instance):
                self._serve_others(queue)
            self._tell_waiting(instance.name)
        if others is not None and instance.outstanding < instance.capacity and instance.state in _SERVING:
            others.pass_on(instance)

    def on_free_elsewhere(self) -> None:
        """Another process has made room, or may have: let what waits go there."""
        queue, others = self.queue, self.others
        if queue is None or others is None or not queue.num_waiting:
            return
        others.refresh()
        before = queue.num_waiting
        for home in queue.homes():
            instance = self.variant.pool.find(home)
            if instance is not None:
                self._serve_turns(queue, instance)
            self._tell_waiting(home)
        self._serve_others(queue)
        self._tell_waiting(None)
        if queue.num_waiting < before and self.variant.pool.open_instances:
            others.pass_on(None)

    def _tell_waiting(self, home: str | None) -> None:
        queue = self.queue
        if self.others is not None and queue is not None:
            num_turns = 0 if home is None else queue.num_turns(home)
            self.others.tell_waiting(queue.next_deadline, home, num_turns)

    def _serve_turns(self, queue: WaitingQueue[Applicant], instance: Instance) -> None:
        while instance.outstanding < instance.capacity and instance.state in _SERVING:
            ticket = queue.pop_turn(instance.name)
            if ticket is None:
                break
            reason = SESSION if _home_of(ticket.owner) == instance.name else SESSION_FAILOVER
            ticket.owner.go(self.choice_of(instance, reason))

    def _serve_others(self, queue: WaitingQueue[Applicant]) -> None:
        while self.variant.pool.open_instances:
            if self.others is not None and self.others.comes_before(queue.next_deadline or 0.0):
                break
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
        if is_known and instance.state in _SERVING:
            self.on_free(instance)
            return
        if self._kv is not None:
            self._kv.index.forget(instance.name)
        if not is_known:
            for key in [key for key in self._choices if key[0] == instance.name]:
                del self._choices[key]
        if self.queue is not None:
            for ticket in self.queue.take_turns(instance.name):
                ticket.owner.route_again()
            self._tell_waiting(instance.name)


def make_strategy(settings: VariantSettings, rng: Random) -> Strategy:
    """The strategy that a variant's settings name."""
    match settings.routing_strategy:
        case "RANDOM":
            return RandomChoice(rng)
        case "PREFIX_AWARE":
            prefix = settings.prefix_aware
            return PrefixAware(prefix_length=prefix.prefix_length, concurrency_threshold=prefix.concurrency_threshold)
        case "KV_AWARE":
            kv = settings.kv_aware
            return KvAware(
                max_prompt_bytes=kv.max_prompt_bytes,
                block_bytes=kv.block_bytes,
                bytes_per_request=kv.bytes_per_request,
                max_blocks_per_instance=kv.max_blocks_per_instance,
            )
        case _:
            return LeastOutstanding()


def _nobody() -> None:
    """Nobody starts instances here."""


def _home_of(applicant: Applicant) -> str | None:
    return None if applicant.session is None else applicant.session.instance
