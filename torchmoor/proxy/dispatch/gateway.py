"""Endpoints, sessions and request ids: what the requests of every dialect need before they have an instance.

Owns no connection; all calls are made on the event loop's thread.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from itertools import count
from random import Random

from torchmoor.config.settings import ProxySettings
from torchmoor.errors import UnknownEndpoint, UnknownVariant, ValidationError
from torchmoor.proxy.dispatch.cancellation import Cancellations
from torchmoor.proxy.dispatch.decisions import Decisions
from torchmoor.proxy.dispatch.dispatcher import Dispatcher
from torchmoor.proxy.dispatch.members import SESSION_ID_MEMBER
from torchmoor.proxy.dispatch.observer import Observer
from torchmoor.proxy.http.message import Reply, Request
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.recovery import Recovery
from torchmoor.proxy.instances.registry import Endpoint, Registry
from torchmoor.proxy.routing.foreign_sessions import ForeignSessions
from torchmoor.proxy.routing.random import choose_weighted
from torchmoor.proxy.routing.session_placement import rendezvous
from torchmoor.proxy.routing.waiting import WaitingBytes
from torchmoor.wire import headers
from torchmoor.wire.session_ids import SessionId, verify

NEW_SESSION = headers.NEW_SESSION.encode()
MAX_REMEMBERED_IDS = 4096
SESSION_KEY = b'"session_id"'  # in the body of a turn that has no header for it


class Gateway:
    """Finds the endpoint, session and dispatcher of a request of any dialect.

    suspect: called with an instance that seems to be dead, so that it is probed at once.
    """

    def __init__(
        self,
        settings: ProxySettings,
        registry: Registry,
        rng: Random,
        cancellations: Cancellations,
        recovery: Recovery,
        suspect: Callable[[Instance], None],
    ) -> None:
        self.settings = settings
        self.registry = registry
        self.cancellations = cancellations
        self.recovery = recovery
        self.suspect = suspect
        self.decisions = Decisions(settings.observe.max_decisions, settings.observe.max_decisions_per_s)
        self.observer: Observer | None = None  # notified of each request's end
        self.waiting_bytes = WaitingBytes(settings.limits.max_waiting_bytes)
        self._rng = rng
        self._dispatchers = {
            endpoint.name: [
                Dispatcher(
                    registry,
                    variant,
                    endpoint.settings.late_binding,
                    self.waiting_bytes,
                    rng,
                    recovery=settings.recovery,
                    are_journaled=settings.sessions.are_journaled,
                )
                for variant in endpoint.variants
            ]
            for endpoint in registry.endpoints()
        }
        random = os.urandom(10).hex()
        self._id_prefix = "-".join((random[:8], random[8:12], random[12:16], random[16:])).encode()
        self._ids = count(1)
        self._foreign = ForeignSessions(settings.limits.max_foreign_sessions)
        self._verified: dict[tuple[str, str, bytes], SessionId] = {}

    def tell(self, request: Request, request_id: bytes, reply: Reply) -> None:
        """The proxy answers a request itself, and it has no invocation."""
        if self.observer is not None:
            self.observer.on_reply(request, request_id, reply)

    def new_request_id(self) -> bytes:
        """Return a unique id in the form of a UUID: this process's random part, then a count."""
        return b"%b-%012x" % (self._id_prefix, next(self._ids))

    def get_endpoint(self, name: str) -> Endpoint:
        """Return the endpoint of that name. Raises UnknownEndpoint, worded as the service does."""
        endpoint = self.registry.find_endpoint(name)
        if endpoint is None:
            raise UnknownEndpoint(name, self.settings.account_id)
        return endpoint

    def get_session(self, endpoint: Endpoint, principal: str, raw: bytes | None) -> SessionId | None:
        """Return the session that a request belongs to; None if it has none or opens one.

        Raises ValidationError for an id that breaks the pattern, or was neither made for this endpoint and principal
        with a known key nor seen here when another handler opened a session with it.
        """
        if not raw or raw == NEW_SESSION:
            return None
        known = self._verified.get((endpoint.name, principal, raw))
        if known is not None:
            return known
        SESSION_ID_MEMBER.check(raw)
        keys = self.settings.sessions.keys
        session = verify(raw.decode("ascii"), keys, endpoint=endpoint.name, principal=principal)
        if session is None:
            session = self._foreign.find(raw.decode("ascii"), endpoint=endpoint.name, principal=principal)
            if session is None:
                raise ValidationError("The session id is not valid: it was not issued by this endpoint.")
            return session
        if len(self._verified) >= MAX_REMEMBERED_IDS:
            del self._verified[next(iter(self._verified))]
        self._verified[endpoint.name, principal, raw] = session
        return session

    def on_opened(self, endpoint: Endpoint, principal: str, raw: bytes, instance: Instance) -> None:
        """Remember the id of a session that an instance has opened, if the id proves nothing by itself.

        raw: `<id>; Expires=...`.
        """
        text = raw.partition(b";")[0].strip()
        try:
            SESSION_ID_MEMBER.check(text)
        except ValidationError:
            return  # no client could send it
        session_id, keys = text.decode("ascii"), self.settings.sessions.keys
        if text != NEW_SESSION and verify(session_id, keys, endpoint=endpoint.name, principal=principal) is None:
            self._foreign.add(session_id, instance.name, endpoint=endpoint.name, principal=principal)

    def on_closed(self, endpoint: Endpoint, principal: str, session: SessionId) -> None:
        if session.is_foreign:
            self._foreign.remove(session.text, endpoint=endpoint.name, principal=principal)

    def find_session_in(self, endpoint: Endpoint, principal: str, body: bytes) -> SessionId | None:
        """Return the session that a JSON body names, if it belongs to this endpoint and principal.

        The instance reports what is wrong with a body or an id.
        """
        try:
            content = json.loads(body)
            named = content.get("session_id") if isinstance(content, dict) else None
            return self.get_session(endpoint, principal, named.encode("ascii")) if isinstance(named, str) else None
        except (ValueError, RecursionError, ValidationError):
            return None

    def dispatchers(self) -> list[Dispatcher]:
        return [dispatcher for dispatchers in self._dispatchers.values() for dispatcher in dispatchers]

    def dispatchers_of(self, endpoint: Endpoint) -> Sequence[Dispatcher]:
        """Return the dispatchers of an endpoint's variants, in configured order."""
        return self._dispatchers[endpoint.name]

    def count_without_invocation(self, endpoint: Endpoint, status: int) -> None:
        """Count a request that has no invocation."""
        metrics = self.first_dispatcher(endpoint).metrics
        metrics.invocations += 1
        metrics.count_status(status)

    def first_dispatcher(self, endpoint: Endpoint) -> Dispatcher:
        """Return the dispatcher whose metrics count requests that are refused before their variant is known."""
        return self._dispatchers[endpoint.name][0]

    def dispatcher_for(self, endpoint: Endpoint, session: SessionId | None, variant: bytes | None) -> Dispatcher:
        """Return the dispatcher of a request's variant: its session's, the one it names, or one by weight.

        A variant without a ready instance gets no requests by weight. Raises UnknownVariant.
        """
        dispatchers = self._dispatchers[endpoint.name]
        if variant is None and len(dispatchers) == 1:
            return dispatchers[0]
        if variant is not None:
            name = variant.decode("latin-1")
            named = [dispatcher for dispatcher in dispatchers if dispatcher.variant.name == name]
            if not named:
                raise UnknownVariant(name, endpoint.name)
            if session is None:
                return named[0]
        if len(dispatchers) == 1:
            return dispatchers[0]
        if session is not None:
            known = endpoint.find_variant_of(session.instance)
            if known is None:
                home = rendezvous(session.text, endpoint.instances)
                known = None if home is None else self.registry.variant_of(home)
            for dispatcher in dispatchers:
                if dispatcher.variant is known:
                    return dispatcher
        ready = [d for d in dispatchers if any(instance.is_ready for instance in d.variant.pool.members)]
        if not ready:
            ready = [d for d in dispatchers if d.variant.settings.scaling is not None]
        weights = [dispatcher.variant.settings.weight for dispatcher in ready]
        return choose_weighted(self._rng, ready, weights) or dispatchers[0]

    def report_unreachable(self, instance: Instance) -> None:
        """Send nothing to an instance that refuses connections until a probe succeeds."""
        if instance.state is InstanceState.READY and self.registry.find(instance.name) is instance:
            self.registry.set_state(instance.name, InstanceState.DOWN)
