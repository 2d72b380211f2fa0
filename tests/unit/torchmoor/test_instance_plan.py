"""The instances that a host may have."""

import pytest

from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.config.scaling import ScalingSettings
from torchmoor.errors import ConfigError
from torchmoor.fleet.torchserve import Launch
from torchmoor.proxy.instances.registry import Registry
from torchmoor.run.launching import plan_instances

TWO = ScalingSettings(max_capacity=2)


def endpoint(name: str, *variants: str, scaling: ScalingSettings | None = TWO) -> EndpointSettings:
    return EndpointSettings(
        name=name, variants=tuple(VariantSettings(name=each, model="llava", scaling=scaling) for each in variants)
    )


def test_every_instance_that_may_run_is_planned() -> None:
    """Up to MaxCapacity instances of each scaled variant are planned, spread over the GPUs.

    Each is named after its endpoint, and after its variant where there are several.
    """
    planned = plan_instances(
        [endpoint("Chat", "AllTraffic"), endpoint("fixed", "v", scaling=None), endpoint("ab", "Blue", "Green")],
        ["0", "1"],
    )

    assert planned == [
        Launch("chat-0", "Chat", "llava.mar", "0", "AllTraffic"),
        Launch("chat-1", "Chat", "llava.mar", "1", "AllTraffic"),
        Launch("ab-blue-0", "ab", "llava.mar", "0", "Blue"),
        Launch("ab-blue-1", "ab", "llava.mar", "1", "Blue"),
        Launch("ab-green-0", "ab", "llava.mar", "0", "Green"),
        Launch("ab-green-1", "ab", "llava.mar", "1", "Green"),
    ]


def test_a_name_leads_to_its_variant_without_the_instance() -> None:
    """A name leads to its variant without the instance, so that sessions find it; other names lead nowhere."""
    settings = [endpoint("ab", "Blue", "Green")]
    (found,) = Registry(settings).endpoints()

    variants = {launch.name: launch.variant for launch in plan_instances(settings, [])}

    assert {name: variant.name for name in variants if (variant := found.find_variant_of(name))} == variants
    assert found.find_variant_of("other-0") is None


@pytest.mark.parametrize(
    ("endpoints", "reason"),
    [
        ([endpoint("a--b", "v")], "'a--b-0', and names of instances have a-z, 0-9 and single hyphens, 63 at most"),
        ([endpoint("a--b", "v", scaling=None)], "single hyphens"),
        ([endpoint("a" * 62, "v")], "63 at most"),
        ([endpoint("chat", "v"), endpoint("Chat", "v")], "of one name"),
    ],
)
def test_names_that_would_be_none_or_the_same_are_refused(endpoints: list[EndpointSettings], reason: str) -> None:
    """Invalid or equal names are refused, because session ids contain them."""
    with pytest.raises(ConfigError, match=reason):
        plan_instances(endpoints, [], num_fixed=1)
