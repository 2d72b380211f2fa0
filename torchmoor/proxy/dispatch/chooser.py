"""Choice of an instance for each request of one variant: by session, by model, then by the routing strategy.

Remembers which instance got each opening, and a Choice for each instance and reason.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any, Protocol

from torchmoor.metrics.invocations import InvocationMetrics, Tally
from torchmoor.proxy.http.field_names import INVOCATION_ID
from torchmoor.proxy.http.message import Request
from torchmoor.proxy.instances.endpoint import Variant
from torchmoor.proxy.instances.instance import SERVING, Instance
from torchmoor.proxy.routing.affinity import Affinity
from torchmoor.proxy.routing.reasons import SESSION, SESSION_FAILOVER
from torchmoor.proxy.routing.session_failover import place_of, rendezvous
from torchmoor.proxy.routing.strategy import StrategyRequest
from torchmoor.wire import headers
from torchmoor.wire.last_kept import LastKept
from torchmoor.wire.session_ids import SessionId

_ANSWER_LINES = f"{headers.INSTANCE}: %b\r\n{headers.INVOKED_ROUTING_REASON}: %b\r\n".encode()
_VARIANT_LINE = f"{headers.INVOKED_VARIANT}: %b\r\n%b".encode()

MAX_REMEMBERED_OPENINGS = 4096  # clients retry an opening within seconds


class Choice:
    """An instance and a reason, kept with their header lines because each is used often.

    request_line: the end of the request line, and the host line. answer_lines: name the instance and the reason.
    runtime_lines: name the variant too, for the runtime API. tally: counts the reason over all instances of the
    variant.
    """

    __slots__ = ("instance", "reason", "tally", "request_line", "answer_lines", "runtime_lines")

    def __init__(self, instance: Instance, reason: str, variant: bytes, tally: Tally) -> None:
        self.instance = instance
        self.reason = reason
        self.tally = tally
        self.request_line = b" HTTP/1.1\r\nhost: %b\r\n" % instance.authority().encode()
        self.answer_lines = _ANSWER_LINES % (instance.name.encode(), reason.encode())
        self.runtime_lines = _VARIANT_LINE % (variant, self.answer_lines)


class DispatchRequest(Protocol):
    """The properties of a request that its instance's choice depends on.

    complete_at: when the request was whole, or its streamed answer was cut; its wait counts from then. target_model:
    None if the endpoint serves one model. num_body_bytes: of the body, times body_weight, which is above 1 for a form.
    was_lost: it was sent to an instance that is gone, and may be sent to that one's replacement, of the same name.
    """

    head: Request
    complete_at: float
    session: SessionId | None
    opens_session: bool
    num_body_bytes: int
    body_weight: int
    target_model: str | None
    strategy_request: StrategyRequest
    was_lost: bool

    def exclude_only(self, instances: frozenset[str]) -> None:
        """Allow all instances but these."""
        ...

    def go(self, choice: Choice) -> None:
        """End the wait and take this instance."""
        ...

    def route_again(self) -> None:
        """Choose again: the instance that it waited for is gone, and its ticket is void."""
        ...


class Chooser:
    """Chooses instances of one variant and counts why. binds_late: whether capacity limits turns of sessions too."""

    def __init__(
        self, variant: Variant, metrics: InvocationMetrics, rng: Random, *, binds_late: bool, are_journaled: bool
    ) -> None:
        self.variant = variant
        self.strategy = variant.strategy_class.make(variant.settings, rng)
        affinity = variant.settings.affinity
        self._affinity = Affinity(free_requests=affinity.free_requests, load_factor=affinity.load_factor)
        self._metrics = metrics
        self._rng = rng
        self._binds_late = binds_late
        self._are_journaled = are_journaled
        self._choices: dict[tuple[str, str], Choice] = {}
        self._openings: LastKept[bytes, str] = LastKept(MAX_REMEMBERED_OPENINGS)  # the instance that got each

    def choose(self, request: DispatchRequest) -> Choice | None:
        """Return the instance for a request, or None if none can take it now.

        A session's requests go to the instance that opened it; while that one does not serve it, to the one that all
        proxies compute alike. A request for one of many models is placed by the models that instances hold. An instance
        without room for the request's body is skipped, except for a session's request, which has no other.
        """
        strategy_request, num_bytes = request.strategy_request, request.num_body_bytes
        if request.session is not None:
            choice = self._choose_for_session(request.session, strategy_request.excluded)
            return choice if choice is None or choice.instance.has_body_room(num_bytes) else None
        choice = self._choose_without_session(request, strategy_request)
        if choice is None or choice.instance.has_body_room(num_bytes):
            return choice
        full = (each.name for each in self.variant.pool.open_instances if not each.has_body_room(num_bytes))
        excluded = strategy_request.excluded.union(full)
        return self._choose_without_session(request, replace(strategy_request, excluded=excluded))

    def _choose_without_session(self, request: DispatchRequest, strategy_request: StrategyRequest) -> Choice | None:
        pool = self.variant.pool
        if request.opens_session:
            self.variant.needs_status = True
        models = self.variant.models
        if models is not None and request.target_model is not None:
            placed = models.choose(request.target_model, pool, strategy_request.excluded)
            return None if placed is None else self.choice_of(placed.instance, placed.reason)
        if request.opens_session:
            again = self._find_opener(request, strategy_request.excluded)
            if again is not None:
                return self.choice_of(again, SESSION)
            placed = self.strategy.place_session(strategy_request, pool, self._rng)
            if placed is not None:
                return self.choice_of(placed.instance, placed.reason)
        pick = self._affinity.choose(strategy_request, pool) or self.strategy.choose(strategy_request, pool)
        return None if pick is None else self.choice_of(pick.instance, pick.reason)

    def _choose_for_session(self, session: SessionId, excluded: frozenset[str]) -> Choice | None:
        home = None if excluded else self.find_home(session)  # a shortcut: the code below decides the same
        if home is not None:
            return home
        instance = self.find_holder(session, excluded)
        if instance is None or (self._binds_late and instance.outstanding >= instance.capacity):
            return None
        return self.choice_for_turn(instance, session)

    def find_home(self, session: SessionId) -> Choice | None:
        """Return the Choice of a session's own instance, if that was chosen before and is known to take the turn."""
        home = self._choices.get((session.instance, SESSION))
        if home is None or self._binds_late:
            return None
        instance = home.instance
        return home if instance.is_ready and instance.share == 1.0 else None

    def find_holder(self, session: SessionId, excluded: frozenset[str]) -> Instance | None:
        """Return the instance that serves a session, busy or not; None if no instance can."""
        home = self.variant.pool.find(session.instance)
        if home is not None and (home.state not in SERVING or home.name in excluded):
            home = None
        if self.is_bound(session) or (home is not None and self._keeps(home, session)):
            return home
        others = (i for i in self.variant.pool.members if i is not home and i.name not in excluded)
        return rendezvous(session.text, others) or home

    def is_bound(self, session: SessionId) -> bool:
        """Return True if only the session's own instance can serve it, even with a journal."""
        return session.is_foreign or any(instance.batches_sequences for instance in self.variant.pool.members)

    def _keeps(self, home: Instance, session: SessionId) -> bool:
        """Return True if a session stays at its own instance.

        With a journal any instance can serve it: an instance that drains or fails loses its sessions to the others, and
        gets them back gradually when it is ready again. Without a journal only its own instance can serve it.
        """
        if not self._are_journaled:
            return True
        return home.is_ready and (home.share == 1.0 or place_of(session.text) < home.share)

    def _find_opener(self, request: DispatchRequest, excluded: frozenset[str]) -> Instance | None:
        """Return the instance that got this opening before; it answers with the session that it opened then."""
        name = self._openings.get(_opening_of(request.head))
        instance = None if name is None else self.variant.pool.find(name)
        if instance is None or not instance.is_ready or instance.name in excluded:
            return None
        return instance if instance.outstanding < instance.capacity else None

    def choice_for_turn(self, instance: Instance, session: SessionId) -> Choice:
        """Return the Choice of an instance for a session's turn; any other than the session's own is a failover."""
        return self.choice_of(instance, SESSION if instance.name == session.instance else SESSION_FAILOVER)

    def choice_of(self, instance: Instance, reason: str) -> Choice:
        """Return the Choice of an instance for a reason, made once."""
        key = (instance.name, reason)
        choice = self._choices.get(key)
        if choice is None or choice.instance is not instance:
            tally = self._metrics.decisions[reason]
            choice = self._choices[key] = Choice(instance, reason, self.variant.name.encode(), tally)
        return choice

    # What the strategy learns

    def on_sent(self, request: DispatchRequest, instance: Instance) -> Any:
        """Note a request without a session that goes to an instance. Return what the strategy expects of the answer."""
        if request.opens_session:
            instance.num_opened += 1
            # With a journal, every instance finds the session.
            if not self._are_journaled and (opening := _opening_of(request.head)):
                self._openings.keep(opening, instance.name)
        return self.strategy.note_sent(request.strategy_request, instance.name, body_bytes=request.num_body_bytes)

    def forget(self, instance: Instance) -> None:
        for key in [key for key in self._choices if key[0] == instance.name]:
            del self._choices[key]


def _opening_of(request: Request) -> bytes:
    """Return the key of an opening, the same when its client repeats it; b"" if it has no invocation id."""
    invocation_id = request.find(INVOCATION_ID)
    return b"%b %b" % (request.principal.encode(), invocation_id) if invocation_id else b""
