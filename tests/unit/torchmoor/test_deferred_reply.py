"""Replies that wait for an operation, and their time."""

from torchmoor.errors import ValidationError
from torchmoor.proxy.api.deferred_reply import DeferredReply
from torchmoor.proxy.api.replies import runtime_error
from torchmoor.proxy.http.call import WAIT
from torchmoor.proxy.http.head import Layout
from torchmoor.proxy.http.message import Request, RequestLine

TIMEOUT_S, BODY_S = 30.0, 50.0


class SlowUpload:
    """A waiter whose request's body took longer than the operation may take."""

    complete_at = BODY_S
    source = ""


def test_the_time_of_an_operation_begins_with_it() -> None:
    """The time of an operation begins after its body has arrived, so that a slow upload does not use it up."""
    line = RequestLine(b"POST", b"/endpoints/llava/async-invocations", b"", is_http10=False)
    reply = DeferredReply(
        None,
        Request(line, [], Layout([]), received_at=0.0),
        b"1",
        lambda deferred, body: None,
        runtime_error,
        too_large=ValidationError("too long"),
        max_body_bytes=1,
        timeout_s=TIMEOUT_S,
    )

    assert reply.route(b"", SlowUpload()) is WAIT

    assert reply.wait_ends_at == BODY_S + TIMEOUT_S
