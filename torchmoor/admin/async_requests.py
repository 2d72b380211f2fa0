"""Asynchronous requests: their list, their results, and cancelling them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from aiohttp import web

from torchmoor.admin.http import get, post, read_limit
from torchmoor.async_inference.objects.object_store import ObjectDenied, ObjectError, ObjectMissing, ObjectUnavailable
from torchmoor.async_inference.request import AsyncRecord, AsyncState
from torchmoor.async_inference.service import AsyncInference
from torchmoor.errors import ApiError, ValidationError
from torchmoor.proxy.api.reference import admin_schemas

PATH = "/async-requests"
DEFAULT_PAGE = 100
MAX_PAGE = 1000
NONE_ACCEPTS = "No endpoint accepts asynchronous requests: none has an AsyncInferenceConfig."
# A result has the model's content type. As a page of this origin its scripts could act as the operator.
RESULT_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
    "Content-Disposition": "attachment",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class AsyncAdmin:
    """Serves the list, ?endpoint=E&state=S&after=ID&limit=N&order=oldest|newest, and the requests by their ids."""

    def __init__(self, service: AsyncInference | None) -> None:
        """service: None if no endpoint accepts asynchronous requests; every route answers so then."""
        self._given = service

    @property
    def _service(self) -> AsyncInference:
        if self._given is None:
            raise ApiError(NONE_ACCEPTS, status=404)
        return self._given

    @get(PATH, "listAsyncRequests", "List asynchronous requests.", admin_schemas.ASYNC_REQUESTS)
    async def _list(self, request: web.Request) -> web.Response:
        query, endpoints = request.query, list(self._service.endpoints)
        if not endpoints:
            raise ApiError(NONE_ACCEPTS, status=404)
        endpoint = query.get("endpoint", endpoints[0] if len(endpoints) == 1 else "")
        if endpoint not in endpoints:
            raise ValidationError(f"endpoint must be one of {', '.join(endpoints)}.")
        try:
            state = AsyncState(query["state"].upper()) if query.get("state") else None
        except ValueError:
            raise ValidationError(f"state must be one of {', '.join(each.value for each in AsyncState)}.") from None
        order = query.get("order", "oldest")
        if order not in ("oldest", "newest"):
            raise ValidationError("order must be oldest or newest.")
        limit = read_limit(query, default=DEFAULT_PAGE, most=MAX_PAGE)
        records = await self._service.queue.list(
            endpoint, state, query.get("after"), limit, is_newest_first=order == "newest"
        )
        backlog = await self._service.queue.backlog(endpoint)
        return web.json_response(
            {
                "endpoint": endpoint,
                "waiting": backlog.waiting,
                "running": backlog.running,
                "decided": backlog.decided,
                "oldest_age_s": round(backlog.oldest_age_s, 3),
                "requests": [describe(record) for record in records],
            }
        )

    async def _find(self, request: web.Request) -> AsyncRecord:
        inference_id = request.match_info["id"]
        record = await self._service.queue.get(inference_id)
        if record is None:
            raise _not_found(inference_id)
        return record

    @get(PATH + "/{id:.+}/result", "asyncResult", "Get the result of an asynchronous request.")
    async def _result(self, request: web.Request) -> web.StreamResponse:
        """Answer with the result of a completed request, or with 409 and its state."""
        found = await self._find(request)
        if found.state is not AsyncState.COMPLETED:
            return web.json_response({"error": "The request has no result.", **describe(found)}, status=409)
        try:
            download = await self._service.open_result(found)
        except ObjectError as error:
            raise ApiError(str(error), status=_status_of(error)) from error
        async with download:
            content_type = "" if found.outcome is None else found.outcome.content_type
            answer = web.StreamResponse(
                headers={**RESULT_HEADERS, "Content-Type": content_type or "application/octet-stream"}
            )
            answer.content_length = download.size
            await answer.prepare(request)
            if request.method != "HEAD":  # which aiohttp leaves to the handler
                with suppress(ConnectionError):  # the client has left
                    async for chunk in download.chunks:
                        await answer.write(chunk)
        return answer

    @post(
        PATH + "/{id:.+}/cancel",
        "cancelAsyncRequest",
        "Cancel an asynchronous request.",
        admin_schemas.CANCELLED_REQUEST,
    )
    async def _cancel(self, request: web.Request) -> web.Response:
        """Cancel a request; 409 with its state if it had ended before."""
        inference_id = request.match_info["id"]
        state = await self._service.cancel(inference_id)
        if state is None:
            raise _not_found(inference_id)
        status = 200 if state is AsyncState.CANCELLED else 409
        return web.json_response({"inference_id": inference_id, "state": state.value}, status=status)

    # After the routes below its path, since an id may have a slash.
    @get(PATH + "/{id:.+}", "describeAsyncRequest", "Describe an asynchronous request.", admin_schemas.ASYNC_REQUEST)
    async def _show(self, request: web.Request) -> web.Response:
        return web.json_response(describe(await self._find(request)))


def describe(record: AsyncRecord) -> dict[str, Any]:
    """Describe a request, without its input and its result."""
    request = record.request
    return {
        "inference_id": request.inference_id,
        "endpoint": request.endpoint,
        "state": record.state.value,
        "attempts": record.attempts,
        "instance": record.instance,
        "reason": record.reason,
        "received_at": request.received_at,
        "updated_at": record.updated_at,
        "due_at": record.due_at,
        "expires_at": request.expires_at,
        "input_location": _shown(request.input_location),
        "output_location": request.output_location,
        "failure_location": request.failure_location,
    }


def _shown(input_location: str | None) -> str | None:
    """Return the location without the query of a presigned URL, which is a credential."""
    if input_location is None or not input_location.startswith("https://"):
        return input_location
    return input_location.partition("?")[0]


def _not_found(inference_id: str) -> ApiError:
    return ApiError(f"There is no request {inference_id!r}, or it was forgotten.", status=404)


def _status_of(error: ObjectError) -> int:
    if isinstance(error, ObjectMissing):
        return 410  # deleted after it was published
    return 403 if isinstance(error, ObjectDenied) else 503 if isinstance(error, ObjectUnavailable) else 500
