"""Endpoints with many models: TargetModel through boto3, and what it does with instances that hold some of them."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.proxy.conftest import NO_PROBES, MakeStage, Stage
from tests.proxy.fake_instance import Gate, streaming
from tests.proxy.fake_many import FakeFleet, FakeMany
from torchmoor.config.routing import MultiModelSettings
from torchmoor.config.timeouts import TimeoutSettings
from torchmoor.proxy.instances.instance import InstanceState

MODELS = {f"m{number}.tar.gz" for number in range(20)}
# Polled often, also while a model is loading, so that tests need not wait.
ASKING = NO_PROBES.replace(status_interval_s=0.02, busy_status_interval_s=0.02, max_status_per_s=1000)


class Fleet:
    """A stage whose instances have many models."""

    def __init__(self, stage: Stage, many: dict[str, FakeMany]) -> None:
        self.stage = stage
        self.many = many
        self.client = stage.client()

    def ask(self, model: str, **options: Any) -> tuple[str, str]:
        """Send a request; return the instance that answered and the reason."""
        answer = self.client.invoke_endpoint(EndpointName="llava", TargetModel=model, Body=b"{}", **options)
        fields = answer["ResponseMetadata"]["HTTPHeaders"]
        shown = json.loads(answer["Body"].read())
        assert shown["model"] == model
        return shown["instance"], fields["x-amzn-sagemaker-invoked-routing-reason"]

    def refused(self, model: str | None) -> ClientError:
        """Return the error of a request."""
        options = {} if model is None else {"TargetModel": model}
        with pytest.raises(ClientError) as caught:
            self.client.invoke_endpoint(EndpointName="llava", Body=b"{}", **options)
        return caught.value

    @property
    def num_loads(self) -> int:
        return sum(each.num_loads for each in self.many.values())

    def is_held(self, model: str, name: str) -> bool:
        models = self.stage.registry.endpoints()[0].variants[0].models
        return models.is_held(model, name)

    def until_loaded(self, name: str, number: int) -> None:
        """Wait until the instance has reported `number` models in memory."""
        models = self.stage.registry.endpoints()[0].variants[0].models
        self.stage.until(lambda: models.num_loaded(name) == number, f"{number} models at {name}")


@pytest.fixture
def make_fleet(make_stage: MakeStage) -> Callable[..., Fleet]:
    """Return a function that makes fleets with other settings."""

    def make(*, hot: int = 16, health: Any = ASKING, **options: Any) -> Fleet:
        multi_model = MultiModelSettings(hot_outstanding=hot)
        fakes = FakeFleet(MODELS)
        return Fleet(make_stage(multi_model=multi_model, health=health, prepare=fakes, **options), fakes.many)

    return make


@pytest.fixture
def fleet(make_fleet: Callable[..., Fleet]) -> Fleet:
    return make_fleet()


def shown(error: ClientError) -> tuple[str, int, str]:
    return (
        error.response["Error"]["Code"],
        error.response["ResponseMetadata"]["HTTPStatusCode"],
        error.response["Error"]["Message"],
    )


def test_model_stays_where_it_was_loaded(fleet: Fleet) -> None:
    """The first request loads the model, and later ones go to the same instance with that reason."""
    home, reason = fleet.ask("m0.tar.gz")

    others = {fleet.ask("m0.tar.gz") for _ in range(5)}

    assert (reason, others, fleet.num_loads) == ("model-cold", {(home, "model-resident")}, 1)


def test_leading_slash_is_no_part_of_a_name(fleet: Fleet) -> None:
    """A model that is named as in some of SageMaker's examples is found where it was loaded, also after a report."""
    home, _ = fleet.ask("/m0.tar.gz")
    fleet.until_loaded(home, 1)

    others = {fleet.ask(name) for name in ("/m0.tar.gz", "m0.tar.gz") for _ in range(3)}

    assert (others, fleet.num_loads) == ({(home, "model-resident")}, 1)


