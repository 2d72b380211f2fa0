"""Changes of one endpoint happen one at a time, however many wait."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waiting import DEADLINE_S
from torchmoor.config.control import ControlSettings
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.config.scaling import ScalingSettings, TargetTracking
from torchmoor.control.artifacts import ServedModel
from torchmoor.control.deployment import start_timeout_s
from torchmoor.control.deployments import Deployments
from torchmoor.control.downloads import DownloadEnded, DownloadState
from torchmoor.control.resources import EndpointResource
from torchmoor.errors import LaunchError, RequestInvalid
from torchmoor.fleet.autoscaler import Autoscaler
from torchmoor.fleet.torchserve import Launch
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry
from torchmoor.tasks import in_thread

RESOURCE = EndpointResource(
    config_name="c",
    config={"ProductionVariants": [{"VariantName": "v", "ModelName": "m", "InitialInstanceCount": 1}]},
    models={"m": {"PrimaryContainer": {"ModelDataUrl": "s3://bucket/m.mar"}}},
    serial=1,
    created=0.0,
    modified=0.0,
)


class Store:
    """Artifacts of an empty store that answers when the test permits."""

    def __init__(self) -> None:
        self.num_running = self.most_running = self.num_asked = 0
        self.asked = threading.Semaphore(0)
        self.answer = threading.Semaphore(0)
        self.downloads: list[DownloadState] = []

    def fetch(self, container: Any, name: str, folder: Path, download: Any) -> Any:
        self.downloads.append(download)
        self.num_running += 1
        self.num_asked += 1
        self.most_running = max(self.most_running, self.num_running)
        self.asked.release()
        self.answer.acquire(timeout=60)
        self.num_running -= 1
        raise RequestInvalid("There is no such object.")


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def deployments(store: Store, tmp_path: Path) -> Deployments:
    unused: Any = None
    artifacts: Any = store
    return Deployments(ControlSettings(), Registry(()), unused, artifacts, (), tmp_path)


async def test_changes_happen_one_at_a_time(deployments: Deployments, store: Store) -> None:
    """Changes that arrive behind a waiting deletion also happen one at a time."""

    async def asked() -> None:
        assert await asyncio.to_thread(store.asked.acquire, timeout=60)

    first = asyncio.create_task(deployments.start("e", RESOURCE))
    await asked()
    stopping = asyncio.create_task(deployments.stop("e"))
    second = asyncio.create_task(deployments.start("e", RESOURCE))
    await asyncio.sleep(0)  # both wait now
    store.answer.release()
    await stopping
    await asked()
    third = asyncio.create_task(deployments.start("e", RESOURCE))
    await asyncio.sleep(0)
    await asyncio.to_thread(int)  # a third request to the store would get its permission before
    await asyncio.to_thread(int)
    store.answer.release()
    await asyncio.wait([second])
    await asked()
    store.answer.release()
    outcomes = await asyncio.gather(first, second, third, return_exceptions=True)

    assert [type(each) for each in outcomes] == [RequestInvalid] * 3
    assert (store.num_asked, store.most_running) == (3, 1)


class Host:
    """Artifacts, a launcher whose instances are ready at once, and a data plane without requests."""

    def __init__(self) -> None:
        self.registry = Registry(())
        self.now = 0.0
        self.operations = self.async_inference = None

    def fetch(self, container: Any, name: str, folder: Path, download: Any) -> ServedModel:
        return ServedModel(archive="m.mar")

    def check(self, launches: Any) -> None:
        """Allow every archive."""

    def begin(self, launch: Launch) -> asyncio.Future[None]:
        place = {"endpoint": launch.endpoint, "variant": launch.variant, "generation": launch.generation}
        self.registry.add(Instance(name=launch.name, model=launch.model, port=1, **place))
        self.registry.set_state(launch.name, InstanceState.READY)
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        first.set_result(None)
        return first

    async def end(self, name: str) -> None:
        if self.registry.find(name) is not None:
            self.registry.dismiss(name)

    def is_idle(self, instance: Instance) -> bool:
        return True

    async def refresh(self) -> None:
        """Do nothing: there is one process."""

    def traffic(self) -> list[Any]:
        return [
            SimpleNamespace(variant=variant, num_waiting=0, metrics=SimpleNamespace(num_sent=0, invocations=0))
            for endpoint in self.registry.endpoints()
            for variant in endpoint.variants
        ]


async def test_a_changed_policy_ends_no_drain_of_an_operator(tmp_path: Path) -> None:
    """A changed policy resumes only instances that the autoscaler has drained, not those of an operator."""
    host: Any = Host()
    registry = host.registry
    deployments = Deployments(ControlSettings(), registry, host, host, (), tmp_path)
    deployments.autoscaler = Autoscaler(
        [], registry, host, host, lambda line: None, are_journaled=True, clock=lambda: host.now
    )
    tracking = TargetTracking(scale_in_cooldown_s=10)

    await deployments.start("e", replace(RESOURCE, counts={"v": 3}))
    settings = ScalingSettings(min_capacity=2, max_capacity=3, initial_count=3, tracking=tracking)
    await deployments.scale("e", "v", settings)
    await deployments.autoscaler.look()
    host.now += 20
    await deployments.autoscaler.look()
    assert registry.is_drained("e-1-2")  # by the autoscaler, the newest first
    registry.drain("e-1-0")
    await deployments.scale("e", "v", settings)
    await deployments.scale("e", "v", None)
    assert [(each.name, each.state) for each in registry.instances()] == [
        ("e-1-0", InstanceState.DRAINING),
        ("e-1-1", InstanceState.READY),
        ("e-1-2", InstanceState.READY),
    ]
    assert not any(each.is_resumable for each in registry.instances())


async def test_the_end_of_scaling_at_zero_is_reported(tmp_path: Path) -> None:
    """The requests that wait need not wait on; those that wait for an instance, or for a changed policy, do."""
    host: Any = Host()
    deployments = Deployments(ControlSettings(), host.registry, host, host, (), tmp_path)
    deployments.autoscaler = Autoscaler(
        [], host.registry, host, host, lambda line: None, are_journaled=True, clock=lambda: host.now
    )
    await deployments.start("e", RESOURCE)
    reports: list[str] = []
    variant = host.registry.get_endpoint("e").variants[0]
    variant.on_starts_ended = lambda: reports.append("ended")
    settings = ScalingSettings(max_capacity=1, initial_count=1, tracking=TargetTracking(scale_in_cooldown_s=10))

    await deployments.scale("e", "v", settings)
    await deployments.scale("e", "v", None)
    assert [each.name for each in host.registry.instances()] == ["e-1-0"]
    await deployments.scale("e", "v", settings)
    for after_s in (0, 20, 1):
        host.now += after_s
        await deployments.autoscaler.look()
    await deployments.scale("e", "v", settings.replace(initial_count=0))
    assert (host.registry.instances(), reports) == ([], [])

    await deployments.scale("e", "v", None)
    assert reports == ["ended"]


@pytest.mark.parametrize("configured", ["e-1", "E-1", "e"])
async def test_a_created_endpoint_takes_no_name_of_a_configured_ones_instances(tmp_path: Path, configured: str) -> None:
    """The fleet may start that instance now or later: instances of E-1 are called e-1-0, e-1-1 and so on."""
    host: Any = Host()
    variants = (
        (VariantSettings(model="m"),)
        if configured != "e"
        else (
            VariantSettings(name="1", model="m", weight=1.0),
            VariantSettings(name="v", model="m", weight=1.0),
        )
    )
    host.registry.serve(host.registry.stage(EndpointSettings(name=configured, variants=variants)))
    deployments = Deployments(ControlSettings(), host.registry, host, host, (), tmp_path)
    name = "e" if configured != "e" else "E"

    await deployments.start(name, replace(RESOURCE, counts={"v": 2}))

    assert [each.name for each in host.registry.instances()] == ["e-1-0-0", "e-1-0-1"]


async def test_an_endpoint_that_is_gone_is_not_resized(deployments: Deployments) -> None:
    await deployments.resize("e", {"v": 2})

    assert deployments.count_of("e", "v") == 0


async def test_progress_is_described_until_a_start_ends(deployments: Deployments, store: Store) -> None:
    """A variant says what is fetched for it; an interrupted start ends with its download, and leaves nothing."""
    start = asyncio.create_task(deployments.start("e", RESOURCE))
    assert await asyncio.to_thread(store.asked.acquire, timeout=60)
    [download] = store.downloads
    found = [deployments.progress_of("e", "v"), deployments.progress_of("e", "other")]
    download.begin(4_000_000)
    download.count(1_000_000)
    found.append(deployments.progress_of("e", "v"))
    start.cancel()
    await asyncio.sleep(0)
    assert not start.done()  # the thread still writes
    store.answer.release()
    with pytest.raises(asyncio.CancelledError):
        await start
    with pytest.raises(DownloadEnded):
        download.count(1)
    assert [*found, deployments.progress_of("e", "v")] == [
        ["preparing the model"],
        [],
        ["downloading the model, 1.0 of 4.0 MB until now"],
        [],
    ]


class SlowStore(Store):
    """Artifacts whose download receives bytes until it is ended."""

    def fetch(self, container: Any, name: str, folder: Path, download: DownloadState) -> Any:
        while True:
            download.count(1)


@pytest.mark.parametrize("store", [SlowStore()])
async def test_a_download_ends_at_its_variants_timeout(deployments: Deployments) -> None:
    """The FailureReason of the endpoint names the field. Without a limit a slow download held the endpoint forever."""
    [variant] = RESOURCE.config["ProductionVariants"]
    config = {"ProductionVariants": [{**variant, "ModelDataDownloadTimeoutInSeconds": 0}]}

    with pytest.raises(LaunchError, match="set ModelDataDownloadTimeoutInSeconds of variant v to a longer time"):
        await deployments.start("e", replace(RESOURCE, config=config))


async def test_downloads_take_no_thread_from_others(deployments: Deployments, store: Store) -> None:
    """Otherwise, as many downloads as the event loop has threads stopped the control plane until one had ended."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    starts = [asyncio.create_task(deployments.start(name, RESOURCE)) for name in ("e", "f")]

    for _ in starts:
        assert await in_thread(store.asked.acquire, True, DEADLINE_S)
    assert store.most_running == 2
    for _ in starts:
        store.answer.release()
    outcomes = await asyncio.gather(*starts, return_exceptions=True)
    assert [type(each) for each in outcomes] == [RequestInvalid] * 2


async def test_a_download_without_a_thread_fails(
    deployments: Deployments, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the event loop's own thread, it would stop the proxy until its end."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store.answer.release()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        await deployments.start("e", RESOURCE)

    assert store.num_asked == 0


@pytest.mark.parametrize(
    ("place", "timeout_s"), [("/work/given/checkpoint", 70.0), ("s3://bucket/checkpoint/", 670.0), ("", 70.0)]
)
def test_a_start_may_last_longer_if_the_handler_downloads_the_model(place: str, timeout_s: float) -> None:
    variant = {"ContainerStartupHealthCheckTimeoutInSeconds": 70, "ModelDataDownloadTimeoutInSeconds": 600}
    served = ServedModel(archive="m.mar", environment={"TORCHMOOR_HANDLER_MODEL_PATH": place} if place else {})

    assert start_timeout_s(variant, served) == timeout_s
    assert start_timeout_s({}, served) == 0
