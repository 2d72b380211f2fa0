"""`torchmoor serve` with real TorchServe instances of another proxy: weighted variants of one endpoint."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.torchserve.configured_proxy import serve_configured
from tests.torchserve.conftest import Fleet
from tests.waiting import wait_until

pytestmark = pytest.mark.torchserve
WEIGHTS = {"blue": 3, "green": 1, "dark": 0}
BODY = json.dumps(
    {"inputs": "<s><|user|>What is in the image?<|end|><|assistant|>", "parameters": {"max_new_tokens": 1}}
)


@pytest.fixture(scope="module")
def split(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run three variants; the one of weight 0 shares its instance with the green one."""
    one, two = fleet.instances()
    variants = [
        {"VariantName": name, "ModelName": "llava", "InitialVariantWeight": weight} for name, weight in WEIGHTS.items()
    ]
    content = {
        "Endpoints": [{"EndpointConfig": {"EndpointConfigName": "chat", "ProductionVariants": variants}}],
        "Instances": [
            {"name": name, "variant": name, "host": instance["host"], "port": instance["port"]}
            for name, instance in (("blue", one), ("green", two), ("dark", two))
        ],
    }
    with serve_configured(fleet, tmp_path_factory.mktemp("split"), content) as running:
        wait_until(lambda: all(i["state"] == "ready" for i in running.instances()), "all instances ready")
        yield running


def invoke(client: Any, **arguments: str) -> str:
    """Invoke the endpoint and return the variant that answered."""
    answer = client.invoke_endpoint(EndpointName="chat", ContentType="application/json", Body=BODY, **arguments)
    assert json.loads(answer["Body"].read())[0]["generated_text"] is not None
    return str(answer["InvokedProductionVariant"])


def test_traffic_is_split_by_weight(split: Fleet) -> None:
    """Traffic is three quarters to one quarter, none to the variant of weight 0; metrics are counted by variant."""
    client, before = split.client(), count_green(split)

    shares = Counter(invoke(client) for _ in range(100))

    assert shares.keys() == {"blue", "green"}
    assert shares["blue"] > shares["green"] > 5  # of 25; fewer occur once in ten million runs
    assert count_green(split) - before == shares["green"]


def count_green(split: Fleet) -> float:
    numbers = requests.get(f"{split.admin}/metrics", timeout=30).text
    [count] = re.findall(r'^Invocations_total\{endpoint="chat",variant="green"\} (.+)$', numbers, re.MULTILINE)
    return float(count)


@pytest.mark.parametrize("variant", WEIGHTS)
def test_target_variant_goes_before_weights(split: Fleet, variant: str) -> None:
    """A target variant is used even with weight 0, whole and streamed."""
    client = split.client()

    assert invoke(client, TargetVariant=variant) == variant
    answer = client.invoke_endpoint_with_response_stream(
        EndpointName="chat", ContentType="application/json", Body=BODY, TargetVariant=variant
    )
    assert answer["InvokedProductionVariant"] == variant
    assert list(answer["Body"])


def test_unknown_variant_is_refused(split: Fleet) -> None:
    """The error has the service's wording."""
    client = split.client()

    with pytest.raises(client.exceptions.ClientError, match="Variant pink not found for endpoint chat"):
        invoke(client, TargetVariant="pink")
