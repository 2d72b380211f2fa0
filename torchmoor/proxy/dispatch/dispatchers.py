"""The dispatchers of all endpoints, with the session ids, request ids, decisions and observer that they share.

Owns no connection; all calls are made on the event loop's thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import count
from random import Random
from typing import TypeVar

from torchmoor.config.settings import ProxySettings
from torchmoor.errors import UnknownEndpoint, UnknownVariant
from torchmoor.proxy.dispatch.callers import Callers
from torchmoor.proxy.dispatch.dispatcher import Dispatcher
from torchmoor.proxy.dispatch.id_operations import IdOperations
from torchmoor.proxy.dispatch.moved_sessions import MovedSessions
from torchmoor.proxy.dispatch.observer import Observer
from torchmoor.proxy.dispatch.recent_decisions import RecentDecisions
from torchmoor.proxy.dispatch.request_sessions import RequestSessions
from torchmoor.proxy.dispatch.sequences import Sequences
from torchmoor.proxy.http.message import Reply, Request
from torchmoor.proxy.instances.endpoint import Endpoint
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.recovery import Recovery
from torchmoor.proxy.instances.registry import Registry
from torchmoor.proxy.routing.session_failover import rendezvous
from torchmoor.proxy.routing.waiting import WaitingBytes
from torchmoor.wire.session_ids import SessionId

T = TypeVar("T")


class Dispatchers:
    """Finds the endpoint and the dispatcher of a request of any dialect: one dispatcher for each variant.

    suspect: called with an instance that seems to be dead, so that it is probed at once. on_need: called when a request
    waits for an instance to be started. callers: None if they are not limited.
    """

    def __init__(
        self,
        settings: ProxySettings,
        registry: Registry,
        rng: Random,
        cancellations: IdOperations,
        moved_sessions: MovedSessions,
        recovery: Recovery,
        suspect: Callable[[Instance], None],
        callers: Callers | None,
    ) -> None:
        self.settings = settings
        self.registry = registry
        self.cancellations = cancellations
        self.moved_sessions = moved_sessions
        self.recovery = recovery
        self.suspect = suspect
        self.decisions = RecentDecisions(settings.observe.max_decisions, settings.observe.max_decisions_per_s)
        self.observer: Observer | None = None  # notified of each request's end
        self.waiting_bytes = WaitingBytes(settings.limits.max_waiting_bytes)
        self.sessions = RequestSessions(settings.sessions, settings.limits.max_foreign_sessions)
        self.sequences = Sequences(settings.sessions.keys, settings.limits.sequence_ttl_s)
        self.callers = callers
        self.on_need: list[Callable[[], None]] = []
        self._rng = rng
        self._by_endpoint: dict[Endpoint, list[Dispatcher]] = {}
        registry.watch(self._add, on_forgotten=self._drop)
        random = os.urandom(10).hex()
        self._id_prefix = "-".join((random[:8], random[8:12], random[12:16], random[16:])).encode()
        self._ids = count(1)

    def _add(self, endpoint: Endpoint) -> None:
        self._by_endpoint[endpoint] = [
            Dispatcher(
                self.registry,
                variant,
                endpoint.settings.late_binding,
                self.waiting_bytes,
                self._rng,
                recovery=self.settings.recovery,
                are_journaled=self.settings.sessions.are_journaled,
                on_held=self.wake,
            )
            for variant in endpoint.variants
        ]
        for former, dispatchers in self._by_endpoint.items():
            if former.name == endpoint.name and former is not endpoint:
                for dispatcher in dispatchers:
                    dispatcher.hand_over(self._successor_of(dispatcher, endpoint))

    def wake(self) -> None:
        """Report that a request waits for an instance to be started."""
        for wake in self.on_need:
            wake()

    def _successor_of(self, dispatcher: Dispatcher, endpoint: Endpoint) -> Dispatcher:
        """Return the dispatcher of the updated endpoint's variant of the same name, or else of its first variant."""
        successors = self._by_endpoint[endpoint]
        return next((each for each in successors if each.variant.name == dispatcher.variant.name), successors[0])

    def _drop(self, endpoint: Endpoint) -> None:
        for dispatcher in self._by_endpoint.pop(endpoint, ()):
            dispatcher.stop()

    def observe_reply(self, request: Request, request_id: bytes, reply: Reply) -> None:
        """Notify the observer of an answer by the proxy itself to a request that has no invocation."""
        if self.observer is not None:
            self.observer.on_reply(request, request_id, reply)

    def new_request_id(self) -> bytes:
        """Return a unique id in the form of a UUID: this process's random part, then a count."""
        return b"%b-%012x" % (self._id_prefix, next(self._ids))

    def get_endpoints(self, request: Request, name: str | None = None) -> Sequence[Endpoint]:
        """Return the endpoint that a request names, or all if it names none.

        Every dialect finds a request's endpoint among these, so a rule about callers and endpoints belongs here.
        request: admitted, so its principal is known. Raises UnknownEndpoint, worded as the service does.
        """
        if name is None:
            endpoints = self.registry.endpoints()
        elif (endpoint := self.registry.find_endpoint(name)) is not None:
            endpoints = [endpoint]
        else:
            raise UnknownEndpoint(name, self.settings.account_id)
        return endpoints

    def all(self) -> list[Dispatcher]:
        """Return the dispatchers of all endpoints that are served, in configured order."""
        return [each for endpoint in self.registry.endpoints() for each in self._by_endpoint[endpoint]]

    def of(self, endpoint: Endpoint) -> Sequence[Dispatcher]:
        """Return the dispatchers of an endpoint's variants, in configured order."""
        return self._by_endpoint[endpoint]

    def count_without_invocation(self, endpoint: Endpoint, status: int) -> None:
        """Count a request that has no invocation; an endpoint that was deleted meanwhile has no counts."""
        if endpoint in self._by_endpoint:
            metrics = self.first(endpoint).metrics
            metrics.invocations += 1
            metrics.count_status(status, status)

    def first(self, endpoint: Endpoint) -> Dispatcher:
        """Return the dispatcher whose metrics count requests that are refused before their variant is known."""
        return self._by_endpoint[endpoint][0]

    def choose(self, endpoint: Endpoint, session: SessionId | None, variant: bytes | None) -> Dispatcher:
        """Return the dispatcher of a request's variant: its session's, the one it names, or one by weight.

        A variant without a ready instance gets no requests by weight. Raises UnknownEndpoint, UnknownVariant.
        """
        dispatchers = self._by_endpoint.get(endpoint)
        if dispatchers is None:  # deleted while the request's body arrived
            raise UnknownEndpoint(endpoint.name, self.settings.account_id)
        if variant is None and len(dispatchers) == 1:
            return dispatchers[0]
        if variant is not None:
            name = variant.decode("latin-1")
            named = next((each for each in dispatchers if each.variant.name == name), None)
            if named is None:
                raise UnknownVariant(name, endpoint.name, (each.variant.name for each in dispatchers))
            if session is None or len(dispatchers) == 1:
                return named
        if session is not None:
            known = endpoint.find_variant_of(session.instance)
            if known is None:
                home = rendezvous(session.text, endpoint.instances)
                known = None if home is None else self.registry.variant_of(home)
            for dispatcher in dispatchers:
                if dispatcher.variant is known:
                    return dispatcher
        return self._choose_by_weight(dispatchers)

    def _choose_by_weight(self, dispatchers: Sequence[Dispatcher]) -> Dispatcher:
        ready = [d for d in dispatchers if any(instance.is_ready for instance in d.variant.pool.members)]
        if not ready:
            ready = [d for d in dispatchers if d.variant.settings.scaling is not None]
        weights = [dispatcher.variant.settings.weight for dispatcher in ready]
        return choose_weighted(self._rng, ready, weights) or dispatchers[0]

    def report_unreachable(self, instance: Instance) -> None:
        """Send nothing to an instance that refuses connections until a probe succeeds."""
        if instance.state is InstanceState.READY and self.registry.has(instance):
            self.registry.set_state(instance.name, InstanceState.DOWN)


def choose_weighted(rng: Random, things: Sequence[T], weights: Sequence[float]) -> T | None:
    """Return one of the things with a probability in proportion to its weight; None if no weight is above zero.

    Random instead of round-robin: a client that alternates between two kinds of request must not always meet the same
    variant with each kind.
    """
    largest = max(weights, default=0.0)
    if largest <= 0:
        return None
    return rng.choices(things, [weight / largest for weight in weights])[0]  # the sum of large ones could be infinite
