"""Updates that keep parts of the previous configuration, asynchronous requests of changed endpoints, and counts."""

import asyncio
import copy
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.unit.torchmoor.async_inference.rig import until
from tests.waiting import DEADLINE_S
from torchmoor.config.async_inference import AsyncEndpointSettings
from torchmoor.config.control import ControlSettings
from torchmoor.control.arns import Arns
from torchmoor.control.autoscaling import ScalableTargets
from torchmoor.control.endpoints import DELETED, NOT_ASYNC, Endpoints, retain_properties
from torchmoor.control.resources import EndpointResource, Resource, Resources
from torchmoor.errors import LimitExceeded, RequestInvalid
from torchmoor.proxy.instances.registry import Registry


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
    """An update retains the requested properties of variants that both configurations have."""
    old, new = make_resource("a", "gone", weights={"a": 3.0}, counts={"a": 4}), make_resource("a", "new")

    retain_properties(values, old, new)

    kept, added = new.config["ProductionVariants"]
    assert (new.weight_of(kept), new.count_of(kept)) == (weight, count)
    assert (new.weight_of(added), new.count_of(added)) == (1.0, 1)


TIMEOUT_S = 7.0
VARIANT = {"VariantName": "v", "ModelName": "m", "InitialInstanceCount": 1}
ASYNC = {
    "ProductionVariants": [VARIANT],
    "AsyncInferenceConfig": {"OutputConfig": {"S3OutputPath": "s3://bucket/out"}},
}


class Nothing:
    """Deployments and scalable targets without any work."""

    def check_room(self, num_instances: int) -> None:
        pass

    def is_scaled(self, name: str, variant: str) -> bool:
        return False

    def forget(self, name: str) -> None:
        pass

    async def start(self, name: str, resource: EndpointResource) -> None:
        pass

    async def stop(self, name: str) -> None:
        pass

    async def apply(self, name: str) -> None:
        pass

    def check_update(self, name: str, old: EndpointResource, new: EndpointResource) -> None:
        pass

    async def resize(self, name: str, counts: dict[str, int]) -> None:
        pass

    def set_weights(self, name: str, weights: dict[str, float]) -> None:
        pass


