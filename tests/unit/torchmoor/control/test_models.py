"""Endpoint configurations that no endpoint could serve are refused at once."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from torchmoor.config.control import ControlSettings
from torchmoor.control.arns import Arns
from torchmoor.control.models import Models
from torchmoor.control.resources import Resource, Resources
from torchmoor.errors import RequestInvalid

ASYNC = {"AsyncInferenceConfig": {"OutputConfig": {}}}


def variant(name: str, model: str = "one", **values: Any) -> dict[str, Any]:
    return {"VariantName": name, "ModelName": model, "InitialInstanceCount": 1, **values}


def make_models(resources: Resources) -> Models:
    """Return the operations; endpoints that no client created have a model and a configuration of each name."""
    arns = Arns("us-east-1", "000000000000")
    return Models(
        resources,
        arns,
        lambda container: None,
        lambda model: {"ModelName": model},
        lambda config: {"EndpointConfigName": config},
    )


def test_what_clients_created_is_described_before_what_is_served(tmp_path: Path) -> None:
    resources = Resources(tmp_path, ControlSettings())
    resources.models["one"] = Resource({"ModelName": "one", "ExecutionRoleArn": "role"}, 0.0)
    resources.configs["one"] = Resource({"EndpointConfigName": "one", "KmsKeyId": "key"}, 0.0)
    operations: Any = make_models(resources).operations()

    assert operations["DescribeModel"]({"ModelName": "one"})["ExecutionRoleArn"] == "role"
    assert operations["DescribeModel"]({"ModelName": "other"}) == {"ModelName": "other"}
    assert operations["DescribeEndpointConfig"]({"EndpointConfigName": "one"})["KmsKeyId"] == "key"
    assert operations["DescribeEndpointConfig"]({"EndpointConfigName": "other"}) == {"EndpointConfigName": "other"}


@pytest.mark.parametrize(
    ("variants", "more", "problem"),
    [
        ([variant("a"), variant("a")], {}, r"different names, not \['a', 'a'\]"),
        ([variant("a", InitialVariantWeight=0.0), variant("b", InitialVariantWeight=0.0)], {}, "a weight above 0"),
        ([variant("a", "many")], ASYNC, "AsyncInferenceConfig is not for models in Mode MultiModel. Model many is one"),
        ([{"VariantName": "a", "InitialInstanceCount": 1}], {}, "Variant a has no ModelName"),
        ([variant("a"), variant("b", "gone")], {}, "Could not find model"),
        ([variant("a", InitialVariantWeight=0.0), variant("b")], ASYNC, ""),
        ([variant("a", "many")], {}, ""),
    ],
)
def test_a_configuration_is_refused_before_an_endpoint_needs_it(
    tmp_path: Path, variants: list[dict[str, Any]], more: dict[str, Any], problem: str
) -> None:
    resources = Resources(tmp_path, ControlSettings())
    resources.models["one"] = Resource({"PrimaryContainer": {"ModelDataUrl": "s3://bucket/m.mar"}}, 0.0)
    container = {"ModelDataUrl": "s3://bucket/m/", "Mode": "MultiModel"}
    resources.models["many"] = Resource({"PrimaryContainer": container}, 0.0)
    models = make_models(resources)

    async def create() -> None:
        answer: Any = models.operations()["CreateEndpointConfig"](
            {"EndpointConfigName": "c", "ProductionVariants": variants, **more}
        )
        await answer

    if problem:
        with pytest.raises(RequestInvalid, match=problem):
            asyncio.run(create())
    else:
        asyncio.run(create())
    assert bool(resources.configs) == (not problem)
