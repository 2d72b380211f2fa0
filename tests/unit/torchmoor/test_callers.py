"""The account of what each caller uses."""

from __future__ import annotations

import pytest

from torchmoor.config.access import Credentials
from torchmoor.config.limits import CallerSettings
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.config.settings import ProxySettings
from torchmoor.errors import CallerLimited
from torchmoor.proxy.dispatch.callers import Callers
from torchmoor.run.processes.limits import divide

ENDPOINTS = (EndpointSettings(name="chat", variants=(VariantSettings(model="chat"),)),)
WITH_TOKENS = Credentials(tokens={"alice": "token-of-alice-0123456789"})


def test_a_caller_at_its_limit_is_refused_and_others_are_not() -> None:
    """The refusal names the setting and says when to try again."""
    callers = Callers(CallerSettings(max_requests=2))
    held = [callers.lease_request("alice", "10.0.0.1") for _ in range(2)]

    with pytest.raises(CallerLimited, match=r"callers\.max_requests is 2\. Try again in 1 s\.") as caught:
        callers.lease_request("alice", "10.0.0.2")
    callers.lease_request("bob", "10.0.0.1").release()

    assert (caught.value.status, caught.value.kind, caught.value.retry_after_s) == (429, "ThrottlingException", 1)
    assert callers.num_refused == {"max_requests": 1}
    held[0].release()
    callers.lease_request("alice", "10.0.0.1").release()


def test_a_lease_returns_its_share_once() -> None:
    """A lease that is released twice does not free another request's share; an idle caller leaves no entry."""
    callers = Callers(CallerSettings(max_requests=2))
    first, second = callers.lease_request("alice", ""), callers.lease_request("alice", "")

    first.release()
    first.release()
    assert callers.num_requests == {"alice": 1}

    second.release()
    assert len(callers.num_requests) == 0


def test_without_keys_a_client_address_is_a_caller() -> None:
    """An IPv6 client counts with its network of 64 bits."""
    callers = Callers(CallerSettings(max_requests=1))
    callers.lease_request("", "2001:db8::1")
    callers.lease_request("", "10.0.0.1")

    with pytest.raises(CallerLimited):
        callers.lease_request("", "2001:db8::2")
    with pytest.raises(CallerLimited):
        callers.lease_request("", "::ffff:10.0.0.1")
    callers.lease_request("", "2001:db8:0:1::1")


@pytest.mark.parametrize(
    ("limited", "credentials", "applies"),
    [
        ("with-keys", Credentials(), False),
        ("with-keys", WITH_TOKENS, True),
        ("always", Credentials(), True),
        ("never", WITH_TOKENS, False),
    ],
)
def test_limits_apply_with_keys_unless_configured(limited: str, credentials: Credentials, applies: bool) -> None:
    """Without keys all clients would be one caller behind a load balancer, so the default is off."""
    settings = ProxySettings(
        endpoints=ENDPOINTS,
        callers=CallerSettings(limited=limited),
        credentials=credentials,  # type: ignore[arg-type]
    )

    assert settings.limits_callers is applies


def test_each_process_has_its_part() -> None:
    """Several processes together allow what is configured."""
    settings = ProxySettings(endpoints=ENDPOINTS, callers=CallerSettings(max_requests=6))

    assert divide(settings, 4).callers.max_requests == 2
