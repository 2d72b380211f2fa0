"""What an observer learns of an invocation beside its record: the trace, and the answer as it was sent."""

from __future__ import annotations

import logging
from copy import copy

from torchmoor.proxy.api.validation import INFERENCE_ID, SESSION_ID, TARGET_MODEL
from torchmoor.proxy.dispatch.assignment import Assignment
from torchmoor.proxy.dispatch.observer import Observer
from torchmoor.proxy.dispatch.record import RequestRecord
from torchmoor.proxy.http.answer import Answer, WatchedAnswer
from torchmoor.proxy.http.call import Waiter
from torchmoor.proxy.http.message import AnswerHead, Request
from torchmoor.wire import headers
from torchmoor.wire.session_hash import session_hash

logger = logging.getLogger(__name__)

_ERROR_HEADER = headers.ERROR.encode()
_NEW_SESSION_ID = headers.NEW_SESSION_ID.encode()
_CONTEXT_TOKENS = headers.CONTEXT_TOKENS.encode()


class Observation:
    """One invocation's, for as long as it runs; there is one only where there is an observer.

    answer_head: the last that an instance gave.
    """

    def __init__(self, observer: Observer, request: Request) -> None:
        self.answer_head: AnswerHead | None = None
        self._observer = observer
        self._request = request
        self._trace = observer.begin_trace(request)
        self._answer: WatchedAnswer | None = None

    @property
    def trace_line(self) -> bytes:
        """The header line that replaces the client's traceparent; b"" if the request is not traced."""
        return b"" if self._trace is None else self._trace.line

    def watch(self, answer: Answer) -> Answer:
        """Measure an answer that is passed on."""
        self._answer = WatchedAnswer(answer)
        return self._answer

    def end(
        self, record: RequestRecord, waiter: Waiter | None, assignment: Assignment, upstream_s: float | None
    ) -> None:
        """Complete a copy of the record, and hand it to the observer. The routing decisions keep the record itself.

        A failure of either is logged: the request still has to release what it holds.
        """
        try:
            record = copy(record)
            self._complete(record, waiter, assignment, upstream_s)
            self._observer.on_end(record, self._trace)
        except Exception:
            logger.exception("request not recorded request_id=%s", record.request_id)

    def _complete(
        self, record: RequestRecord, waiter: Waiter | None, assignment: Assignment, upstream_s: float | None
    ) -> None:
        record.model = assignment.dispatcher.variant.settings.model
        record.upstream_s = upstream_s
        if waiter is not None:
            record.status = record.status or waiter.status_replied or None
            record.num_bytes_in, record.num_bytes_out = waiter.num_bytes_in, waiter.num_bytes_replied
        if self._answer is not None:
            record.num_bytes_out += self._answer.num_bytes
            if self._answer.began_at:
                record.first_byte_s = self._answer.began_at - self._request.received_at
        inference_id, target_model = self._request.find(INFERENCE_ID), self._request.find(TARGET_MODEL)
        if inference_id is not None:
            record.inference_id = inference_id.decode("latin-1")
        if target_model is not None:
            record.target_model = target_model.decode("latin-1")
        if self.answer_head is not None:
            self._read_answer(record, self.answer_head, opens_session=assignment.opens_session)

    def _read_answer(self, record: RequestRecord, head: AnswerHead, *, opens_session: bool) -> None:
        opened = (head.find(_NEW_SESSION_ID) or head.find(SESSION_ID)) if opens_session else None
        if opened:
            record.session = session_hash(opened.partition(b";")[0].strip())
        if head.status >= 400:
            record.status_refused = head.status
            code = head.find(_ERROR_HEADER)  # reaches the client in some dialects
            record.error_type = record.error_type or (code.decode("latin-1") if code else None)
        tokens = head.find(_CONTEXT_TOKENS)
        if tokens is not None and tokens.isdigit():
            record.num_context_tokens = int(tokens)