def test_stream_operation_takes_a_target_model(fleet: Fleet) -> None:
    """AWS's API has TargetModel for whole answers only; here both operations accept the header."""
    for fake in fleet.stage.instances.values():
        fake.behave = streaming([b"one ", b"two"])
    client = fleet.stage.client()
    client.meta.events.register(
        "before-call.sagemaker-runtime.InvokeEndpointWithResponseStream",
        lambda params, **_: params["headers"].update({"X-Amzn-SageMaker-Target-Model": "m1.tar.gz"}),
    )

    answer = client.invoke_endpoint_with_response_stream(EndpointName="llava", Body=b"{}")
    text = b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"])

    received = [request for fake in fleet.stage.instances.values() for request in fake.received]
    assert (text, [request.headers["x-amzn-sagemaker-target-model"] for request in received]) == (
        b"one two",
        ["m1.tar.gz"],
    )


def test_burst_for_a_cold_model_loads_it_once(fleet: Fleet) -> None:
    """Requests for a loading model wait at the instance that loads it."""
    gate = Gate()
    for many in fleet.many.values():
        many.loading = gate
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(fleet.ask, "m2.tar.gz") for _ in range(8)]
        fleet.stage.until(lambda: fleet.stage.outstanding() == 8, "all are under way")
        gate.open()
        homes = {future.result()[0] for future in asked}

    assert (len(homes), fleet.num_loads) == (1, 1)


def test_hot_model_gets_a_second_copy(make_fleet: Callable[..., Fleet]) -> None:
    """With too many requests at its holder a model gets a second copy, and both serve it."""
    fleet = make_fleet(hot=2)
    home, _ = fleet.ask("m3.tar.gz")
    gate = Gate()
    fleet.many[home].answering = gate
    with ThreadPoolExecutor(4) as pool:
        slow = [pool.submit(fleet.ask, "m3.tar.gz") for _ in range(2)]
        fleet.stage.until(lambda: fleet.stage.outstanding() == 2, "the holder is hot")
        copy, reason = fleet.ask("m3.tar.gz")
        again = fleet.ask("m3.tar.gz")
        gate.open()
        assert {future.result()[0] for future in slow} == {home}

    assert copy != home
    assert (reason, again, fleet.num_loads) == ("model-copy", (copy, "model-resident"), 2)


def test_reported_models_are_used_and_evicted_ones_forgotten(fleet: Fleet) -> None:
    """Reports of instances override what the proxy assumed from its requests."""
    fleet.many["b"].tiers["m4.tar.gz"] = "device"
    fleet.until_loaded("b", 1)
    assert fleet.ask("m4.tar.gz") == ("b", "model-resident")

    fleet.many["b"].tiers.clear()
    fleet.until_loaded("b", 0)
    fleet.stage.until(lambda: not fleet.is_held("m4.tar.gz", "b"), "it is forgotten")

    assert fleet.ask("m4.tar.gz")[1] == "model-cold"


def test_instance_that_restarts_is_forgotten(make_fleet: Callable[..., Fleet]) -> None:
    """A restarted instance's models are forgotten at once, before its first report."""
    fleet = make_fleet(health=NO_PROBES)
    home, _ = fleet.ask("m5.tar.gz")

    async def is_held_after_restart() -> bool:
        fleet.many[home].tiers.clear()
        fleet.stage.registry.set_state(home, InstanceState.DOWN)
        fleet.stage.registry.set_state(home, InstanceState.READY)
        return fleet.is_held("m5.tar.gz", home)

    assert not fleet.stage.run(is_held_after_restart())
    assert fleet.ask("m5.tar.gz")[1] == "model-cold"


def test_instance_without_room_is_passed_by(fleet: Fleet) -> None:
    """507 OutOfMemory sends the request to another instance; if all refuse, the client gets a retry hint."""
    fleet.many["a"].room = 0
    homes = {fleet.ask(f"m{number}.tar.gz")[0] for number in range(6)}
    assert homes == {"b"}

    fleet.many["b"].room = 0

    code, status, message = shown(fleet.refused("m9.tar.gz"))
    assert (code, status) == ("ServiceUnavailable", 503)
    assert "no room for m9.tar.gz" in message


