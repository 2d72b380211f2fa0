"""Instances and their leases, the registry, and the settings."""

import pytest

from torchmoor.config.limits import LimitSettings
from torchmoor.config.listen import ListenSettings
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.config.sessions import SessionIdSettings
from torchmoor.config.settings import ProxySettings
from torchmoor.errors import ConfigError, UnknownEndpoint, UnknownInstance
from torchmoor.proxy.http.outgoing import ReplayBudget
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry

ENDPOINT = EndpointSettings(name="llava", variants=(VariantSettings(model="llava"),))


class FakeConnection:
    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def make_instance(name: str = "a") -> Instance:
    return Instance(name=name, endpoint="llava", model="llava", port=1)


def test_lease_counts_once_however_often_it_is_released() -> None:
    """A lease counts up at its start and down at its first release only."""
    instance = make_instance()

    first, second = instance.lease(), instance.lease()
    first.release()
    first.release()

    assert instance.outstanding == 1
    second.release()
    assert instance.outstanding == 0


def test_registry_knows_instances_by_name_and_endpoint() -> None:
    """Instances are added, found, replaced and removed by name and endpoint."""
    registry = Registry([ENDPOINT])
    old, new = make_instance(), make_instance()

    registry.add(old)
    registry.add(new)

    assert [new] == list(registry.get_endpoint("llava").instances) == list(registry.instances())
    assert new is registry.find("a")
    registry.remove("a")
    assert list(registry.get_endpoint("llava").instances) == []
    assert registry.find("a") is None


def test_unknown_names_are_errors() -> None:
    """An unknown endpoint, variant or instance raises its own error."""
    registry = Registry([ENDPOINT])

    with pytest.raises(UnknownEndpoint):
        registry.add(Instance(name="a", endpoint="other", model="llava", port=1))
    with pytest.raises(UnknownEndpoint):
        registry.get_endpoint("other")
    with pytest.raises(UnknownInstance):
        registry.remove("a")
    with pytest.raises(UnknownInstance):
        registry.set_state("a", InstanceState.READY)


def test_instance_that_goes_down_loses_its_idle_connections() -> None:
    """An instance that goes down loses its idle connections, because their process is gone."""
    registry = Registry([ENDPOINT])
    instance, connection = make_instance(), FakeConnection()
    registry.add(instance)
    instance.idle.append(connection)

    registry.set_state("a", InstanceState.DOWN)

    assert connection.is_closed
    assert instance.idle == []
    assert not registry.get_endpoint("llava").has_ready_instance()


def test_an_instance_that_goes_down_or_comes_back_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Going down and coming back, also as another process, are logged by default.

    Starts, drains and removals are not.
    """
    registry = Registry([ENDPOINT])
    registry.add(make_instance())
    registry.set_state("a", InstanceState.READY)
    registry.drain("a")
    registry.resume("a")
    assert caplog.text == ""

    registry.set_state("a", InstanceState.DOWN)
    registry.add(make_instance())
    registry.set_state("a", InstanceState.READY)
    registry.set_state("a", InstanceState.DOWN)
    registry.set_state("a", InstanceState.READY)

    assert [record.getMessage() for record in caplog.records] == [
        "instance state instance=a from=ready to=down",
        "instance state instance=a from=starting to=ready",
        "instance state instance=a from=ready to=down",
        "instance state instance=a from=down to=ready",
    ]
    registry.set_state("a", InstanceState.DOWN)
    registry.dismiss("a")
    registry.add(make_instance())
    registry.set_state("a", InstanceState.READY)
    assert len(caplog.records) == 5


def test_replay_budget_is_bounded_in_total() -> None:
    """The total of kept bodies is limited; a body beyond it is not kept."""
    budget = ReplayBudget(max_body_bytes=10, max_total_bytes=15)

    assert budget.try_take(10)
    assert not budget.try_take(10)
    budget.release(10)
    assert budget.try_take(10)


def test_session_keys_are_read_from_the_environments_form() -> None:
    """Session keys have the form kid:hex; of several, the first signs."""
    settings = SessionIdSettings.parse("k1:" + "00" * 16 + ", k2:" + "11" * 16)

    assert {"k1": bytes(16), "k2": b"\x11" * 16} == dict(settings.keys)
    assert "11" not in repr(settings)


@pytest.mark.parametrize("text", ["k1:zz", "k1:00", "K1:" + "00" * 16, "abc:" + "00" * 16, "00" * 16])
def test_bad_session_keys_are_named_without_being_told(text: str) -> None:
    """ConfigError never shows a key."""
    with pytest.raises(ConfigError, match=r"^TORCHMOOR_SESSION_KEYS must be ") as caught:
        SessionIdSettings.parse(text)
    assert "00" * 8 not in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: EndpointSettings(name="a_b", variants=(VariantSettings(model="m"),)),
        lambda: VariantSettings(model=""),
        lambda: Registry((ENDPOINT.replace(variants=(VariantSettings(model="m", routing_strategy="BEST"),)),)),
        lambda: ListenSettings(port=70000),
        lambda: LimitSettings(max_body_bytes=0),
        lambda: ProxySettings(endpoints=()),
        lambda: ProxySettings(endpoints=(ENDPOINT, ENDPOINT)),
    ],
)
def test_bad_settings_are_refused_at_once(make: object) -> None:
    """ConfigError names the key."""
    with pytest.raises(ConfigError):
        make()
