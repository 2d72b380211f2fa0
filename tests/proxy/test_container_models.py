"""The operations on models of SageMaker's containers, over plain HTTP as the platform sends them."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.proxy.conftest import NO_PROBES, MakeStage, Stage
from tests.proxy.fake_instance import Gate, Received, Wire, refusing
from tests.proxy.fake_many import FakeFleet, FakeMany
from tests.waiting import wait_until
from torchmoor.config.container import ContainerSettings
from torchmoor.config.routing import MultiModelSettings
from torchmoor.proxy.instances.instance import InstanceState

NAME = "8d2f0a1c9be94b0f"  # opaque ids, like the platform's


class Container:
    """A proxy in the place of a container with many models."""

    def __init__(self, stage: Stage, many: dict[str, FakeMany]) -> None:
        self.stage = stage
        self.many = many

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Send one request on its own connection; return the status and the body's JSON."""
        connection = self.stage.http()
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Accept": "application/json", **(headers or {})})
        answer = connection.getresponse()
        content = answer.read()
        return answer.status, json.loads(content) if content else None

    def load(self, name: str = NAME, url: str | None = None) -> tuple[int, Any]:
        """Send POST /models."""
        body = {"model_name": name, "url": url or f"/opt/ml/models/{name}/model"}
        return self.call("POST", "/models", body, {"Content-Type": "application/json"})

    def names(self) -> list[str]:
        """Return the names on all pages of GET /models."""
        names: list[str] = []
        path = "/models"
        while True:
            status, told = self.call("GET", path)
            assert status == 200
            names += [row["modelName"] for row in told["models"]]
            if "nextPageToken" not in told:
                return names
            path = f"/models?next_page_token={told['nextPageToken']}"

    @property
    def homes(self) -> list[str]:
        """Return the instances that have a model in memory."""
        return [name for name, many in self.many.items() if many.tiers]


@pytest.fixture
def make_container(make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Container]:
    monkeypatch.setattr("torchmoor.proxy.api.container_models.PAGE_SIZE", 3)

    def make(*, max_models: int = 100, names: tuple[str, ...] = ("a", "b")) -> Container:
        settings = ContainerSettings(serves_models=True, max_models=max_models)
        fakes = FakeFleet()
        stage = make_stage(
            multi_model=MultiModelSettings(), container=settings, health=NO_PROBES, names=names, prepare=fakes
        )
        return Container(stage, fakes.many)

    return make


@pytest.fixture
def container(make_container: Callable[..., Container]) -> Container:
    return make_container()


def test_model_is_loaded_listed_invoked_and_unloaded(container: Container) -> None:
    """The contract's five operations work in order, and the handler loads the folder."""
    row = {"modelName": NAME, "modelUrl": f"/opt/ml/models/{NAME}/model"}

    assert container.load() == (200, row)
    [home] = container.homes
    assert container.many[home].urls == {NAME: row["modelUrl"]}
    assert container.call("GET", "/models") == (200, {"models": [row]})
    assert container.call("GET", f"/models/{NAME}") == (200, row)
    # The platform forwards the client's TargetModel, which is not the name by which the container knows the model.
    headers = {"X-Amzn-SageMaker-Target-Model": "customers/7.tar.gz", "Content-Type": "application/json"}
    assert container.call("POST", f"/models/{NAME}/invoke", {}, headers) == (200, {"model": NAME, "instance": home})
    assert container.call("DELETE", f"/models/{NAME}")[0] == 200
    assert container.homes == []
    assert container.call("GET", "/models") == (200, {"models": []})


def test_loaded_model_cannot_be_loaded_again(container: Container) -> None:
    """A loaded model gets 409, which the platform takes as ready."""
    container.load()

    status, told = container.load()

    assert (status, told["error"]["code"]) == (409, "ModelLoaded")
    assert container.names() == [NAME]


def test_loaded_model_serves_while_it_is_loaded_again(container: Container) -> None:
    """A model that is loaded again keeps serving under its URL if the instance refuses, fails or does not answer."""
    container.load()
    [home] = container.homes
    row = container.call("GET", f"/models/{NAME}")
    fake, gate = container.many[home].fake, Gate()
    operate = fake.on_operation

    async def operate_late(request: Received, wire: Wire) -> None:
        if request.headers["x-torchmoor-operation"] == "models":
            await gate.pass_through()
        await operate(request, wire)

    fake.on_operation = operate_late
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(container.load, NAME, "/opt/ml/models/other/model")
        gate.wait_reached()
        invoked = container.call("POST", f"/models/{NAME}/invoke", {})
        assert container.load()[0] == 409
        assert container.call("DELETE", f"/models/{NAME}")[0] == 409
        gate.open()
        assert again.result()[0] == 409

    assert invoked == (200, {"model": NAME, "instance": home})
    assert container.call("GET", f"/models/{NAME}") == row
    fake.on_operation = refusing(500, "InternalError", "no")
    assert container.load()[0] == 500
    assert container.call("GET", f"/models/{NAME}") == row


