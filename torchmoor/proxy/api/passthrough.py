"""Dialects that send an instance's answers and errors to the client unchanged."""

from __future__ import annotations

from torchmoor.errors import ApiError, ServiceUnavailable
from torchmoor.proxy.api.dialect import NOT_FOR_CLIENTS, ApiDialect, Explain
from torchmoor.proxy.api.replies import container_error, message_of
from torchmoor.proxy.dispatch import unavailable
from torchmoor.proxy.http.answer import Answer
from torchmoor.proxy.http.field_names import ERROR_CODE, REQUEST_ID
from torchmoor.proxy.http.message import AnswerHead, Reply
from torchmoor.proxy.instances.endpoint import Endpoint
from torchmoor.wire import headers
from torchmoor.wire.error_codes import TORCHSERVE_BUSY

REQUEST_ID_LINE = f"{headers.REQUEST_ID}: ".encode()

_DROPPED_FIELDS = NOT_FOR_CLIENTS | {REQUEST_ID}


class PassThroughDialect(ApiDialect):
    """Answers are forwarded unchanged. A stream that breaks off ends the client's connection."""

    operation_name = "PassThrough"

    def error(self, error: ApiError, request_id: bytes, endpoint: Endpoint) -> Reply:
        """Render an error in the handlers' form; a time-out is reported as the proxy's."""
        return container_error(error, request_id)

    def answer(self, head: AnswerHead, request_id: bytes) -> Answer | Explain:
        lines = head.lines(_DROPPED_FIELDS)
        return Answer((head.line.client_line, lines, REQUEST_ID_LINE, request_id, b"\r\n"))

    def is_stream(self, head: AnswerHead) -> bool:
        return head.status < 300 and head.layout.length is None


def explain(head: AnswerHead, body: bytes) -> ApiError:
    """Make an error from an instance's refusal, for dialects that have their own form of errors."""
    if head.find(ERROR_CODE) is None and head.status in TORCHSERVE_BUSY:
        return ServiceUnavailable(unavailable.TORCHSERVE_BUSY)
    return ApiError(message_of(body), status=head.status, retry_after_s=head.retry_after_s)
