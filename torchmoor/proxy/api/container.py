"""The dialect of SageMaker's containers: GET /ping and POST /invocations, for the first configured endpoint."""

from __future__ import annotations

from torchmoor.proxy.api.invocation import Invocation
from torchmoor.proxy.api.passthrough import PassThrough
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http.message import Reply, Request

PING = b"/ping"
INVOCATIONS = b"/invocations"

_HEALTHY = Reply(200)
_UNHEALTHY = Reply(503)


class ContainerApi:
    """Presents this proxy and its instances as one container."""

    def __init__(self, dispatchers: Dispatchers, pass_through: PassThrough) -> None:
        self._endpoint = dispatchers.registry.endpoints()[0]
        self._pass_through = pass_through

    def ping(self, request: Request, request_id: bytes) -> Reply:
        """Answer 200 while an instance is ready, or none has to be; the body is empty."""
        return _HEALTHY if self._endpoint.can_serve() else _UNHEALTHY

    def invoke(self, request: Request, request_id: bytes) -> Invocation | Reply:
        """Pass a request to an instance; the answer keeps the instance's own form."""
        return self._pass_through.invoke(request, request_id, self._endpoint)
