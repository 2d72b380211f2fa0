"""Descriptions of endpoints that no client created, checked against the service's own model."""

from typing import Any

import botocore.session
import pytest
from botocore.validate import ParamValidator

from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.control.arns import Arns
from torchmoor.control.endpoint_views import EndpointViews
from torchmoor.proxy.instances.instance import Instance
from torchmoor.proxy.instances.registry import Registry


@pytest.mark.parametrize("count", [0, 2])
def test_a_configuration_has_a_count_that_the_service_allows(count: int) -> None:
    """A variant without an instance has no InitialInstanceCount: the service's least is 1, and it may be absent."""
    registry = Registry([EndpointSettings(name="e", variants=(VariantSettings(model="m"),))])
    for number in range(count):
        registry.add(Instance(name=f"e-{number}", endpoint="e", model="m", port=1))
    views = EndpointViews(registry, Arns("us-east-1", "123456789012"), {}, None, "")

    described = views.describe_config("e")

    shape: Any = botocore.session.get_session().get_service_model("sagemaker").shape_for("DescribeEndpointConfigOutput")
    answer = {key: value for key, value in described.items() if value is not None}
    [variant] = answer["ProductionVariants"]
    answer["ProductionVariants"] = [{key: value for key, value in variant.items() if value is not None}]
    assert ParamValidator().validate(answer, shape).generate_report() == ""
    assert variant["InitialInstanceCount"] == (count or None)
