"""Sessions and capacity of instances, polled from stubs over HTTP."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.waiting import DEADLINE_S
from torchmoor.config.health import HealthSettings
from torchmoor.config.routing import EndpointSettings, MultiModelSettings, VariantSettings
from torchmoor.fleet import status_poller
from torchmoor.fleet.status_poller import StatusPoller
from torchmoor.proxy.instances.handler_operations import HandlerOperations, OperationAnswer
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry
from torchmoor.proxy.routing.reported_status import ModelReport, ReportedStatus, ReportedTier, parse_status

SETTINGS = HealthSettings(status_interval_s=5, max_status_per_s=1000, probe_timeout_s=60)
STATUS = {"sessions": {"open": 3, "max": 10}}


class Told:
    """An instance with a scripted status."""

    def __init__(self, answer: Callable[[], web.Response]) -> None:
        self.answer = answer
        self.num_asked = 0
        self.headers: dict[str, str] = {}

    async def handle(self, request: web.Request) -> web.Response:
        self.num_asked += 1
        self.headers = dict(request.headers)
        await request.read()
        return self.answer()


class Driver:
    """Polls at the times that a test sets; as a StatusListener, it records questions and answers."""

    def __init__(self, registry: Registry, settings: HealthSettings, operations: HandlerOperations) -> None:
        self._poller = StatusPoller(registry, settings, operations, self)
        self._asked: list[str] = []
        self._num_answered = asyncio.Semaphore(0)

    def on_asked(self, instance: Instance) -> None:
        self._asked.append(instance.name)

    def on_status(self, instance: Instance, status: ReportedStatus) -> None:
        self._num_answered.release()

    async def wait_for_answer(self) -> None:
        await asyncio.wait_for(self._num_answered.acquire(), DEADLINE_S)

    async def ask(self, now: float) -> list[str]:
        """Ask the instances that are due, and wait for their answers; return their names."""
        self._asked.clear()
        self._poller.ask_due(now)
        await asyncio.sleep(0)  # the questions' tasks begin
        for _ in self._asked:
            await self.wait_for_answer()
        return sorted(self._asked)


@asynccontextmanager
async def with_instances(
    told: Told, *, settings: HealthSettings, number: int = 1, multi_model: MultiModelSettings | None = None
) -> AsyncIterator[tuple[Registry, Driver]]:
    """Run instances of a variant that opens sessions, or has many models."""
    app = web.Application()
    app.router.add_post("/predictions/llava", told.handle)
    async with TestServer(app) as server:
        variants = (VariantSettings(model="llava"),)
        registry = Registry([EndpointSettings(name="llava", variants=variants, multi_model=multi_model)])
        registry.endpoints()[0].variants[0].needs_status = multi_model is None
        for index in range(number):
            registry.add(
                Instance(
                    name=f"i{index}",
                    endpoint="llava",
                    model="llava",
                    port=server.port or 0,
                    state=InstanceState.READY,
                )
            )
        async with HandlerOperations() as operations:
            yield registry, Driver(registry, settings, operations)


def room(registry: Registry) -> int | None:
    instance = registry.find("i0")
    return instance.session_room


async def test_room_is_what_the_handler_says() -> None:
    """The room is the handler's own report, read from its status at each poll."""
    told = Told(lambda: web.json_response(STATUS))

    async with with_instances(told, settings=SETTINGS) as (registry, driver):
        assert await driver.ask(100.0) == ["i0"]
        assert room(registry) == 7
        told.answer = lambda: web.json_response({"sessions": {"open": 12, "max": 10}})
        assert await driver.ask(104.9) == []
        assert await driver.ask(105.0) == ["i0"]
        assert room(registry) == 0

    assert told.headers["x-torchmoor-operation"] == "status"


@pytest.mark.parametrize(
    "answer",
    [
        lambda: web.Response(status=404),
        lambda: web.Response(text="a picture of a cat"),
        lambda: web.json_response(["cat"]),
        lambda: web.json_response({"sessions": {"open": 1, "max": None}}),
    ],
)
async def test_instance_that_is_no_handler_of_ours_is_asked_once(answer: Callable[[], web.Response]) -> None:
    """Another handler is asked once, and again after it was down, since its model would work for each question."""
    told = Told(answer)

    async with with_instances(told, settings=SETTINGS) as (registry, driver):
        assert await driver.ask(100.0) == ["i0"]
        for number in range(1, 6):
            assert await driver.ask(100.0 + 10 * number) == []
        assert (told.num_asked, room(registry)) == (1, None)
        registry.set_state("i0", InstanceState.DOWN)
        registry.set_state("i0", InstanceState.READY)
        assert await driver.ask(200.0) == ["i0"]


