"""The record of one finished request, for routing decisions, the access log and traces."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torchmoor.proxy.dispatch.chooser import Choice
from torchmoor.proxy.http.call import Outcome
from torchmoor.proxy.http.field_names import ERROR_CODE, INFERENCE_ID, NEW_SESSION_ID, SESSION_ID
from torchmoor.proxy.http.message import AnswerHead, Reply, Request
from torchmoor.proxy.instances.endpoint import Variant
from torchmoor.wire.receipt import GENERATED_TOKENS, NUMBER_FIELDS, read_number
from torchmoor.wire.session_ids import SessionId, session_hash

logger = logging.getLogger(__name__)

MAX_PATH = 256  # bytes of a request's path
_RESOURCES = re.compile("/v1/(?:responses|conversations|files)/")  # of OpenAI's API
_NAMES = {"compact", "input_tokens", "input_items", "cancel", "items", "content"}  # all other parts are ids
_ERROR_KIND = b"x-amzn-errortype"
_RECEIPT = {name.encode(): field for name, field in NUMBER_FIELDS.items()}
_GENERATED_TOKENS = NUMBER_FIELDS[GENERATED_TOKENS]
_MAX_CODE = 64  # characters of a handler's error code
_MAX_ID = 64  # bytes of a client's id, which a refused request may exceed
_WORDS = {outcome: outcome.value for outcome in Outcome} | {Outcome.FAILED: Outcome.BROKEN.value}


class RequestRecord:
    """One finished request, without prompt, answer, credential or session id. None means "did not happen".

    ended_at: seconds since 1970. inference_id: the client's, or the request id, which the proxy assigns.
    outcome: a value of torchmoor.proxy.http.call.Outcome. status: the client's. status_refused: the instance's own, if
    it refused the request. num_bytes_in: of the request's body; num_bytes_out: of the whole answer as sent.
    Times are in seconds from the end of the request's head: total_s to the end, first_byte_s to the answer's body,
    answered_s to the head of the instance's answer. waited_s runs from the request's last byte until an instance was
    free, upstream_s from sending the request on to the end. session: the hash of the session's id. principal: the
    caller's name as instances see it. error_type: what the client received; model_error: the handler's own code.
    target_model: of an endpoint with many or with adapters, named by header, body or path; None for the base model.
    receipt: the numbers of wire/receipt.py in the answer's head. is_sampled: whether its trace is exported.

    A plain class without slots: attributes that most requests do not need are not set, which halves its cost.
    Only records that are kept or observed have byte counts, and what `complete_record` sets; num_bytes_out and
    first_byte_s need an observer.
    """

    endpoint: str | None = None
    variant: str | None = None
    operation: str | None = None
    instance: str | None = None
    routing_reason: str | None = None
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
    answered_s: float | None = None
    model_error: str | None = None
    receipt: Mapping[str, int | float] = MappingProxyType({})
    trace_id: str | None = None
    is_sampled = False

    def __init__(self, request_id: str, method: str, path: str, outcome: str, total_s: float) -> None:
        self.ended_at = time.time()
        self.inference_id = self.request_id = request_id
        self.method = method
        self.path = path
        self.outcome = outcome
        self.total_s = total_s
        self.status: int | None = None
        self.error_type: str | None = None


def hide_ids(path: bytes) -> str:
    """Return a path without the ids of OpenAI's resources. Each contains its session's id, which is a credential."""
    text = path.decode("latin-1")
    found = _RESOURCES.search(text)
    if found is None:
        return text
    parts = text[found.end() :].split("/")
    return text[: found.end()] + "/".join(part if part in _NAMES else "..." for part in parts)


def begin_record(request: Request, request_id: bytes, outcome: Outcome, now: float) -> RequestRecord:
    """Make the record of a request from its head. now: monotonic seconds."""
    record = RequestRecord(
        request_id.decode(),
        request.method.decode("latin-1"),
        hide_ids(request.path)[:MAX_PATH],
        _WORDS[outcome],
        now - request.received_at,
    )
    if request.principal:
        record.principal = request.principal
    return record


def record_place(
    record: RequestRecord, variant: Variant, operation: str, choice: Choice | None, session: SessionId | None
) -> None:
    """Add where an invocation went, why, and for which session. choice: None if no instance was chosen."""
    record.endpoint = variant.endpoint
    record.variant = variant.name
    record.operation = operation
    if choice is not None:
        record.instance, record.routing_reason = choice.instance.name, choice.reason
    if session is not None:
        record.session = session_hash(session.text)


def complete_record(
    record: RequestRecord,
    request: Request,
    variant: Variant,
    head: AnswerHead | None,
    *,
    opens_session: bool = False,
    num_tokens: int | None = None,
) -> None:
    """Add the names and numbers that only logs and traces need. Failures are logged.

    head: the instance's last answer. num_tokens: of a continued stream, as the client got it.
    """
    try:
        record.model = variant.settings.model
        inference_id = request.find(INFERENCE_ID)
        if inference_id is not None:
            record.inference_id = inference_id.decode("latin-1")
        if head is not None:
            _read_answer(record, head, opens_session=opens_session)
        if num_tokens is not None:
            record.receipt = {**record.receipt, _GENERATED_TOKENS: num_tokens}
    except Exception:
        logger.exception("request not recorded request_id=%s", record.request_id)


def _read_answer(record: RequestRecord, head: AnswerHead, *, opens_session: bool) -> None:
    opened = (head.find(NEW_SESSION_ID) or head.find(SESSION_ID)) if opens_session else None
    if opened:
        record.session = session_hash(opened.partition(b";")[0].strip())
    if head.status >= 400:
        record.status_refused = head.status
        code = head.find(ERROR_CODE)  # some dialects send it to the client
        if code:
            record.model_error = code.decode("latin-1")[:_MAX_CODE]
            record.error_type = record.error_type or record.model_error
    if _RECEIPT.keys().isdisjoint(head.layout.places):
        return
    numbers = {
        field: read_number(value.decode("latin-1"))
        for name, field in _RECEIPT.items()
        if (value := head.find(name)) is not None
    }
    record.receipt = {field: number for field, number in numbers.items() if number is not None}


def record_reply(request: Request, request_id: bytes, reply: Reply, now: float) -> RequestRecord:
    """Record a request that the proxy answers itself. now: monotonic seconds."""
    record = begin_record(request, request_id, Outcome.ANSWERED, now)
    fields = dict(reply.headers)
    kind = fields.get(_ERROR_KIND) or fields.get(ERROR_CODE)
    record.status = reply.status
    inference_id = request.find(INFERENCE_ID)
    if inference_id is not None:
        record.inference_id = inference_id[:_MAX_ID].decode("latin-1")
    record.error_type = None if kind is None else kind.decode("latin-1")
    record.num_bytes_in = request.content_length or 0
    record.num_bytes_out = len(reply.render(keep_alive=True, added_lines=request.answer_lines))
    return record


def describe_record(record: RequestRecord) -> dict[str, Any]:
    """Return the record's row in the answer to GET /decisions."""
    return {
        "time": round(record.ended_at, 3),
        "request_id": record.request_id,
        "inference_id": record.inference_id,
        "method": record.method,
        "path": record.path,
        "caller": record.principal,
        "model": record.target_model or record.model,
        "operation": record.operation,
        "endpoint": record.endpoint,
        "variant": record.variant,
        "instance": record.instance,
        "reason": record.routing_reason,
        "session": record.session,
        "outcome": record.outcome,
        "status": record.status,
        "error": record.error_type,
        "bytes_in": record.num_bytes_in,
        "instance_status": record.status_refused,
        "model_error": record.model_error,
        "ms": _milliseconds(record.total_s),
        "waited_ms": _milliseconds(record.waited_s or 0.0),
        "sent_ms": None if record.upstream_s is None else _milliseconds(record.total_s - record.upstream_s),
        "answered_ms": _milliseconds(record.answered_s),
        "receipt": dict(record.receipt),
        "retries": record.num_retries,
        "trace_id": record.trace_id if record.is_sampled else None,
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
