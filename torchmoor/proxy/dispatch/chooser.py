"""Chooses an instance for each request of one variant: by its session, by the model it is for, by what instances hold.

Keeps what that takes: which instance an opening was sent to, what KV_AWARE believes, and a Choice for each answer.
"""

from __future__ import annotations

from random import Random

from torchmoor.metrics.invocations import InvocationMetrics
from torchmoor.proxy.dispatch.choice import Choice
from torchmoor.proxy.dispatch.routing_request import Applicant
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Variant
from torchmoor.proxy.routing.kv_aware import Expectation, KvAware
from torchmoor.proxy.routing.sessions import find_roomiest, place_of, rendezvous
from torchmoor.wire.session_ids import SessionId

SESSION = "session"
SESSION_FAILOVER = "session-failover"
SESSION_ROOM = "session-room"

SERVING = frozenset((InstanceState.READY, InstanceState.DRAINING))
MAX_REMEMBERED_OPENINGS = 4096  # a client sends one again within seconds


class Chooser:
    """One variant's strategy and metrics.

    binds_late: an instance gets at most its capacity, turns of sessions too.
    """

    def __init__(self, variant: Variant, rng: Random, *, binds_late: bool, are_journaled: bool) -> None:
        self.variant = variant
        self.name = variant.name.encode()
        self.path = b"/predictions/" + variant.settings.model.encode()
        self.metrics = InvocationMetrics(variant.endpoint, variant.name)
        self.strategy = variant.strategy.make(variant.settings, rng)
        self.num_prefix_bytes = self.strategy.num_prefix_bytes
        self._rng = rng
        self._binds_late = binds_late
        self._are_journaled = are_journaled
        self._kv = self.strategy if isinstance(self.strategy, KvAware) else None
        self._choices: dict[tuple[str, str], Choice] = {}
        self._openings: dict[bytes, str] = {}  # which instance was sent them, the oldest first

    def choose(self, applicant: Applicant) -> Choice | None:
        """The instance for a request, or None if none can take it now.

        A session's requests go to the instance that opened it; while that one does not take them, to the one that
        all proxies agree on. A request for one of many models goes by what instances hold.
        """
        request, pool = applicant.route_request, self.variant.pool
        if applicant.session is not None:
            return self._choose_for_session(applicant.session, request.excluded)
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
            roomiest = find_roomiest(pool, request.excluded, self._rng)
            if roomiest is not None:
                return self.choice_of(roomiest, SESSION_ROOM)
        pick = self.strategy.choose(request, pool)
        return None if pick is None else self.choice_of(pick.instance, pick.reason)

    def _choose_for_session(self, session: SessionId, excluded: frozenset[str]) -> Choice | None:
        home = self._choices.get((session.instance, SESSION))
        if home is not None and not self._binds_late and not excluded:
            instance = home.instance
            if instance.is_ready and instance.share == 1.0:  # as nearly always; the rest says the same, for all cases
                return home
        return self._choose_holder(session, excluded)

    def _choose_holder(self, session: SessionId, excluded: frozenset[str]) -> Choice | None:
        instance = self.find_holder(session, excluded)
        if instance is None or (self._binds_late and instance.outstanding >= instance.capacity):
            return None
        return self.choice_of(instance, SESSION if instance.name == session.instance else SESSION_FAILOVER)

    def find_holder(self, session: SessionId, excluded: frozenset[str]) -> Instance | None:
        """The instance that serves a session, busy or not; None only if there is none that could."""
        home = self.variant.pool.find(session.instance)
        if home is not None and (home.state not in SERVING or home.name in excluded):
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

    def forget_held(self, instance: Instance) -> None:
        """What an instance held is lost."""
        if self._kv is not None:
            self._kv.index.forget(instance.name)

    def forget(self, instance: Instance) -> None:
        """An instance is gone for good."""
        for key in [key for key in self._choices if key[0] == instance.name]:
            del self._choices[key]
