"""The dialect of SageMaker's containers: GET /ping and POST /invocations, for the first endpoint.

TGI's clients send the bodies of /invocations to TGI's routes instead (tgi.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torchmoor.errors import ApiError, ServiceUnavailable
from torchmoor.proxy.api.begin_invocation import begin_invocation
from torchmoor.proxy.api.invocation import Invocation
from torchmoor.proxy.api.operation import Operation, map_operations
from torchmoor.proxy.api.passthrough import PassThroughDialect
from torchmoor.proxy.api.replies import LOOKING, Handler, container_error
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http.message import Reply, Request
from torchmoor.proxy.instances.endpoint import Endpoint

PING = b"/ping"
INVOCATIONS = b"/invocations"

_HEALTHY = Reply(200)
_UNHEALTHY = Reply(503)


class ContainerApi:
    """Presents this proxy and its instances as one container."""

    def __init__(self, dispatchers: Dispatchers) -> None:
        self._dispatchers = dispatchers
        self._operations = map_operations(dispatchers, PassThroughDialect())

    def find_handler(self, method: bytes, path: bytes) -> Handler | None:
        if path == INVOCATIONS and method == b"POST":
            return self._invoke
        return self.ping if path == PING and method in LOOKING else None

    def ping(self, request: Request, request_id: bytes) -> Reply:
        """Answer 200 while an instance is ready, or if no instance has to be; the body is empty."""
        endpoints = self._dispatchers.registry.endpoints()
        return _HEALTHY if not endpoints or endpoints[0].can_serve() else _UNHEALTHY

    def _invoke(self, request: Request, request_id: bytes) -> Invocation | Reply:
        """Pass a request to an instance; the answer keeps the instance's own form."""
        return self.begin(request, request_id, self._operations, container_error)

    def begin(
        self,
        request: Request,
        request_id: bytes,
        operations: Mapping[Endpoint, Operation],
        render_error: Callable[[ApiError, bytes], Reply],
    ) -> Invocation | Reply:
        """Begin the first endpoint's operation of these."""
        try:
            return begin_invocation(operations[self.get_endpoint(request)], request, request_id)
        except ApiError as error:
            return render_error(error, request_id)

    def get_endpoint(self, request: Request) -> Endpoint:
        """Return the first endpoint. Raises ApiError."""
        endpoints = self._dispatchers.get_endpoints(request)
        if not endpoints:
            raise ServiceUnavailable("There is no endpoint yet.")
        return endpoints[0]