async def test_no_answer_makes_the_room_unknown() -> None:
    """Without an answer the room is unknown instead of the old value, and the instance is asked again."""
    told = Told(lambda: web.json_response(STATUS))

    async with with_instances(told, settings=SETTINGS) as (registry, driver):
        rooms = []
        answers = iter([web.json_response(STATUS), web.Response(status=503), web.json_response(STATUS)])
        told.answer = lambda: next(answers)
        for now in (100.0, 110.0, 120.0):
            await driver.ask(now)
            rooms.append(room(registry))
        assert rooms == [7, None, 7]


async def test_only_instances_that_need_it_are_asked() -> None:
    """Only ready instances of variants that open sessions are asked."""
    told = Told(lambda: web.json_response(STATUS))

    async with with_instances(told, settings=SETTINGS) as (registry, driver):
        await driver.ask(100.0)
        registry.endpoints()[0].variants[0].needs_status = False
        assert await driver.ask(200.0) == []
        registry.endpoints()[0].variants[0].needs_status = True
        registry.set_state("i0", InstanceState.DRAINING)
        assert await driver.ask(300.0) == []
        assert (told.num_asked, room(registry)) == (1, 7)


async def test_the_log_warns_once_of_an_instance_with_another_name(caplog: pytest.LogCaptureFixture) -> None:
    """A handler that reports another name is logged once, since its sessions would go to other instances."""
    told = Told(lambda: web.json_response({**STATUS, "instance": "local"}))

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "torchmoor.fleet.status_poller"]

    async with with_instances(told, settings=SETTINGS) as (registry, driver):
        assert await driver.ask(100.0) == ["i0"]
        assert await driver.ask(200.0) == ["i0"]
        (warning,) = warnings()
        assert "i0 reports the name 'local'" in warning
        assert "TORCHMOOR_INSTANCE=i0" in warning
        registry.set_state("i0", InstanceState.DOWN)
        registry.set_state("i0", InstanceState.READY)
        told.answer = lambda: web.json_response({**STATUS, "instance": "i0"})
        assert await driver.ask(300.0) == ["i0"]
        assert len(warnings()) == 1
        assert room(registry) == 7


async def test_questions_a_second_are_bounded_and_everybody_gets_a_turn() -> None:
    """The rate of questions is limited, and the instance that is most overdue goes first."""
    told = Told(lambda: web.json_response(STATUS))
    settings = SETTINGS.replace(status_interval_s=0.01, max_status_per_s=8)  # two a tick
    asked: list[str] = []

    async with with_instances(told, settings=settings, number=6) as (_, driver):
        for tick in range(5):
            asked.extend(await driver.ask(100.0 + tick))

    assert len(asked) <= 10
    assert set(asked) == {f"i{index}" for index in range(6)}


@pytest.mark.parametrize("status", [b"", b"[]", b"{}", b'{"sessions": 3}', b'{"sessions": {"max": 1.5, "open": 0}}'])
def test_what_is_no_status_has_no_room(status: bytes) -> None:
    """An answer of another shape gives no room."""
    assert parse_status(OperationAnswer(200, "", status).content()).session_room is None


def test_status_of_the_handler_has_its_room() -> None:
    """The handler's status operation contains its room."""
    status: dict[str, Any] = {"instance": "a", "sessions": {"open": 2, "max": 64, "opened": 9}, "turns": {}}

    assert parse_status(status).session_room == 62


@pytest.mark.parametrize(
    ("capabilities", "can_see"),
    [({"can_see": False}, False), ({"can_see": True}, True), ({"can_see": 1}, None), ([], None)],
)
def test_status_says_whether_the_model_reads_images(capabilities: object, can_see: bool | None) -> None:
    """The status says whether the model reads images; a missing or other value means unknown."""
    assert parse_status({**STATUS, "capabilities": capabilities}).can_see is can_see
    assert parse_status({"capabilities": capabilities}).can_see is can_see


def test_status_says_how_many_images_a_session_may_have() -> None:
    """The status says how many images a session may have; a missing value means unknown."""
    assert parse_status({**STATUS, "capabilities": {"max_images": 3}}).max_images == 3
    assert parse_status(STATUS).max_images is None