def test_unknown_model_is_a_validation_error(fleet: Fleet) -> None:
    """An unknown model is a ValidationError, and no instance is recorded as its holder."""
    code, status, message = shown(fleet.refused("nothing.tar.gz"))

    assert (code, status) == ("ValidationError", 400)
    assert "there is no model nothing.tar.gz" in message
    assert not any(fleet.is_held("nothing.tar.gz", name) for name in fleet.many)


def test_broken_model_is_a_model_error_with_the_reason(fleet: Fleet) -> None:
    """A broken model's requests fail with the reason, and other models are not affected."""
    for many in fleet.many.values():
        many.broken["m6.tar.gz"] = "config.json is missing"

    error = fleet.refused("m6.tar.gz")

    assert shown(error)[:2] == ("ModelError", 424)
    assert error.response["OriginalStatusCode"] == 424
    assert "config.json is missing" in error.response["OriginalMessage"]
    assert fleet.ask("m7.tar.gz")[1] == "model-cold"


def test_model_that_is_still_loading_is_not_ready(fleet: Fleet) -> None:
    """The handler's answer at its hold limit becomes 429 with its Retry-After, and the load continues."""
    for many in fleet.many.values():
        many.refusal = (429, "ModelLoading", "m8.tar.gz is being loaded, 40 %")

    error = fleet.refused("m8.tar.gz")

    assert shown(error) == ("ModelNotReadyException", 429, "m8.tar.gz is being loaded, 40 %")
    assert error.response["ResponseMetadata"]["HTTPHeaders"]["retry-after"] == "7"


def test_model_that_is_not_there_at_the_time_out_is_not_ready(make_fleet: Callable[..., Fleet]) -> None:
    """A load that outlasts the time-out is answered with a retry hint; a loaded model that is slow is a ModelError."""
    fleet = make_fleet(timeouts=TimeoutSettings(model_timeout_s=0.3, sweep_interval_s=0.02))
    gate = Gate()
    for many in fleet.many.values():
        many.loading = gate

    loading = fleet.refused("m10.tar.gz")
    gate.open()
    fleet.stage.until(lambda: any(fleet.is_held("m10.tar.gz", name) for name in fleet.many), "the load has gone on")
    slow = Gate()
    for many in fleet.many.values():
        many.answering = slow
    answering = fleet.refused("m10.tar.gz")
    slow.open()

    assert shown(loading)[:2] == ("ModelNotReadyException", 429)
    assert "retry-after" in loading.response["ResponseMetadata"]["HTTPHeaders"]
    assert shown(answering)[:2] == ("ModelError", 424)


def test_target_model_is_needed_where_there_are_many(fleet: Fleet) -> None:
    """The error says which parameter is missing."""
    code, status, message = shown(fleet.refused(None))

    assert (code, status) == ("ValidationError", 400)
    assert "is missing a target model header" in message
    assert "TargetModel" in message


def test_target_model_is_refused_where_there_is_one(stage: Stage) -> None:
    """The refusal of TargetModel has AWS's wording."""
    with pytest.raises(ClientError) as caught:
        stage.client().invoke_endpoint(EndpointName="llava", TargetModel="m0.tar.gz", Body=b"{}")

    assert shown(caught.value) == (
        "ValidationError",
        400,
        "Endpoint llava is not a multi-model endpoint and does not support target model header.",
    )


def test_other_dialects_are_placed_too(fleet: Fleet) -> None:
    """The container's, TorchServe's and OpenAI's paths with the header go to an instance that has the model."""
    home, _ = fleet.ask("m11.tar.gz")
    headers = {"X-Amzn-SageMaker-Target-Model": "m11.tar.gz"}
    connection = fleet.stage.http()
    for path in ("/invocations", "/predictions/llava", "/endpoints/llava/openai/v1/chat/completions"):
        connection.request("POST", path, b"{}", headers)
        answer = connection.getresponse()
        assert json.loads(answer.read())["instance"] == home
        assert answer.headers["X-Amzn-SageMaker-Invoked-Routing-Reason"] == "model-resident"