def test_model_that_is_being_loaded_is_not_loaded_twice(container: Container) -> None:
    """A model that is loading gets 409, and is listed only when it can be used."""
    gate = Gate()
    for many in container.many.values():
        many.loading = gate
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(container.load)
        gate.wait_reached()
        second = container.load()
        listed = container.names()
        invoked = container.call("POST", f"/models/{NAME}/invoke", {})
        gate.open()
        assert first.result()[0] == 200

    assert (second[0], listed, invoked[0]) == (409, [], 404)
    assert container.names() == [NAME]


def test_model_without_room_is_507_when_no_instance_has_any(container: Container) -> None:
    """Other instances are tried before 507, after which the platform unloads models and tries again."""
    for many in container.many.values():
        many.room = 1
    assert [container.load(f"m{number}")[0] for number in range(3)] == [200, 200, 507]
    assert container.names() == ["m0", "m1"]

    container.call("DELETE", "/models/m0")

    assert container.load("m2")[0] == 200


def test_more_models_than_may_be_loaded_is_507(make_container: Callable[..., Container]) -> None:
    """Beyond the limit of the proxy's own list, a load gets 507."""
    container = make_container(max_models=2)

    assert [container.load(f"m{number}")[0] for number in range(3)] == [200, 200, 507]


def test_list_comes_in_pages(container: Container) -> None:
    """Each page names the next one; the last does not."""
    for number in range(7):
        container.load(f"m{number}")

    status, told = container.call("GET", "/models")

    assert (status, len(told["models"]), told["nextPageToken"]) == (200, 3, "m2")
    assert container.names() == [f"m{number}" for number in range(7)]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/models/x"), ("DELETE", "/models/x"), ("POST", "/models/x/invoke")]
)
def test_model_that_is_not_loaded_is_404(container: Container, method: str, path: str) -> None:
    """Every request for a model that is not loaded gets 404 without reaching an instance."""
    status, told = container.call(method, path, {} if method == "POST" else None)

    assert (status, told["error"]["code"]) == (404, "ModelNotFoundException")


@pytest.mark.parametrize(
    "body",
    [[], {"model_name": "x"}, {"url": "/x"}, {"model_name": "../x", "url": "/x"}, {"model_name": "x", "url": 3}],
)
def test_bad_load_says_what_is_wanted(container: Container, body: Any) -> None:
    """A wrong load gets 400 with the expected form, and nothing is loaded."""
    status, told = container.call("POST", "/models", body)

    assert (status, told["error"]["code"]) == (400, "ValidationError")
    assert container.homes == []


def test_long_body_is_413(container: Container) -> None:
    """A long body gets 413, because a name and a path are short."""
    assert container.load(url="x" * 70_000)[0] == 413


def test_load_that_fails_leaves_nothing(container: Container) -> None:
    """The instance's message reaches the platform, and no model is listed."""
    status, told = container.load(url="/nowhere")

    assert (status, told["error"]["message"]) == (404, "there is no /nowhere")
    assert container.names() == []


def test_load_goes_on_when_its_client_leaves(container: Container) -> None:
    """A load continues after its client disconnects, and the platform's next request finds the model."""
    gate = Gate()
    for many in container.many.values():
        many.loading = gate
    body = json.dumps({"model_name": NAME, "url": "/x"}).encode()
    with container.stage.socket() as sock:
        sock.sendall(b"POST /models HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        gate.wait_reached()
    gate.open()

    wait_until(lambda: container.names() == [NAME], "it is loaded")
    assert container.load()[0] == 409


def test_model_that_the_instance_has_evicted_is_unloaded_all_the_same(container: Container) -> None:
    container.load()
    [home] = container.homes
    container.many[home].tiers.clear()

    assert container.call("DELETE", f"/models/{NAME}")[0] == 200
    assert container.names() == []


def test_instance_that_restarts_has_nothing_loaded(container: Container) -> None:
    """After an instance restarts, its models get 404 until the platform loads them again."""
    container.load()
    [home] = container.homes
    container.many[home].tiers.clear()
    container.many[home].urls.clear()

    def restart() -> None:
        container.stage.registry.set_state(home, InstanceState.DOWN)
        container.stage.registry.set_state(home, InstanceState.READY)

    container.stage.call(restart)

    assert container.names() == []
    assert container.call("POST", f"/models/{NAME}/invoke", {})[0] == 404
    assert container.load()[0] == 200


def test_requests_go_where_the_model_was_loaded(container: Container) -> None:
    """Requests go to the instance that loaded the model, because only this one knows its folder."""
    for number in range(6):
        container.load(f"m{number}")
    homes = {name: home for home, many in container.many.items() for name in many.tiers}

    for _ in range(3):
        for name, home in homes.items():
            assert container.call("POST", f"/models/{name}/invoke", {})[1] == {"model": name, "instance": home}


def test_ping_needs_no_model(container: Container) -> None:
    """/ping is healthy before any model is loaded, since the platform loads none otherwise."""
    assert container.call("GET", "/ping") == (200, None)


def test_without_the_setting_there_are_no_such_operations(stage: Stage) -> None:
    """A proxy outside a container does not serve /models."""
    assert stage.ask("GET", "/models").status == 404
