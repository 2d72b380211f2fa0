"""What is told of one request once it is over: no prompt, no answer, no credential, and no session's id."""

from __future__ import annotations

import time

from torchmoor.proxy.api.invocation import CONTEXT_TOKENS, ERROR_HEADER, NEW_SESSION_ID, Invocation
from torchmoor.proxy.api.validation import INFERENCE_ID, SESSION_ID, TARGET_MODEL
from torchmoor.proxy.http.call import Outcome, Waiter
from torchmoor.proxy.http.message import AnswerHead, Reply, Request
from torchmoor.wire.session_hash import session_hash

MAX_PATH = 256  # bytes of a path that is no operation
_ERROR_KIND = b"x-amzn-errortype"
_WORDS = {outcome: outcome.value for outcome in Outcome}
# Looking a member up in its Enum takes longer than many a step here.
_ANSWERED, _BROKEN = Outcome.ANSWERED, Outcome.BROKEN


class Record:
    """One request. None stands for what did not happen, or does not apply.

    ended_at: seconds since 1970. inference_id: the client's, or the request id, which is always the proxy's own.
    outcome: in the words of torchmoor.proxy.http.call.Outcome. status: that the client was told. status_refused: the
    instance's own, if that was an error. num_bytes_in: of the request's body; num_bytes_out: of the answer as it was
    sent. Times in seconds from the end of the request's head: total_s to the end, first_byte_s to the answer's body,
    waited_s until an instance was free; upstream_s from sending the request on to the end. session: a hash of the
    session's id, the same in all its lines. principal: what instances know the caller by.

    No dataclass and no slots: what most requests have no word on is not set, which halves the time that a record takes.
    """

    endpoint: str | None = None
    variant: str | None = None
    operation: str | None = None
    instance: str | None = None
    routing_reason: str | None = None
    error_type: str | None = None
    status_refused: int | None = None
    num_bytes_in = 0
    num_bytes_out = 0
    upstream_s: float | None = None
    first_byte_s: float | None = None
    waited_s: float | None = None
    num_retries = 0
    session: str | None = None
    principal: str | None = None
    model: str | None = None
    target_model: str | None = None
    num_context_tokens: int | None = None
    trace_id: str | None = None

    def __init__(self, request_id: str, method: str, path: str, outcome: str, total_s: float) -> None:
        self.ended_at = time.time()
        self.inference_id = self.request_id = request_id
        self.method = method
        self.path = path
        self.outcome = outcome
        self.total_s = total_s
        self.status: int | None = None


def record_invocation(invocation: Invocation, waiter: Waiter | None, outcome: Outcome, now: float) -> Record:
    """A forwarded request, or one that was meant to be. now: in monotonic seconds."""
    request, began = invocation.request, invocation.request.received_at
    record = _begin(request, invocation.request_id, outcome, now)
    record.endpoint = invocation.endpoint.name
    variant = invocation.dispatcher.variant
    record.variant = variant.name
    record.model = variant.settings.model
    record.operation = invocation.operation_name
    record.num_retries = invocation.num_retries
    status = invocation.status
    if waiter is not None:
        status = status or waiter.status_replied
        record.num_bytes_in, record.num_bytes_out = waiter.num_bytes_in, waiter.num_bytes_replied
    record.status = status or None
    if invocation.choice is not None:
        record.instance, record.routing_reason = invocation.choice.instance.name, invocation.choice.reason
    if invocation.sent_at:
        record.upstream_s = now - invocation.sent_at
    watched = invocation.watched
    if watched is not None:
        record.num_bytes_out += watched.num_bytes
        if watched.began_at:
            record.first_byte_s = watched.began_at - began
    if invocation.waited_s:
        record.waited_s = invocation.waited_s
    places = request.layout.places
    if INFERENCE_ID in places:
        record.inference_id = (request.find(INFERENCE_ID) or b"").decode("latin-1")
    if TARGET_MODEL in places:
        record.target_model = (request.find(TARGET_MODEL) or b"").decode("latin-1")
    if invocation.session is not None or invocation.opens_session:
        record.session = _session_of(invocation)
    if invocation.answer_head is not None:
        _read_answer(record, invocation.answer_head)
    if invocation.error_kind:
        record.error_type = invocation.error_kind
    elif outcome is _BROKEN:
        record.error_type = "MidStreamError"
    return record


def record_reply(request: Request, request_id: bytes, reply: Reply, now: float) -> Record:
    """A request that the proxy has answered itself."""
    record = _begin(request, request_id, _ANSWERED, now)
    fields = dict(reply.headers)
    kind = fields.get(_ERROR_KIND) or fields.get(ERROR_HEADER)
    record.status = reply.status
    record.error_type = None if kind is None else kind.decode("latin-1")
    record.num_bytes_in = request.content_length or 0
    record.num_bytes_out = len(reply.render(keep_alive=True))
    return record


def _begin(request: Request, request_id: bytes, outcome: Outcome, now: float) -> Record:
    record = Record(
        request_id.decode(),
        request.method.decode("latin-1"),
        request.path.decode("latin-1")[:MAX_PATH],
        _WORDS[outcome],
        now - request.received_at,
    )
    if request.principal:
        record.principal = request.principal
    return record


def _read_answer(record: Record, head: AnswerHead) -> None:
    """What an instance's last word says."""
    if head.status >= 400:
        record.status_refused = head.status
        record.error_type = (head.find(ERROR_HEADER) or b"").decode("latin-1") or None  # if that passes as it is
    tokens = head.find(CONTEXT_TOKENS)
    if tokens is not None and tokens.isdigit():
        record.num_context_tokens = int(tokens)


def _session_of(invocation: Invocation) -> str | None:
    """A hash of the id of the session that the request belongs to, or has opened."""
    if invocation.session is not None:
        return session_hash(invocation.session.text)
    head = invocation.answer_head
    told = None if head is None else head.find(NEW_SESSION_ID) or head.find(SESSION_ID)
    return None if not told else session_hash(told.partition(b";")[0].strip())
