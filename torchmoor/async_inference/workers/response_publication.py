"""Publication of a response in the background: the instance has the answer, or the worker reports the failure to it."""

from __future__ import annotations

import json

from torchmoor.async_inference.objects.object_store import ObjectError
from torchmoor.async_inference.request import AsyncState
from torchmoor.async_inference.workers.instance_client import InstanceLost, InstanceUnreachable, InvocationTimedOut
from torchmoor.async_inference.workers.publication import Publication, PublishLater
from torchmoor.wire import background, headers

END_TIMEOUT_S = 30.0
_GONE = frozenset((404, 410))  # the response was deleted, or has expired


class ResponsePublication(Publication):
    """Publishes the outcome of one response; there are no objects and no notifications."""

    async def _try_write(self) -> ObjectError | None:
        """Send the instance an outcome without an answer. Raises PublishLater."""
        if not self.outcome.succeeded:
            try:
                await self._end()
            except (InstanceUnreachable, InstanceLost, InvocationTimedOut) as error:
                raise PublishLater(str(error)) from error
        return None

    async def _end(self) -> None:
        request, outcome, context = self.request, self.outcome, self.context
        url = context.capacity.find_url(request.session_id, request.principal)
        if url is None:
            if self.is_late or context.capacity.is_lost(request.session_id, request.principal):
                return  # the session may outlive the request's time, but not without end
            raise PublishLater("No instance has the response now.")
        is_cancelled = outcome.state is AsyncState.CANCELLED
        ending = {
            background.STATUS: background.CANCELLED if is_cancelled else background.FAILED,
            background.MESSAGE: outcome.reason,
        }
        fields = {
            "Content-Type": "application/json",
            headers.RESOURCE: background.end_resource(request.response_id),
            headers.ENDPOINT: request.endpoint,
            headers.PRINCIPAL: request.principal,
            headers.SOURCE: request.source,
        }
        sent = {name: value for name, value in fields.items() if value}
        async with context.client.send(url, sent, json.dumps(ending).encode(), END_TIMEOUT_S) as answer:
            if answer.status >= 300 and answer.status not in _GONE and not self.is_late:
                raise PublishLater(f"The instance that has the response has answered {answer.status}.")

    async def _remove_staged(self) -> None:
        """Do nothing: the answer of such a request is never staged."""

    async def _notify(self) -> None:
        """Do nothing: a notification names objects."""
