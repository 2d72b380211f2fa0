"""What is told of one request once it is over: no prompt, no answer, no credential, and no session's id."""

from __future__ import annotations

import time
from dataclasses import dataclass
from hashlib import blake2b

from torchmoor.api.invocation import CONTEXT_TOKENS, ERROR_HEADER, Invocation
from torchmoor.api.runtime import NEW_SESSION_ID
from torchmoor.api.validation import INFERENCE_ID, SESSION_ID, TARGET_MODEL
from torchmoor.http.call import Outcome, Waiter
from torchmoor.http.message import Reply, Request

MAX_PATH = 256  # bytes of a path that is no operation
_ERROR_KIND = b"x-amzn-errortype"


@dataclass(slots=True)
class Record:
    """One request. None stands for what did not happen, or does not apply.

    ended_at: seconds since 1970. inference_id: the client's, or the request id, which is always the proxy's own.
    outcome: in the words of torchmoor.http.call.Outcome. status: that the client was told. status_refused: the
    instance's own, if that was an error. num_bytes_in: of the request's body; num_bytes_out: of the answer as it was
    sent. Times in seconds from the end of the request's head: total_s to the end, first_byte_s to the answer's body,
    waited_s until an instance was free; upstream_s from sending the request on to the end. session: a hash of the
    session's id, the same in all its lines. principal: what instances know the caller by.
    """

    ended_at: float
    inference_id: str
    request_id: str
    method: str
    path: str
    outcome: str
    total_s: float
    status: int | None = None
    endpoint: str | None = None
    variant: str | None = None
    operation: str | None = None
    instance: str | None = None
    routing_reason: str | None = None
    error_type: str | None = None
    status_refused: int | None = None
    num_bytes_in: int = 0
    num_bytes_out: int = 0
    upstream_s: float | None = None
    first_byte_s: float | None = None
    waited_s: float | None = None
    num_retries: int = 0
    session: str | None = None
    principal: str | None = None
    model: str | None = None
    target_model: str | None = None
    num_context_tokens: int | None = None
    trace_id: str | None = None


def record_invocation(invocation: Invocation, waiter: Waiter | None, outcome: Outcome, now: float) -> Record:
    """A forwarded request, or one that was meant to be. now: in monotonic seconds."""
    request, choice = invocation.request, invocation.choice
    request_id = invocation.request_id.decode()
    inference_id, target, head = request.find(INFERENCE_ID), request.find(TARGET_MODEL), invocation.answer_head
    began = request.received_at
    status = invocation.status or (0 if waiter is None else waiter.status_replied)
    kind = invocation.error_kind
    if outcome is Outcome.BROKEN:
        kind = kind or "MidStreamError"
    is_refused = head is not None and head.status >= 400
    if not kind and head is not None and is_refused:  # it passes as it is
        kind = (head.find(ERROR_HEADER) or b"").decode("latin-1")
    tokens = (head and head.find(CONTEXT_TOKENS)) or b""
    return Record(
        ended_at=time.time(),
        inference_id=request_id if inference_id is None else inference_id.decode("latin-1"),
        request_id=request_id,
        method=request.method.decode("latin-1"),
        path=request.path.decode("latin-1")[:MAX_PATH],
        outcome=outcome.value,
        total_s=now - began,
        status=status or None,
        endpoint=invocation.endpoint.name,
        variant=invocation.dispatcher.variant.name,
        operation=invocation.operation_name,
        instance=None if choice is None else choice.instance.name,
        routing_reason=None if choice is None else choice.reason,
        error_type=kind or None,
        status_refused=head.status if head is not None and is_refused else None,
        num_bytes_in=0 if waiter is None else waiter.num_bytes_in,
        num_bytes_out=0 if waiter is None else waiter.num_bytes_out,
        upstream_s=now - invocation.sent_at if invocation.sent_at else None,
        first_byte_s=invocation.first_piece_at - began if invocation.first_piece_at else None,
        waited_s=invocation.waited_s or None,
        num_retries=invocation.num_retries,
        session=_session_of(invocation),
        principal=request.principal or None,
        model=invocation.dispatcher.variant.settings.model,
        target_model=None if target is None else target.decode("latin-1"),
        num_context_tokens=int(tokens) if tokens.isdigit() else None,
    )


def record_reply(request: Request, request_id: bytes, reply: Reply, now: float) -> Record:
    """A request that the proxy has answered itself."""
    fields = dict(reply.headers)
    kind = fields.get(_ERROR_KIND) or fields.get(ERROR_HEADER)
    return Record(
        ended_at=time.time(),
        inference_id=request_id.decode(),
        request_id=request_id.decode(),
        method=request.method.decode("latin-1"),
        path=request.path.decode("latin-1")[:MAX_PATH],
        outcome=Outcome.ANSWERED.value,
        total_s=now - request.received_at,
        status=reply.status,
        error_type=None if kind is None else kind.decode("latin-1"),
        num_bytes_in=request.content_length or 0,
        num_bytes_out=len(reply.render(keep_alive=True)),
        principal=request.principal or None,
    )


def _session_of(invocation: Invocation) -> str | None:
    """A hash of the id of the session that the request belongs to, or has opened."""
    if invocation.session is not None:
        text = invocation.session.text.encode()
    elif invocation.opens_session and invocation.answer_head is not None:
        head = invocation.answer_head
        text = (head.find(NEW_SESSION_ID) or head.find(SESSION_ID) or b"").partition(b";")[0].strip()
    else:
        text = b""
    if not text:
        return None
    return blake2b(text, digest_size=8).hexdigest()
