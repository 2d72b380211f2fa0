"""TorchServe's own inference paths: /predictions/{model}[/{version}][/more], passed to an instance of that model."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

from torchmoor.errors import ApiError
from torchmoor.proxy.api.begin_invocation import begin_invocation
from torchmoor.proxy.api.invocation import Invocation
from torchmoor.proxy.api.operation import map_operations
from torchmoor.proxy.api.passthrough import PassThroughDialect
from torchmoor.proxy.api.replies import Handler, container_error, json_reply
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http.message import Reply, Request
from torchmoor.proxy.instances.endpoint import Endpoint, Variant

PREFIX = b"/predictions/"
_METHODS = frozenset((b"POST", b"PUT", b"GET"))


class TorchServeApi:
    """Finds the variant that serves the model in the path."""

    def __init__(self, dispatchers: Dispatchers) -> None:
        self._dispatchers = dispatchers
        self._operations = map_operations(dispatchers, PassThroughDialect())

    def find_handler(self, method: bytes, path: bytes) -> Handler | None:
        return self._invoke if path.startswith(PREFIX) and method in _METHODS else None

    def _invoke(self, request: Request, request_id: bytes) -> Invocation | Reply:
        """Pass the request on with its path and query as they are."""
        segments = unquote(request.path[len(PREFIX) :].decode("latin-1")).split("/")
        path = request.path + b"?" + request.query if request.query else request.path
        try:
            found = _find_variant(self._dispatchers.get_endpoints(request), segments[0])
            if found is None or "." in segments or ".." in segments:
                return _model_not_found(segments[0])
            endpoint, variant = found
            operation = self._operations[endpoint]
            return begin_invocation(operation, request, request_id, path=path, variant=variant.name.encode())
        except ApiError as error:
            return container_error(error, request_id)


def _find_variant(endpoints: Sequence[Endpoint], model: str) -> tuple[Endpoint, Variant] | None:
    """Return the first variant whose instances serve that model, and its endpoint."""
    for endpoint in endpoints:
        for variant in endpoint.variants:
            if variant.settings.model == model:
                return endpoint, variant
    return None


def _model_not_found(model: str) -> Reply:
    """Render TorchServe's own error."""
    body = {"code": 404, "type": "ModelNotFoundException", "message": f"Model not found: {model[:256]}"}
    return json_reply(404, body)