def test_report_has_the_best_tier_of_each_model_and_the_budget() -> None:
    """The report has each model's best tier and the budget, without broken models and replaced ones."""
    status = {
        "models": [
            {"name": "a", "tier": "device"},
            {"name": "b", "tier": "broken"},
            {"name": "b", "tier": "disk"},
            {"name": "c", "tier": "loading"},
            {"name": "d", "tier": "device", "retired": True},
            {"name": "e", "tier": "elsewhere"},
            {"name": 3, "tier": "disk"},
            "f",
        ],
        "budgets": {"device": {"used": 7, "max": 10}},
    }

    report = parse_status(status).models

    assert report == ModelReport({"a": ReportedTier.DEVICE, "b": ReportedTier.DISK, "c": ReportedTier.LOADING}, 7, 10)


@pytest.mark.parametrize("budgets", [None, {}, {"device": 3}, {"device": {"used": "7", "max": 10}}])
def test_report_without_a_budget_is_one(budgets: object) -> None:
    """A report without a budget is accepted, because the budget is used for spreading only."""
    status = {"models": [{"name": "a", "tier": "host"}], "budgets": budgets}

    assert parse_status(status).models == ModelReport({"a": ReportedTier.HOST}, 0, 0)


async def test_instances_with_many_models_are_asked_for_them() -> None:
    """Instances with many models are polled although they open no sessions, and more often during a load."""
    told = Told(lambda: web.json_response({"models": [{"name": "m", "tier": "device"}]}))
    settings = SETTINGS.replace(status_interval_s=3600, busy_status_interval_s=1)

    async with with_instances(told, settings=settings, multi_model=MultiModelSettings()) as (registry, driver):
        models = registry.endpoints()[0].variants[0].models
        assert await driver.ask(100.0) == ["i0"]
        assert models.is_held("m", "i0")
        assert await driver.ask(101.0) == []
        models.begin("n", "i0")
        assert await driver.ask(102.0) == ["i0"]
        assert await driver.ask(103.0) == ["i0"]
        models.end("n", "i0")
        assert await driver.ask(104.0) == ["i0"]
        assert not models.is_expecting("i0")
        assert await driver.ask(105.0) == []
        registry.set_state("i0", InstanceState.DOWN)
        assert not models.is_held("m", "i0")


async def test_long_reports_are_asked_for_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long reports are polled less often, so that reading them takes a limited share of the proxy's time."""
    told = Told(lambda: web.json_response({"models": []}))
    seconds = itertools.count(0.0, 0.5)  # 0.5 s for each answer
    monkeypatch.setattr("torchmoor.fleet.status_poller.thread_time", seconds.__next__)

    async with with_instances(told, settings=SETTINGS, multi_model=MultiModelSettings()) as (_, driver):
        assert await driver.ask(100.0) == ["i0"]
        assert await driver.ask(109.9) == []
        assert await driver.ask(110.0) == ["i0"]


async def test_poller_asks_by_itself() -> None:
    """The poller asks a ready instance as soon as it runs, and cancels its questions when it ends."""
    told = Told(lambda: web.json_response(STATUS))

    async with with_instances(told, settings=SETTINGS) as (registry, driver):
        async with HandlerOperations() as operations, StatusPoller(registry, SETTINGS, operations, driver):
            await driver.wait_for_answer()
        assert room(registry) == 7


async def test_a_status_that_fails_by_a_fault_is_in_the_log_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next status is queried as usual; the log has the first fault with its traceback."""
    num_read = itertools.count(1)
    has_second = asyncio.Event()

    def fail(*_: object) -> None:
        if next(num_read) == 2:
            has_second.set()
        raise ZeroDivisionError

    monkeypatch.setattr(status_poller, "take_status", fail)
    told = Told(lambda: web.json_response(STATUS))

    settings = SETTINGS.replace(status_interval_s=0.01)
    async with (
        with_instances(told, settings=settings) as (registry, _),
        HandlerOperations() as operations,
        StatusPoller(registry, settings, operations, None),
    ):
        await asyncio.wait_for(has_second.wait(), DEADLINE_S)

    assert [(record.getMessage(), bool(record.exc_info)) for record in caplog.records] == [
        ("a status could not be read left_out=0 error=ZeroDivisionError", True)
    ]
