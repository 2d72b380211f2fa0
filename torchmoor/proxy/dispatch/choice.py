"""A chosen instance, the reason, and the header lines for both."""

from __future__ import annotations

from torchmoor.metrics.invocations import Tally
from torchmoor.proxy.instances.instance import Instance
from torchmoor.wire import headers

_ANSWER_LINES = f"{headers.INSTANCE}: %b\r\n{headers.INVOKED_ROUTING_REASON}: %b\r\n".encode()
_VARIANT_LINE = f"{headers.INVOKED_VARIANT}: %b\r\n%b".encode()


class Choice:
    """An instance and a reason, kept with their header lines because each is used often.

    request_line: the end of the request line, and the host line. answer_lines: name the instance and the reason.
    runtime_lines: name the variant too, for the runtime API. tally: counts the reason over all instances of the
    variant.
    """

    __slots__ = ("instance", "reason", "tally", "request_line", "answer_lines", "runtime_lines")

    def __init__(self, instance: Instance, reason: str, variant: bytes, tally: Tally) -> None:
        self.instance = instance
        self.reason = reason
        self.tally = tally
        self.request_line = b" HTTP/1.1\r\nhost: %b\r\n" % instance.authority().encode()
        self.answer_lines = _ANSWER_LINES % (instance.name.encode(), reason.encode())
        self.runtime_lines = _VARIANT_LINE % (variant, self.answer_lines)
