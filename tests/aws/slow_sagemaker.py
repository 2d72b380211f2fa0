"""Add what moto's SageMaker lacks: endpoints that change slowly, fail, are updated and are rolled back.

moto's own endpoints are InService at once. Here a test lists the states of an endpoint, which advances by one state
each time it is described. Requests that SageMaker refuses while it changes an endpoint are refused.
"""

from typing import Any

import pytest
from moto.core.exceptions import JsonRESTError
from moto.core.responses import ActionResult
from moto.sagemaker.exceptions import ValidationError
from moto.sagemaker.models import FakeEndpoint, SageMakerModelBackend
from moto.sagemaker.responses import SageMakerResponse

BUSY = {"Creating", "Updating", "RollingBack", "Deleting"}
Step = dict[str, Any]  # an attribute of moto's endpoint

SERVING: Step = {"endpoint_status": "InService"}
CREATED: list[Step] = [{"endpoint_status": "Creating"}, SERVING]


def fails(reason: str) -> list[Step]:
    """Return the states of a creation that fails."""
    return [{"endpoint_status": "Creating"}, {"endpoint_status": "Failed", "failure_reason": reason}]


class SlowSageMaker:
    """A patched moto SageMaker for one test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.creation = list(CREATED)
        self.update: list[Step] = [{"endpoint_status": "Updating"}, SERVING]
        self.is_taken_back = False  # the next update ends with the previous configuration
        self.refusal: JsonRESTError | None = None  # of creations and updates
        self.updates: list[dict[str, Any]] = []  # requests
        self._steps: dict[str, list[Step]] = {}
        describe, create, delete = (
            getattr(SageMakerModelBackend, f"{verb}_endpoint") for verb in ("describe", "create", "delete")
        )

        def create_endpoint(backend: Any, endpoint_name: str, *args: Any, **options: Any) -> FakeEndpoint:
            if self.refusal is not None:
                raise self.refusal
            endpoint: FakeEndpoint = create(backend, endpoint_name, *args, **options)
            self._begin(endpoint, self.creation)
            return endpoint

        def describe_endpoint(backend: Any, endpoint_name: str) -> Any:
            endpoint = backend.endpoints.get(endpoint_name)
            steps = self._steps.get(endpoint_name)
            if endpoint is not None and steps:
                step = steps.pop(0)
                if step is _GONE:
                    delete(backend, endpoint_name)
                else:
                    _apply(endpoint, step)
            return describe(backend, endpoint_name)

        def update_endpoint(response: Any) -> ActionResult:
            asked = {key: response._get_param(key) for key in ("EndpointName", "EndpointConfigName")}
            if self.refusal is not None:
                raise self.refusal
            backend = response.sagemaker_backend
            endpoint = backend.endpoints[asked["EndpointName"]]
            if endpoint.endpoint_status in BUSY:
                raise ValidationError(message="Cannot update in-progress endpoint")
            more = ("RetainAllVariantProperties", "DeploymentConfig")
            self.updates.append(asked | {key: response._get_param(key) for key in more})
            backend.describe_endpoint_config(asked["EndpointConfigName"])
            steps = [dict(step) for step in self.update]
            if not self.is_taken_back:
                steps[-1]["endpoint_config_name"] = asked["EndpointConfigName"]
            self._begin(endpoint, steps)
            return ActionResult({"EndpointArn": endpoint.arn})

        def delete_endpoint(backend: Any, endpoint_name: str) -> None:
            endpoint = backend.endpoints.get(endpoint_name)
            if endpoint is not None and endpoint.endpoint_status in BUSY:
                raise ValidationError(message="Cannot update in-progress endpoint")
            if endpoint is None:
                delete(backend, endpoint_name)
                return
            self._begin(endpoint, [{"endpoint_status": "Deleting"}, _GONE])

        monkeypatch.setattr(SageMakerModelBackend, "create_endpoint", create_endpoint)
        monkeypatch.setattr(SageMakerModelBackend, "describe_endpoint", describe_endpoint)
        monkeypatch.setattr(SageMakerModelBackend, "delete_endpoint", delete_endpoint)
        monkeypatch.setattr(SageMakerResponse, "update_endpoint", update_endpoint, raising=False)

    def _begin(self, endpoint: FakeEndpoint, steps: list[Step]) -> None:
        """Start a change; its first state is what the next description shows."""
        _apply(endpoint, steps[0])
        self._steps[endpoint.endpoint_name] = list(steps)


_GONE: Step = {}


def _apply(endpoint: FakeEndpoint, step: Step) -> None:
    for name, value in step.items():
        setattr(endpoint, name, value)
