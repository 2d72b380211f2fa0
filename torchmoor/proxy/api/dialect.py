"""The protocol of a dialect: how requests of one API are sent to instances, and the form of its answers and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torchmoor.config.limits import LimitSettings
from torchmoor.errors import ApiError
from torchmoor.proxy.http.answer import Answer
from torchmoor.proxy.http.field_names import CONTINUABLE, DATE, STREAM_NEXT
from torchmoor.proxy.http.message import AnswerHead, Reply, Request
from torchmoor.proxy.instances.endpoint import Endpoint

NOT_FOR_CLIENTS = frozenset((STREAM_NEXT, CONTINUABLE, DATE))
"""Fields of instances' answers that the clients of no API get. The proxy gives each answer a date of its own."""

Explain = Callable[[AnswerHead, bytes], ApiError]
"""Makes the client's error from the head and the body of an instance's refusal."""


class ApiDialect(Protocol):
    """One object serves all requests of an operation, so it has no state of a single request.

    operation_name: for the access log, traces and decisions. names_sessions_in_header: a request's session header names
    its session. names_sessions_in_body: a request without that header may name one in its body. held_back: names of
    fields that are not forwarded, besides those that never are. sent_method: of requests to instances; empty for the
    client's own. names_variant: its answers name the variant that gave them. has_stream_deadlines: its answers may take
    as long as streams; without it, a stream has the time of a whole answer.
    """

    operation_name: str
    names_sessions_in_header: bool = True
    names_sessions_in_body: bool = True
    held_back: frozenset[bytes] = frozenset()
    sent_method: bytes = b""
    names_variant: bool = False
    has_stream_deadlines: bool = True

    @staticmethod
    def max_body_bytes(limits: LimitSettings) -> int:
        """Return the setting for the longest body of this API's requests."""
        return limits.max_passthrough_body_bytes

    def check(self, request: Request, request_id: bytes, endpoint: Endpoint) -> None:
        """Raise ApiError for a request that this API refuses, besides the checks of every API."""
        return

    def added_lines(self, request: Request) -> bytes:
        """Render header lines for the instance, added to the client's fields that are forwarded."""
        return b""

    def error(self, error: ApiError, request_id: bytes, endpoint: Endpoint) -> Reply:
        """Render an error."""
        ...

    def is_stream(self, head: AnswerHead) -> bool:
        """Return whether an answer is a stream, of which metrics have the time to the first chunk."""
        return False

    def answer(self, head: AnswerHead, request_id: bytes) -> Answer | Explain:
        """Render the answer's head and choose its encoder, or say how a refusal is explained."""
        ...
