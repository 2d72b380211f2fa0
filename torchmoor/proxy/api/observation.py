"""An invocation's trace and the measurements of its answer, which its record gets at the end."""

from __future__ import annotations

import logging

from torchmoor.proxy.dispatch.observer import Observer
from torchmoor.proxy.dispatch.record import RequestRecord
from torchmoor.proxy.http.answer import Answer, WatchedAnswer
from torchmoor.proxy.http.field_names import ERROR_CODE, INFERENCE_ID, NEW_SESSION_ID, SESSION_ID, TARGET_MODEL
from torchmoor.proxy.http.message import AnswerHead, Request
from torchmoor.proxy.instances.registry import Variant
from torchmoor.wire.receipt import GENERATED_TOKENS, NUMBER_FIELDS, read_number
from torchmoor.wire.session_hash import session_hash

logger = logging.getLogger(__name__)

_RECEIPT = {name.encode(): field for name, field in NUMBER_FIELDS.items()}
_GENERATED_TOKENS = NUMBER_FIELDS[GENERATED_TOKENS]
_MAX_CODE = 64  # characters of a handler's error code


class Observation:
    """The trace and measurements of one running invocation; made only if there is an observer."""

    def __init__(self, observer: Observer, request: Request) -> None:
        self._observer = observer
        self._request = request
        self._trace = observer.begin_trace(request)
        self._answer: WatchedAnswer | None = None

    @property
    def trace_line(self) -> bytes:
        """The header line that replaces the client's traceparent; b"" if the request is not traced."""
        return b"" if self._trace is None else self._trace.line

    def watch(self, answer: Answer) -> Answer:
        """Measure an answer while it is sent to the client."""
        self._answer = WatchedAnswer(answer)
        return self._answer

    def end(self, record: RequestRecord) -> None:
        """Add the measurements to the record, and give it to the observer.

        A failure is logged, not raised: the request must still release its lease.
        """
        try:
            if self._answer is not None:
                record.num_bytes_out += self._answer.num_bytes
                if self._answer.began_at:
                    record.first_byte_s = self._answer.began_at - self._request.received_at
            self._observer.on_end(record, self._trace)
        except Exception:
            logger.exception("request not recorded request_id=%s", record.request_id)


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

    head: of the instance's last answer. num_tokens: those that the client got of a stream that was continued.
    """
    try:
        record.model = variant.settings.model
        inference_id, target_model = request.find(INFERENCE_ID), request.find(TARGET_MODEL)
        if inference_id is not None:
            record.inference_id = inference_id.decode("latin-1")
        if target_model is not None:
            record.target_model = target_model.decode("latin-1")
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
