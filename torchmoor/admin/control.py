"""POST /: the operations of AWS's control plane, for clients whose endpoint URL is the admin plane's."""

from __future__ import annotations

import asyncio

from aiohttp import web

from torchmoor.errors import ApiError, ValidationError
from torchmoor.proxy.api.control_operation import CBOR, AnswerControl, ControlRequest, target_of


class ControlAdmin:
    """Passes requests to the control plane. body_timeout_s: for a request's body."""

    def __init__(self, answer: AnswerControl, body_timeout_s: float) -> None:
        self._answer = answer
        self._body_timeout_s = body_timeout_s

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the route."""
        router.add_post("/", self._handle)
        router.add_post("/service/{service}/operation/{operation}", self._handle)

    async def _handle(self, request: web.Request) -> web.Response:
        """Answer a request.

        Because of X-Amz-Target, a browser sends a preflight first, which is refused for other sites.
        """
        is_cbor = request.headers.get("Smithy-Protocol") == CBOR.decode()
        target = target_of(request.path) if is_cbor else request.headers.get("X-Amz-Target")
        if target is None:
            raise ApiError("POST / is for operations of AWS's control plane, which X-Amz-Target names.", status=404)
        reply = await self._answer(ControlRequest(target, await self._read(request), is_cbor))
        headers = {name.decode(): value.decode() for name, value in reply.headers}
        return web.Response(status=reply.status, body=reply.body, headers=headers)

    async def _read(self, request: web.Request) -> bytes:
        """Return the body. The connection has no deadline now, and must not wait forever for the rest."""
        try:
            async with asyncio.timeout(self._body_timeout_s):
                return await request.read()
        except TimeoutError as error:
            raise ApiError("The request's body did not come in time.", status=408) from error
        except ConnectionError as error:
            raise ValidationError("The client left before the end of the request's body.") from error
