"""Decides which requests take the fast path, and sends them: InvokeEndpoint on an endpoint with one plain variant.

`FastRoute.try_send` has the checks, the cheapest first. Nothing is changed before all of them have passed, so a request
that fails one takes the general path without a trace of the attempt. docs/decisions/0049-a-fast-path.md lists the
requests that the fast path does not take.
"""

from __future__ import annotations

from torchmoor.proxy.access.cors import Cors
from torchmoor.proxy.access.gate import Gate
from torchmoor.proxy.access.web_pages import ORIGIN, SITE, WebPageGuard
from torchmoor.proxy.api.operation import Operation
from torchmoor.proxy.api.runtime import RuntimeApi, invoke_path
from torchmoor.proxy.api.runtime_members import NOT_THERE, TARGET_MODEL, TARGET_VARIANT
from torchmoor.proxy.dispatch.body_weight import weigh_body
from torchmoor.proxy.dispatch.chooser import Choice
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.dispatch.request_sessions import SESSION_KEY
from torchmoor.proxy.fast_path.request import FastOperation, FastRequest
from torchmoor.proxy.http.arriving import source_of
from torchmoor.proxy.http.call import FastClient
from torchmoor.proxy.http.connection_parts import ConnectionParts
from torchmoor.proxy.http.field_names import SESSION_ID
from torchmoor.proxy.http.message import Request
from torchmoor.proxy.instances.endpoint import Endpoint
from torchmoor.proxy.routing.least_outstanding import LeastOutstanding
from torchmoor.proxy.routing.strategy import FIRST_ATTEMPT

# Fields that give a request another meaning; those of WebPageGuard among them.
_UNUSUAL = frozenset((*NOT_THERE, TARGET_MODEL, TARGET_VARIANT, ORIGIN, SITE))
_POST = b"POST"
MAX_AWAITED_BYTES = 65_536  # a longer body seldom comes in one read


class FastRoutes:
    """The operations that have a fast path, by the path of their requests. Implements FastPath of http/call.py."""

    def __init__(
        self, parts: ConnectionParts, dispatchers: Dispatchers, api: RuntimeApi, pages: WebPageGuard, gate: Gate | None
    ) -> None:
        """api: must watch the registry already, to know each endpoint first. gate: None without credentials."""
        self._parts = parts
        self._dispatchers = dispatchers
        self._api = api
        self._pages = pages
        self._gate = gate
        self._routes: dict[bytes, FastRoute] = {}
        dispatchers.registry.watch(self._add, on_retired=self._drop)

    def _add(self, endpoint: Endpoint) -> None:
        settings = endpoint.settings
        is_plain = len(settings.variants) == 1 and settings.late_binding is None and settings.multi_model is None
        if is_plain:
            operation = self._api.get_invoke(endpoint)
            self._routes[invoke_path(endpoint)] = FastRoute(operation, self._parts, self._gate)

    def _drop(self, endpoint: Endpoint) -> None:
        self._routes.pop(invoke_path(endpoint), None)

    @property
    def _is_tracing(self) -> bool:
        observer = self._dispatchers.observer
        return observer is not None and observer.is_tracing

    def may_take(self, request: Request) -> bool:
        """Return True for a short body: clients such as boto3 send head and body separately."""
        return (
            request.path in self._routes
            and request.layout.is_usual
            and (request.content_length or 0) <= MAX_AWAITED_BYTES
            and not self._is_tracing
        )

    def try_send(self, client: FastClient, request: Request, body: bytes) -> bool:
        route = self._routes.get(request.path)
        if route is None or self._is_tracing:
            return False
        if self._pages.is_on and not self._pages.knows(request.host):
            return False
        return route.try_send(client, request, body)


class FastRoute(FastOperation):
    """The checks of an operation's requests."""

    def __init__(self, operation: Operation, parts: ConnectionParts, gate: Gate | None) -> None:
        super().__init__(operation, parts)
        self._gate = gate
        self._endpoint = operation.endpoint
        self._sessions = self.dispatchers.sessions
        self._answer_lines = Cors(self.dispatchers.settings.listen.allowed_origins).lines_for_others
        self._max_body_bytes = min(operation.max_body_bytes, self.budget.max_body_bytes)
        self._pool = self.dispatcher.variant.pool
        self._chooser = self.dispatcher.chooser
        self._goes_by_load = isinstance(self._chooser.strategy, LeastOutstanding)

    def try_send(self, client: FastClient, request: Request, body: bytes) -> bool:
        layout, length = request.layout, request.content_length
        if not (layout.is_usual and layout.is_sound and length and request.method == _POST):
            return False
        places = layout.places
        if length > self._max_body_bytes or not _UNUSUAL.isdisjoint(places):
            return False
        if not client.keep_alive or client.is_write_paused:
            return False
        if self._gate is not None and not self._gate.try_admit(request, body):
            return False
        if self.callers is not None and not self.callers.has_room(request.principal or source_of(client.source)):
            return False
        session, place = None, places.get(SESSION_ID)
        if place is not None:
            raw = request.fields[place].value
            session = self._sessions.find_verified(self._endpoint, request.principal, raw)
            choice = None if session is None else self._chooser.find_home(session)
        else:
            choice = self._choose_by_load(body)
        if choice is None:
            return False
        instance = choice.instance
        if weigh_body(request) > 1:
            return False
        if instance.batches_sequences or not instance.has_body_room(length):
            return False
        idle = instance.idle
        if not idle or idle[-1].transport.is_closing() or not self.budget.try_take(length):
            return False
        request.answer_lines = self._answer_lines
        FastRequest(self, client, request, body, choice, session).send(length)
        return True

    def _choose_by_load(self, body: bytes) -> Choice | None:
        """Return the least loaded instance, for a request whose body does not name a session."""
        if not self._goes_by_load or SESSION_KEY in body:
            return None
        pick = self._chooser.strategy.choose(FIRST_ATTEMPT, self._pool)  # has no side effect, so it may be repeated
        return None if pick is None else self._chooser.choice_of(pick.instance, pick.reason)