class AsyncQueueOfTest:
    """Records which requests must end, and ends them when the test permits."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str, float]] = []
        self.may_end = asyncio.Event()

    async def end_requests(self, name: str, settings: AsyncEndpointSettings, reason: str, timeout_s: float) -> None:
        self.asked.append((name, settings.output_path, reason, timeout_s))
        await self.may_end.wait()


ARNS = Arns("us-east-1", "000000000000")


def make_endpoints(
    folder: Path, deployments: Nothing | None = None, *, has_targets: bool = False
) -> tuple[Endpoints, Resources, AsyncQueueOfTest]:
    resources, queue = Resources(folder, ControlSettings()), AsyncQueueOfTest()
    unused: Any = deployments or Nothing()
    endpoints = Endpoints(
        ControlSettings(removal_timeout_s=TIMEOUT_S),
        resources,
        ARNS,
        Registry(()),
        unused,
        ScalableTargets(resources, ARNS, unused) if has_targets else unused,
    )
    endpoints.asynchronous = queue
    return endpoints, resources, queue


async def test_an_update_retains_the_count_that_autoscaling_has_reached(tmp_path: Path) -> None:
    """The new configuration would begin with too few instances for the requests of now."""

    class Scaled(Nothing):
        def is_scaled(self, name: str, variant: str) -> bool:
            return variant == "v"

        def count_of(self, name: str, variant: str) -> int:
            return 3

    endpoints, resources, _ = make_endpoints(tmp_path, Scaled())
    async with endpoints:
        config = {"ProductionVariants": [VARIANT, {**VARIANT, "VariantName": "w"}]}
        resource = EndpointResource("c", config, {}, serial=1, created=0.0, modified=0.0, status="InService")
        resources.endpoints["q"], resources.models["m"] = resource, Resource({}, 0.0)
        resources.configs["new"] = Resource(config, 0.0)
        values = {"EndpointName": "q", "EndpointConfigName": "new", "RetainAllVariantProperties": True}
        await endpoints.operations()["UpdateEndpoint"](values)
        await until(lambda: resources.endpoints["q"].config_name == "new", "the update is recorded")

    assert resources.endpoints["q"].counts == {"v": 3, "w": 1}


async def test_a_stop_waits_for_the_change_that_is_being_saved(tmp_path: Path) -> None:
    """Otherwise the next run could read the file before it is replaced."""

    class Slow(dict[str, Any]):
        def items(self) -> Any:
            is_encoding.set()
            assert goes_on.wait(DEADLINE_S)
            return super().items()

    is_encoding, goes_on = threading.Event(), threading.Event()
    endpoints, resources, _ = make_endpoints(tmp_path)
    async with endpoints:
        resources.models["m"] = Resource(Slow(ModelName="m"), 1.0)
        resource = EndpointResource("c", ASYNC, {}, serial=1, created=0.0, modified=0.0, status="InService")
        adding = asyncio.create_task(resources.add(resources.endpoints, "q", resource, "arn", ()))
        assert await asyncio.to_thread(is_encoding.wait, DEADLINE_S)
        adding.cancel()
        asyncio.get_running_loop().call_soon(goes_on.set)

    with suppress(asyncio.CancelledError):
        await adding
    assert list(Resources(tmp_path, ControlSettings()).endpoints) == ["q"]


async def test_an_update_whose_retained_weights_are_all_0_is_refused(tmp_path: Path) -> None:
    """The endpoint would get no request by weight. The update began, and its failure was the FailureReason."""
    endpoints, resources, _ = make_endpoints(tmp_path)
    async with endpoints:
        old = make_resource("v", "w", status="InService", weights={"v": 0.0})
        resources.endpoints["q"], resources.models["m"] = old, Resource({}, 0.0)
        resources.configs["new"] = Resource({"ProductionVariants": [VARIANT]}, 0.0)
        values = {"EndpointName": "q", "EndpointConfigName": "new", "RetainAllVariantProperties": True}
        with pytest.raises(RequestInvalid, match="A variant of endpoint q must have a weight above 0"):
            await endpoints.operations()["UpdateEndpoint"](values)
        assert (old.status, old.pending) == ("InService", "")


@pytest.mark.parametrize(
    ("variants", "refused"),
    [
        ([VARIANT], []),
        ([{**VARIANT, "ModelName": "other"}], []),
        ([{**VARIANT, "InstanceType": "ml.g5.xlarge"}], ["v"]),
        ([{**VARIANT, "VariantName": "w"}], ["v"]),
    ],
)
async def test_an_update_removes_no_variant_with_a_scalable_target(
    tmp_path: Path, variants: list[dict[str, Any]], refused: list[str]
) -> None:
    """Nor does it change the variant's instance type. Another model, and variants without a target, are allowed."""
    endpoints, resources, _ = make_endpoints(tmp_path, has_targets=True)
    async with endpoints:
        resource = make_resource("v", "untargeted", status="InService")
        resources.endpoints["q"] = resource
        resources.models["m"] = resources.models["other"] = Resource({}, 0.0)
        resources.targets["endpoint/q/variant/v"] = Resource({"MinCapacity": 1, "MaxCapacity": 2}, 0.0)
        resources.configs["new"] = Resource({"ProductionVariants": variants}, 0.0)
        update: Any = endpoints.operations()["UpdateEndpoint"]
        values = {"EndpointName": "q", "EndpointConfigName": "new"}
        if refused:
            with pytest.raises(RequestInvalid, match=r'The variant\(s\) "\["v"\]" must be deregistered as scalable'):
                await update(values)
            assert (resource.status, resource.pending) == ("InService", "")
        else:
            await update(values)
            await until(lambda: resources.endpoints["q"].config_name == "new", "the update is recorded")


@pytest.mark.parametrize(
    ("operation", "more"),
    [
        ("UpdateEndpoint", {"EndpointConfigName": "new"}),
        (
            "UpdateEndpointWeightsAndCapacities",
            {"DesiredWeightsAndCapacities": [{"VariantName": "v", "DesiredWeight": 2.0}]},
        ),
        ("DeleteEndpoint", {}),
    ],
)
async def test_a_change_that_cannot_be_saved_leaves_the_endpoint_as_it_was(
    tmp_path: Path, operation: str, more: dict[str, Any]
) -> None:
    """Its FailureReason, too, which says why an earlier update failed, and the time of its last change."""
    endpoints, resources, _ = make_endpoints(tmp_path)
    async with endpoints:
        resource = make_resource("v", status="InService", failure="An instance did not start.")
        resources.endpoints["q"], resources.models["m"] = resource, Resource({}, 0.0)
        resources.configs["new"] = Resource({"ProductionVariants": [VARIANT]}, 0.0)
        before = copy.deepcopy(resource)
        (tmp_path / "resources.partial").mkdir()  # in the way of the new file
        with pytest.raises(IsADirectoryError):
            await endpoints.operations()[operation]({"EndpointName": "q", **more})

        assert resource == before


