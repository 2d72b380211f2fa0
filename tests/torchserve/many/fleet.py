"""Use a running fleet with many models: send requests with or without the proxy, operate and inspect it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import requests

from tests.torchserve.conftest import Fleet
from tests.torchserve.many.population import Population, Variant
from tests.torchserve.many.reference import TEXTS, Reference
from tests.waiting import wait_until

TARGET_MODEL = "X-Amzn-SageMaker-Target-Model"
FIRST, SECOND = "many-0", "many-1"  # the instances


@dataclass
class ManyFleet:
    """The running fleet, its models, and their expected answers."""

    fleet: Fleet
    population: Population
    reference: Reference = field(default_factory=Reference)

    def variant(self, name: str) -> Variant:
        (found,) = [variant for variant in self.population.variants if variant.name == name]
        return found

    def invoke(self, model: str, body: Any, http: requests.Session | None = None) -> requests.Response:
        """Invoke a model through the proxy."""
        url = f"{self.fleet.runtime}/endpoints/many/invocations"
        return (http or requests).post(url, json=body, headers={TARGET_MODEL: model}, timeout=120)

    def is_right(self, variant: Variant, text: int, answer: requests.Response) -> bool:
        """Return whether an answer is this variant's for one of TEXTS."""
        return answer.status_code == 200 and self.reference.is_right(variant, text, answer.json()["embeddings"])

    def answers_rightly(self, name: str, text: int = 0) -> bool:
        """Invoke a variant through the proxy and check its answer."""
        return self.is_right(self.variant(name), text, self.invoke(name, {"inputs": TEXTS[text]}))

    # One instance, without the proxy

    def instance(self, name: str = FIRST) -> dict[str, Any]:
        (found,) = [each for each in self.fleet.instances() if each["name"] == name]
        return found

    def address(self, name: str = FIRST) -> str:
        instance = self.instance(name)
        return f"http://{instance['host']}:{instance['port']}/predictions/many"

    def ask(self, model: str | None, body: Any, **options: Any) -> requests.Response:
        headers = {} if model is None else {TARGET_MODEL: model}
        return requests.post(self.address(), json=body, headers=headers, timeout=120, **options)

    def operate(self, operation: str, body: Any) -> requests.Response:
        return requests.post(self.address(), json=body, headers={"X-Torchmoor-Operation": operation}, timeout=120)

    def status(self) -> dict[str, Any]:
        return self.operate("status", {}).json()

    def tier_of(self, name: str) -> str | None:
        """Return a model's tier in the first instance; None if it is unknown there."""
        return next((model["tier"] for model in self.status()["models"] if model["name"] == name), None)

    def worker(self, name: str = FIRST) -> int:
        """Return the process id of an instance's worker, as TorchServe reports it."""
        url = f"http://127.0.0.1:{self.instance(name)['management_port']}/models/many"
        (described,) = requests.get(url, timeout=60).json()
        (worker,) = described["workers"]
        return worker["pid"]

    @contextmanager
    def only_the_first(self) -> Iterator[None]:
        """Route no requests to the other instance until the context ends."""
        requests.post(f"{self.fleet.admin}/instances/{SECOND}/drain", timeout=60).raise_for_status()
        try:
            yield
        finally:
            requests.post(f"{self.fleet.admin}/instances/{SECOND}/resume", timeout=60).raise_for_status()
            wait_until(lambda: self.instance(SECOND)["state"] == "ready", "the other instance is back")


def error_of(answer: requests.Response) -> str:
    """Return a worker's own error message."""
    return json.loads(answer.content)["error"]["message"]
