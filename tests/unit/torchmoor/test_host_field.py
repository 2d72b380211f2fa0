"""The Host field of requests to instances."""

from collections.abc import Callable

import pytest

from torchmoor.metrics.invocations import InvocationMetrics
from torchmoor.proxy.dispatch.chooser import Choice
from torchmoor.proxy.dispatch.id_operations import IdOperations
from torchmoor.proxy.instances.instance import Instance


class Sent:
    """Subrequests that only keep their bytes."""

    def __init__(self) -> None:
        self.data = b""

    def send(self, target: Instance, data: bytes, on_over: Callable[[], None]) -> None:
        self.data += data


@pytest.mark.parametrize(("host", "field"), [("10.0.0.5", b"10.0.0.5:8085"), ("fd77::11", b"[fd77::11]:8085")])
def test_an_ipv6_address_has_brackets(host: str, field: bytes) -> None:
    """An IPv6 address in Host has brackets (RFC 9110 7.2); otherwise a proxy in between would refuse it."""
    instance = Instance(name="a", endpoint="llava", model="llava", host=host, port=8085)
    sent = Sent()

    IdOperations(sent, "cancel", "request_ids").send(instance, b"/predictions/llava", "1")
    choice = Choice(instance, "random", b"AllTraffic", InvocationMetrics("llava", "AllTraffic").decisions["random"])

    assert b"\r\nhost: %b\r\n" % field in sent.data
    assert choice.request_line.endswith(b"\r\nhost: %b\r\n" % field)
