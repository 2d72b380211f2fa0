"""TorchServe's own inference paths: /predictions/{model}[/{version}][/more], passed to an instance of that model."""

from __future__ import annotations

from urllib.parse import unquote

from torchmoor.proxy.api.invocation import Invocation
from torchmoor.proxy.api.passthrough import PassThrough
from torchmoor.proxy.api.replies import json_reply
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http.message import Reply, Request

PREFIX = b"/predictions/"


class TorchServeApi:
    """Finds the variant that serves the model in the path."""

    def __init__(self, dispatchers: Dispatchers, pass_through: PassThrough) -> None:
        self._registry = dispatchers.registry
        self._pass_through = pass_through

    def invoke(self, request: Request, request_id: bytes) -> Invocation | Reply:
        """Pass the request on with its path and query as they are."""
        segments = unquote(request.path[len(PREFIX) :].decode("latin-1")).split("/")
        variant = self._registry.find_variant_by_model(segments[0])
        if variant is None or "." in segments or ".." in segments:
            return _model_not_found(segments[0])
        path = request.path + b"?" + request.query if request.query else request.path
        endpoint = self._registry.get_endpoint(variant.endpoint)
        return self._pass_through.invoke(request, request_id, endpoint, path=path, variant=variant.name.encode())


def _model_not_found(model: str) -> Reply:
    """Render TorchServe's own error."""
    body = {"code": 404, "type": "ModelNotFoundException", "message": f"Model not found: {model[:256]}"}
    return json_reply(404, body)
