"""The protocol of a dialect: how one API's requests are sent on, and how answers and errors look in it."""

from __future__ import annotations

from typing import Protocol

from torchmoor.errors import ApiError
from torchmoor.proxy.dispatch.choice import Choice
from torchmoor.proxy.http.answer import Answer
from torchmoor.proxy.http.call import ReadRefusal
from torchmoor.proxy.http.message import AnswerHead, Reply, Request
from torchmoor.proxy.instances.registry import Endpoint


class Answering(Protocol):
    """An invocation, as its dialect sees it when an instance has answered."""

    request: Request
    request_id: bytes

    @property
    def chosen(self) -> Choice:
        """The choice of the instance that answers."""
        ...

    def fail(self, error: ApiError) -> Reply:
        """Render an error, and count it."""
        ...

    def note_error(self, status: int, kind: str) -> None:
        """Record an error that the dialect renders itself."""
        ...

    def note_first_chunk(self) -> None:
        """Record the time to the first chunk of a stream."""
        ...


class ApiDialect(Protocol):
    """Shared by all requests of an operation, so it keeps nothing of a request.

    operation_name: for the access log, traces and decisions. names_sessions_in_body: a request without a session
    header may name one in its body. held_back: names of fields that do not pass on, beside those that never do.
    too_large_status: the status for a body above the limit.
    """

    operation_name: str
    names_sessions_in_body: bool = True
    held_back: frozenset[bytes] = frozenset()
    too_large_status: int = 413

    def added_lines(self, request: Request) -> bytes:
        """Render header lines for the instance beside the fields that pass on."""
        return b""

    def error(self, error: ApiError, request_id: bytes, endpoint: Endpoint) -> Reply:
        """Render an error."""
        ...

    def answer(self, invocation: Answering, head: AnswerHead) -> Answer | ReadRefusal:
        """Render the answer's head and choose its encoder, or read the body to explain a refusal."""
        ...
