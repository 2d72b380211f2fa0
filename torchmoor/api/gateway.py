"""What every dialect shares: the endpoints and how one of their instances is chosen, session ids, ids of requests.

Owns no connection; all calls are made on the proxy's event loop.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import count
from random import Random

from torchmoor.api.cancellation import Cancellations
from torchmoor.api.validation import SESSION_ID_MEMBER
from torchmoor.errors import ServiceUnavailable, UnknownEndpoint, ValidationError
from torchmoor.fleet.instance import Instance, InstanceState
from torchmoor.fleet.registry import Endpoint, Registry
from torchmoor.metrics import InvocationMetrics
from torchmoor.routing.least_outstanding import LeastOutstanding
from torchmoor.routing.random import RandomChoice
from torchmoor.routing.sessions import NEW_SESSION, SessionId, rendezvous, verify
from torchmoor.routing.strategy import RouteRequest, Strategy
from torchmoor.settings import EndpointSettings, ProxySettings

MAX_REMEMBERED_IDS = 4096


class Choice:
    """An instance, why it was chosen, and the header lines that both mean; kept, because they are made often.

    request_line: names the instance to itself. answer_lines: say where an answer comes from.
    """

    __slots__ = ("instance", "reason", "request_line", "answer_lines")

    def __init__(self, instance: Instance, reason: str) -> None:
        self.instance = instance
        self.reason = reason
        self.request_line = b"host: %b:%d\r\n" % (instance.host.encode(), instance.port)
        self.answer_lines = b"x-torchmoor-instance: %b\r\nx-amzn-sagemaker-invoked-routing-reason: %b\r\n" % (
            instance.name.encode(),
            reason.encode(),
        )


class Gateway:
    """Chooses instances for the dialects."""

    def __init__(self, settings: ProxySettings, registry: Registry, rng: Random, cancellations: Cancellations) -> None:
        self.settings = settings
        self.registry = registry
        self.cancellations = cancellations
        self.metrics = {
            endpoint.name: InvocationMetrics(endpoint.name, endpoint.settings.variant)
            for endpoint in registry.endpoints()
        }
        self._strategies = {endpoint.name: _make_strategy(endpoint.settings, rng) for endpoint in registry.endpoints()}
        self._num_choices = 0
        random = os.urandom(10).hex()
        self._id_prefix = "-".join((random[:8], random[8:12], random[12:16], random[16:])).encode()
        self._ids = count(1)
        self._verified: dict[tuple[str, bytes], SessionId] = {}
        self._choices: dict[tuple[str, str], Choice] = {}

    def new_request_id(self) -> bytes:
        """A unique id in the form of a UUID: a random part of this process, then a count."""
        return b"%b-%012x" % (self._id_prefix, next(self._ids))

    def get_endpoint(self, name: str) -> Endpoint:
        """The endpoint of that name. Raises UnknownEndpoint in the words of the service."""
        endpoint = self.registry.find_endpoint(name)
        if endpoint is None:
            raise UnknownEndpoint(name, self.settings.account_id)
        return endpoint

    def get_session(self, endpoint: Endpoint, raw: bytes | None) -> SessionId | None:
        """The session that a request belongs to; None if to none, or to one that it opens.

        Raises ValidationError for an id that breaks the pattern, or was not made for this endpoint with a known key.
        """
        if not raw or raw == NEW_SESSION:
            return None
        known = self._verified.get((endpoint.name, raw))
        if known is not None:
            return known
        SESSION_ID_MEMBER.check(raw)
        session = verify(raw.decode("ascii"), self.settings.sessions.keys, endpoint=endpoint.name)
        if session is None:
            raise ValidationError("The session id is not valid: it was not issued by this endpoint.")
        if len(self._verified) >= MAX_REMEMBERED_IDS:
            del self._verified[next(iter(self._verified))]
        self._verified[endpoint.name, raw] = session
        return session

    def choose(self, endpoint: Endpoint, session: SessionId | None, excluded: frozenset[str]) -> Choice:
        """The instance for a request. Raises ServiceUnavailable.

        A session's requests go to the instance that opened it; while that one is not ready, to the one that all
        proxies agree on. excluded: instances that this request has tried.
        """
        if session is not None:
            choice = self._choose_for_session(endpoint, session, excluded)
        else:
            strategy = self._strategies[endpoint.name]
            instance = strategy.choose(RouteRequest(excluded), endpoint.instances)
            choice = None if instance is None else self.choice_of(instance, strategy.reason)
        if choice is None:
            self.metrics[endpoint.name].no_capacity += 1
            raise ServiceUnavailable(_why_unavailable(endpoint.instances))
        self._num_choices += 1
        choice.instance.last_chosen = self._num_choices
        return choice

    def _choose_for_session(self, endpoint: Endpoint, session: SessionId, excluded: frozenset[str]) -> Choice | None:
        home = self.registry.find(session.instance)
        # A draining instance still serves the sessions that it holds.
        if (
            home is not None
            and (home.state is InstanceState.READY or home.state is InstanceState.DRAINING)
            and home.endpoint == endpoint.name
            and home.name not in excluded
        ):
            return self.choice_of(home, "session")
        others = [instance for instance in endpoint.instances if instance.name not in excluded]
        instance = rendezvous(session.text, others)
        return None if instance is None else self.choice_of(instance, "session-failover")

    def choice_of(self, instance: Instance, reason: str) -> Choice:
        """The Choice of an instance for a reason, made once."""
        key = (instance.name, reason)
        choice = self._choices.get(key)
        if choice is None or choice.instance is not instance:
            choice = self._choices[key] = Choice(instance, reason)
        return choice

    def report_unreachable(self, instance: Instance) -> None:
        """A connection was refused: send nothing there until a probe succeeds."""
        if instance.state is InstanceState.READY and self.registry.find(instance.name) is instance:
            self.registry.set_state(instance.name, InstanceState.DOWN)


def _make_strategy(settings: EndpointSettings, rng: Random) -> Strategy:
    return RandomChoice(rng) if settings.routing_strategy == "RANDOM" else LeastOutstanding()


def _why_unavailable(instances: Sequence[Instance]) -> str:
    if any(instance.is_ready for instance in instances):
        return "All instances of the endpoint are busy. Try again later."
    return "No instance of the endpoint is ready. Try again later."
