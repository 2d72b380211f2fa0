"""Makes the Invocation of a request of any dialect: checks the request, finds its session, and chooses its variant."""

from __future__ import annotations

from collections.abc import Callable

from torchmoor.errors import ApiError, BodyTooLarge
from torchmoor.proxy.api.invocation import Invocation
from torchmoor.proxy.api.operation import Operation, placed_name
from torchmoor.proxy.api.runtime_members import TARGET_MODEL, TARGET_VARIANT, check_members
from torchmoor.proxy.http.field_names import SESSION_ID
from torchmoor.proxy.http.message import Request
from torchmoor.wire.session_ids import SessionId


def begin_invocation(
    operation: Operation,
    request: Request,
    request_id: bytes,
    *,
    session: SessionId | None = None,
    variant: bytes | None = None,
    model: str | None = None,
    path: bytes | None = None,
    make: Callable[..., Invocation] = Invocation,
) -> Invocation:
    """Make the invocation of a request, or count its refusal. Raises ApiError.

    session, variant, model: instead of those in the header. path: at the instance; None: that of its model.
    """
    dispatchers, endpoint, dialect = operation.dispatchers, operation.endpoint, operation.dialect
    places = request.layout.places
    try:
        if not request.layout.is_sound:
            check_members(request.layout)
        if (request.content_length or 0) > operation.max_body_bytes:
            raise BodyTooLarge(operation.max_body_bytes)
        dialect.check(request, request_id, endpoint)
        if SESSION_ID in places and session is None and dialect.names_sessions_in_header:
            session = dispatchers.sessions.get(endpoint, request.principal, request.fields[places[SESSION_ID]].value)
        if TARGET_VARIANT in places and variant is None:
            variant = request.find(TARGET_VARIANT)
        dispatcher = dispatchers.choose(endpoint, session, variant)
    except ApiError as error:
        dispatchers.count_without_invocation(endpoint, error.status)
        raise
    if model is None and endpoint.settings.multi_model is not None:
        named = request.find(TARGET_MODEL)
        model = None if named is None else placed_name(named.decode("latin-1"), endpoint)
    return make(
        operation,
        request,
        request_id=request_id,
        dispatcher=dispatcher,
        session=session,
        path=path,
        model=model,
    )
