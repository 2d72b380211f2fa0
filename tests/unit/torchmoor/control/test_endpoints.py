"""What an update keeps of the configuration before."""

from __future__ import annotations

from typing import Any

import pytest

from torchmoor.control.endpoints import retain_properties
from torchmoor.control.resources import EndpointResource


def make_resource(*variants: str, **given: Any) -> EndpointResource:
    config = {
        "ProductionVariants": [
            {"VariantName": name, "ModelName": "m", "InitialInstanceCount": 1, "InitialVariantWeight": 1.0}
            for name in variants
        ]
    }
    return EndpointResource(config_name="c", config=config, models={}, serial=1, created=0.0, modified=0.0, **given)


@pytest.mark.parametrize(
    ("values", "weight", "count"),
    [
        ({}, 1.0, 1),
        ({"RetainAllVariantProperties": False}, 1.0, 1),
        ({"RetainAllVariantProperties": True}, 3.0, 4),
        (
            {
                "RetainAllVariantProperties": True,
                "ExcludeRetainedVariantProperties": [{"VariantPropertyType": "DesiredInstanceCount"}],
            },
            3.0,
            1,
        ),
        (
            {
                "RetainAllVariantProperties": True,
                "ExcludeRetainedVariantProperties": [{"VariantPropertyType": "DesiredWeight"}],
            },
            1.0,
            4,
        ),
    ],
)
def test_an_update_retains_what_it_asks_for(values: dict[str, Any], weight: float, count: int) -> None:
    """Of the variants that both configurations have."""
    old, new = make_resource("a", "gone", weights={"a": 3.0}, counts={"a": 4}), make_resource("a", "new")

    retain_properties(values, old, new)

    kept, added = new.config["ProductionVariants"]
    assert (new.weight_of(kept), new.count_of(kept)) == (weight, count)
    assert (new.weight_of(added), new.count_of(added)) == (1.0, 1)