def test_metrics_tell_hits_waits_and_models(fleet: Fleet) -> None:
    """Metrics have CloudWatch's names and use the handler's receipts; LoadedModelCount uses its reports."""
    home, _ = fleet.ask("m12.tar.gz")
    for _ in range(3):
        fleet.ask("m12.tar.gz")
    fleet.until_loaded(home, 1)

    lines = fleet.stage.admin("/metrics").text.splitlines()

    where = '{endpoint="llava",variant="AllTraffic"}'
    assert f"ModelInvocations_total{where} 4.0" in lines
    assert f"ModelCacheHit_total{where} 3.0" in lines
    assert f"ModelLoadingWaitTime_count{where} 1.0" in lines
    assert f"ModelLoadingWaitTime_sum{where} 0.25" in lines
    assert f'LoadedModelCount{{endpoint="llava",instance="{home}"}} 1.0' in lines


def test_client_that_leaves_during_a_load_leaves_nothing_behind(fleet: Fleet) -> None:
    """A request whose client disconnects during the load no longer counts, as the fixture checks."""
    gate = Gate()
    for many in fleet.many.values():
        many.loading = gate
    with fleet.stage.socket() as sock:
        sock.sendall(
            b"POST /endpoints/llava/invocations HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"
            b"X-Amzn-SageMaker-Target-Model: m13.tar.gz\r\n\r\n{}"
        )
        gate.wait_reached()
    fleet.stage.until(lambda: fleet.stage.outstanding() == 0, "the lease is released")
    gate.open()


# The admin plane


def test_admin_plane_shows_which_models_are_where(fleet: Fleet) -> None:
    """The admin plane has one row per model and instance, from the instances' reports."""
    home, _ = fleet.ask("m14.tar.gz")

    shown = fleet.stage.admin("/models").json()

    assert [(row["endpoint"], row["instance"], row["name"], row["tier"], row["bytes"]) for row in shown["models"]] == [
        ("llava", home, "m14.tar.gz", "device", 1000)
    ]
    assert {row["instance"]: row["answered"] for row in shown["instances"]} == {"a": True, "b": True}
    assert shown["instances"][0]["budgets"]["device"]["max"] == 100_000


def test_admin_plane_shows_the_models_of_a_draining_instance(fleet: Fleet) -> None:
    """An instance that drains still answers requests, so its models stay on the list."""
    home, _ = fleet.ask("m14.tar.gz")
    assert fleet.stage.admin(f"/instances/{home}/drain", "POST").json()["state"] == "draining"

    shown = fleet.stage.admin("/models").json()

    assert [(row["instance"], row["name"]) for row in shown["models"]] == [(home, "m14.tar.gz")]
    assert {row["instance"]: row["answered"] for row in shown["instances"]} == {"a": True, "b": True}