async def test_counts_for_which_there_is_no_room_are_refused_at_once(tmp_path: Path) -> None:
    """A variant gets its instances before another one loses its own, so there must be room for both."""

    class AlmostFull(Nothing):
        def check_room(self, num_instances: int) -> None:
            if num_instances > 1:
                raise LimitExceeded("no room")

    endpoints, resources, _ = make_endpoints(tmp_path, AlmostFull())
    async with endpoints:
        resource = make_resource("v", "w", status="InService", counts={"v": 3, "w": 1})
        resources.endpoints["q"] = resource
        reweigh: Any = endpoints.operations()["UpdateEndpointWeightsAndCapacities"]
        desired = [{"VariantName": "v", "DesiredInstanceCount": 1}, {"VariantName": "w", "DesiredInstanceCount": 3}]
        with pytest.raises(LimitExceeded):
            await reweigh({"EndpointName": "q", "DesiredWeightsAndCapacities": desired})
        assert (resource.status, resource.counts) == ("InService", {"v": 3, "w": 1})

        desired[1]["DesiredInstanceCount"] = 2
        await reweigh({"EndpointName": "q", "DesiredWeightsAndCapacities": desired})
        await until(lambda: resource.counts == {"v": 1, "w": 2}, "the variants have their counts")


async def test_a_deletion_ends_with_the_last_asynchronous_request(tmp_path: Path) -> None:
    """A deletion waits for the last asynchronous request; if the proxy is stopped before, the next one continues."""
    endpoints, resources, queue = make_endpoints(tmp_path)
    async with endpoints:
        resource = EndpointResource("c", ASYNC, {}, serial=1, created=0.0, modified=0.0, status="InService")
        await resources.add(resources.endpoints, "q", resource, "arn", ())
        await endpoints.operations()["DeleteEndpoint"]({"EndpointName": "q"})
        await until(lambda: bool(queue.asked), "requests are to end")
        assert resources.endpoints["q"].status == "Deleting"

    endpoints, resources, later = make_endpoints(tmp_path)
    async with endpoints:
        await until(lambda: bool(later.asked), "the next run continues")
        assert queue.asked == later.asked == [("q", "s3://bucket/out", DELETED, TIMEOUT_S)]
        assert resources.endpoints["q"].status == "Deleting"
        later.may_end.set()
        await until(lambda: not resources.endpoints, "the endpoint is gone")


@pytest.mark.parametrize("keeps_async", [False, True])
async def test_an_update_without_asynchronous_inference_ends_the_requests(tmp_path: Path, keeps_async: bool) -> None:
    """The requests end before the update is recorded, so that a restart after a kill still serves them."""
    endpoints, resources, queue = make_endpoints(tmp_path)
    async with endpoints:
        resource = EndpointResource("c", ASYNC, {}, serial=1, created=0.0, modified=0.0, status="InService")
        resources.endpoints["q"], resources.models["m"] = resource, Resource({}, 0.0)
        resources.configs["new"] = Resource(ASYNC if keeps_async else {"ProductionVariants": [VARIANT]}, 0.0)
        values = {"EndpointName": "q", "EndpointConfigName": "new"}
        await endpoints.operations()["UpdateEndpoint"](values)
        if not keeps_async:
            await until(lambda: bool(queue.asked), "requests are to end")
            assert (resources.endpoints["q"].config_name, resources.endpoints["q"].status) == ("c", "Updating")
            queue.may_end.set()
        await until(lambda: resources.endpoints["q"].config_name == "new", "the update is recorded")
        assert queue.asked == ([] if keeps_async else [("q", "s3://bucket/out", NOT_ASYNC, TIMEOUT_S)])


@pytest.mark.parametrize(("has_async", "count", "is_refused"), [(False, 0, True), (False, 2, False), (True, 0, False)])
async def test_only_an_asynchronous_endpoint_may_have_no_instance(
    tmp_path: Path, has_async: bool, count: int, is_refused: bool
) -> None:
    """Only an asynchronous endpoint may have zero instances; another would always answer 503."""
    config = ASYNC if has_async else {"ProductionVariants": [VARIANT]}

    endpoints, resources, _ = make_endpoints(tmp_path)
    async with endpoints:
        resource = EndpointResource("c", config, {}, serial=1, created=0.0, modified=0.0, status="InService")
        resources.endpoints["q"] = resource
        desired = [{"VariantName": "v", "DesiredInstanceCount": count}]
        values = {"EndpointName": "q", "DesiredWeightsAndCapacities": desired}
        asked = endpoints.operations()["UpdateEndpointWeightsAndCapacities"](values)
        if is_refused:
            with pytest.raises(RequestInvalid, match="DesiredInstanceCount of variant v must be 1 or more"):
                await asked
        else:
            await asked
            await until(lambda: resource.counts == {"v": count}, "the variant has its count")
        assert resource.status == "InService"