def test_admin_plane_asks_few_instances_at_once(
    make_fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large fleet's instances are asked one after the other, since each query needs a descriptor."""
    monkeypatch.setattr("torchmoor.admin.models.MAX_QUERIES", 1)
    monkeypatch.setattr("torchmoor.admin.models.STATUS_TIMEOUT_S", 59.0)  # unlike that of the queries for routing
    fleet = make_fleet()
    num_running = most_running = 0
    ask = fleet.stage.proxy.data.operations.ask

    async def count(*arguments: Any, timeout_s: float) -> Any:
        nonlocal num_running, most_running
        is_counted = timeout_s == 59.0
        num_running += is_counted
        most_running = max(most_running, num_running)
        try:
            return await ask(*arguments, timeout_s=timeout_s)
        finally:
            num_running -= is_counted

    monkeypatch.setattr(fleet.stage.proxy.data.operations, "ask", count)

    shown = fleet.stage.admin("/models").json()

    assert [each["answered"] for each in shown["instances"]] == [True, True]
    assert most_running == 1


def test_admin_plane_pins_where_a_model_is_held(fleet: Fleet) -> None:
    """Names may contain slashes; unpin reaches the instance that has the model pinned, and unload frees it."""
    for many in fleet.many.values():
        many.source.add("team/m.tar.gz")
    home, _ = fleet.ask("team/m.tar.gz")

    assert fleet.stage.admin("/models/team/m.tar.gz/pin", "POST").status_code == 200
    assert fleet.many[home].pinned == {"team/m.tar.gz"}
    assert fleet.stage.admin("/models/team%2Fm.tar.gz/unpin", "POST").status_code == 200
    assert fleet.many[home].pinned == set()
    assert fleet.stage.admin(f"/models/team/m.tar.gz/unload?instance={home}", "POST").status_code == 200
    assert fleet.many[home].tiers == {}
    answer = fleet.stage.admin("/models/team/m.tar.gz/unload", "POST")
    assert answer.status_code == 404
    assert [row["code"] for row in answer.json()["instances"]] == ["ModelUnknown"] * 2


def test_admin_plane_pins_a_name_with_a_slash_before_it(fleet: Fleet) -> None:
    """The slash is not a part of the name, as in TargetModel: the pin goes where the model is held."""
    homes = {name: fleet.ask(name)[0] for name in ("m1.tar.gz", "m2.tar.gz", "m3.tar.gz", "m4.tar.gz")}

    for name in homes:
        answer = fleet.stage.admin(f"/models//{name}/pin", "POST")
        assert (answer.status_code, answer.json()["model"]) == (200, name)

    assert {name: home for home, many in fleet.many.items() for name in many.pinned} == homes


def test_an_action_that_fails_has_the_status_of_the_failure(fleet: Fleet) -> None:
    """The status of a failed action is that of the failure, not of an instance without the model."""
    fleet.many["b"].broken["broken"] = "it is damaged"
    fleet.many["b"].tiers["broken"] = "device"

    answer = fleet.stage.admin("/models/broken/unload", "POST")

    assert {row["instance"]: row["status"] for row in answer.json()["instances"]} == {"a": 404, "b": 424}
    assert answer.status_code == 424


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "", 200), ("GET", "/ready", 200), ("POST", "/infer", 200)]
    + [(method, path, 404) for method in ("HEAD", "PUT", "PATCH", "DELETE", "OPTIONS") for path in ("", "/ready")]
    + [("POST", "", 404), ("GET", "/infer", 404), ("PUT", "/infer", 404)],
)
def test_open_inference_has_get_and_post(fleet: Fleet, method: str, path: str, status: int) -> None:
    """Methods other than GET and POST are refused, including HEAD, whose answer must not have a body."""
    assert fleet.stage.ask(method, f"/v2/models/m0.tar.gz{path}", b"{}" if method == "POST" else None).status == status
    assert fleet.num_loads == (status == 200)


def test_open_inference_passes_on_the_version_of_the_path(fleet: Fleet) -> None:
    """The path's version is forwarded, because the instance knows which versions a model has."""
    assert fleet.stage.ask("GET", "/v2/models/m0.tar.gz/versions/1/ready").status == 200
    [request] = [
        each
        for fake in fleet.stage.instances.values()
        for each in fake.received
        if "x-amzn-sagemaker-target-model" in each.headers
    ]
    assert request.headers["x-torchmoor-model-version"] == "1"
    assert request.headers["x-torchmoor-model-question"] == "ready"


@pytest.mark.parametrize("version", ["one", "1%0d%0ax-a:b", "-1"])
def test_open_inference_refuses_versions_that_no_model_has(fleet: Fleet, version: str) -> None:
    """A version that is not a number is refused."""
    assert fleet.stage.ask("GET", f"/v2/models/m0.tar.gz/versions/{version}").status == 400
    assert fleet.num_loads == 0


def test_admin_plane_prewarms_where_requests_would_go(fleet: Fleet) -> None:
    """A prewarmed model is loaded where the next request for it goes."""
    answer = fleet.stage.admin("/models/m15.tar.gz/prewarm", "POST")
    [row] = answer.json()["instances"]
    fleet.until_loaded(row["instance"], 1)

    assert answer.status_code == 200
    assert fleet.ask("m15.tar.gz") == (row["instance"], "model-resident")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/models/m0.tar.gz/pin?endpoint=other", 400),
        ("/models/m0.tar.gz/pin?instance=nobody", 404),
        ("/models/m0.tar.gz/eat", 404),
    ],
)
def test_admin_plane_says_what_is_wrong(fleet: Fleet, path: str, status: int) -> None:
    """An unknown endpoint or instance gets an error."""
    assert fleet.stage.admin(path, "POST").status_code == status
