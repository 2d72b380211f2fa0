"""The autoscaler with a launcher, a proxy and a clock that the test moves by hand."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from torchmoor.async_inference.request import Backlog
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.config.scaling import ScalingSettings, StepScaling, TargetTracking, TrackedMetric
from torchmoor.errors import LaunchError, QueueUnavailable
from torchmoor.fault_log import INTERVAL_S
from torchmoor.fleet import autoscaler as autoscaler_module
from torchmoor.fleet.autoscaler import Autoscaler, read_open_sessions
from torchmoor.fleet.scaled_variant import Phase, ScaledVariant
from torchmoor.fleet.torchserve import Launch
from torchmoor.proxy.instances.endpoint import Variant
from torchmoor.proxy.instances.handler_operations import OperationAnswer
from torchmoor.proxy.instances.instance import Instance, InstanceState, Lease
from torchmoor.proxy.instances.registry import Registry

QUICK = TargetTracking(target=5, scale_in_cooldown_s=10, scale_out_cooldown_s=0)
STEP = StepScaling(cooldown_s=0)


@dataclass
class Sent:
    """Counts that the test sets."""

    num_sent: int = 0
    invocations: int = 0


class Unreadable(Sent):
    """Counts that cannot be read."""

    def __getattribute__(self, name: str) -> Any:
        raise ZeroDivisionError


@dataclass
class Clients:
    """One variant's traffic, which the test sets."""

    variant: Variant
    num_waiting: int = 0
    metrics: Sent = field(default_factory=Sent)


class World:
    """The autoscaler's surroundings: a host's launcher, a proxy, instances that answer, a queue."""

    def __init__(
        self,
        *,
        max_capacity: int = 3,
        initial_count: int = 0,
        are_journaled: bool = True,
        tracking: TargetTracking = QUICK,
    ) -> None:
        scaling = ScalingSettings(max_capacity=max_capacity, initial_count=initial_count, tracking=tracking, step=STEP)
        self.registry = Registry(
            [EndpointSettings(name="llava", variants=(VariantSettings(model="llava", scaling=scaling),))],
        )
        self.variant = self.registry.get_endpoint("llava").variants[0]
        self.clients = Clients(self.variant)
        launches = [Launch(f"llava-{number}", "llava", "llava.mar") for number in range(max_capacity)]
        self.scaled = ScaledVariant(self.variant, launches)
        self.now = 0.0
        self.reports: list[str] = []
        self.firsts: dict[str, asyncio.Future[None]] = {}
        self.stopping: dict[str, asyncio.Event] = {}
        self.ended: list[str] = []
        self.sessions: dict[str, int | None] = {}  # open ones, by instance; None: it does not answer
        self.asked: list[str] = []
        self.on_asked: Callable[[], None] = lambda: None  # called before an instance answers
        self.pending: Callable[[], Awaitable[Backlog]] | None = None
        self.operations: Any = self
        self.async_inference = SimpleNamespace(queue=SimpleNamespace(backlog=self._find_pending))
        self.autoscaler = Autoscaler(
            [self.scaled],
            self.registry,
            self,
            self,
            self.reports.append,
            are_journaled=are_journaled,
            clock=lambda: self.now,
        )

    # The launcher

    def begin(self, launch: Launch) -> asyncio.Future[None]:
        """Start an instance, which is known and not ready until the test permits."""
        assert launch.name not in self.firsts
        self.registry.add(Instance(name=launch.name, endpoint="llava", model="llava", port=1))
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.firsts[launch.name] = first
        return first

    async def end(self, name: str) -> None:
        """End an instance; it is gone when the test permits."""
        assert self.registry.find(name) is None, "requests may still be sent there"
        self.stopping[name] = asyncio.Event()
        await self.stopping[name].wait()
        del self.firsts[name]
        self.ended.append(name)

    # The proxy, the instances and the queue

    async def refresh(self) -> None:
        """Do nothing: there are no other sources."""

    def traffic(self) -> list[Clients]:
        return [self.clients]

    def is_idle(self, instance: Instance) -> bool:
        return not instance.outstanding

    async def ask(
        self, instance: Instance, operation: str, body: Mapping[str, object], *, timeout_s: float
    ) -> OperationAnswer | None:
        self.asked.append(instance.name)
        self.on_asked()
        number = self.sessions.get(instance.name, 0)
        return None if number is None else OperationAnswer(200, "", json.dumps({"sessions": {"open": number}}).encode())

    async def _find_pending(self, endpoint: str) -> Backlog:
        return Backlog() if self.pending is None else await self.pending()

    # Actions of a test

    @property
    def running(self) -> list[str]:
        return sorted(member.name for member in self.scaled.in_phase(Phase.RUNNING))

    def phase(self, name: str) -> Phase | None:
        member = self.scaled.members.get(name)
        return None if member is None else member.phase

    async def look(self, after_s: float = 1.0) -> list[str]:
        """Run the autoscaler's next look some time later; return the running instances."""
        self.now += after_s
        await self.autoscaler.look()
        await settle()
        return self.running

    async def grow(self, number: int) -> list[Instance]:
        """Start instances and make them ready."""
        self.clients.num_waiting = 5 * number
        while len(await self.look()) < number:
            pass
        self.clients.num_waiting = 0
        for name in self.running:
            await self.be_ready(name)
        return [self.instance(name) for name in self.running]

    async def be_ready(self, name: str) -> None:
        self.registry.set_state(name, InstanceState.READY)
        if not self.firsts[name].done():
            self.firsts[name].set_result(None)
        await settle()

    async def be_gone(self, name: str) -> None:
        self.stopping[name].set()
        await settle()

    def instance(self, name: str) -> Instance:
        found = self.registry.find(name)
        assert found is not None
        return found


async def settle() -> None:
    """Run the event loop until every task waits for the test."""
    for _ in range(10):
        await asyncio.sleep(0)


@asynccontextmanager
async def making(**options: Any) -> AsyncIterator[World]:
    world = World(**options)
    await world.autoscaler.start()
    yield world
    await world.autoscaler.stop()


async def test_goes_from_zero_to_what_the_backlog_needs_and_back() -> None:
    """The first request starts one instance and the target more.

    All are drained and stopped after an idle cool-down.
    """
    async with making() as world:
        assert await world.look() == []
        world.clients.num_waiting = 12
        assert await world.look() == ["llava-0"]
        assert await world.look() == ["llava-0", "llava-1", "llava-2"]
        world.clients.num_waiting = 0
        for name in world.running:
            await world.be_ready(name)
        await world.look()
        await world.look(after_s=10)
        assert {instance.state for instance in world.registry.instances()} == {InstanceState.DRAINING}

        await world.look()
        for name in list(world.stopping):
            await world.be_gone(name)

        assert sorted(world.ended) == ["llava-0", "llava-1", "llava-2"]
        assert (world.scaled.members, list(world.registry.instances())) == ({}, [])
        assert world.reports[0] == "llava: from 0 to 1 instances, backlog 12"


async def test_what_runs_counts_whoever_sent_it() -> None:
    """Held, outstanding and asynchronous requests count; an asynchronous one that runs at an instance counts once."""
    async with making() as world:
        (instance,) = await world.grow(1)
        leases = [instance.lease() for _ in range(3)]
        world.clients.num_waiting = 1

        async def pending() -> Backlog:
            return Backlog(waiting=2, running=2)

        world.pending = pending
        await world.look()

        assert world.variant.scale.backlog == 1 + 2 + 3
        for lease in leases:
            lease.release()
        await world.look()
        assert world.variant.scale.backlog == 1 + 2 + 2


async def test_an_instance_that_works_is_not_stopped() -> None:
    """Scale-in drains first, so a request that takes longer than the cool-down ends before its instance stops."""
    async with making() as world:
        first, second = await world.grow(2)
        lease = second.lease()
        await world.look()
        assert await world.look(after_s=10) == ["llava-1"], "the idle one goes"

        await world.look(after_s=1000)
        assert world.running == ["llava-1"]
        assert second.state is InstanceState.READY
        lease.release()
        await world.look()
        await world.look(after_s=10)
        late = Lease(second)  # a session's turn may still reach a draining instance
        await world.look()
        await world.look(after_s=100)
        assert world.phase("llava-1") is not Phase.STOPPING
        late.release()
        assert first is not second


async def test_one_that_drains_is_called_back() -> None:
    """A request resumes a draining instance, without a cold start."""
    async with making() as world:
        (instance,) = await world.grow(1)
        await world.look()
        lease = instance.lease()
        lease.release()
        await world.look(after_s=10)
        assert instance.state is InstanceState.DRAINING
        world.clients.num_waiting = 1

        assert await world.look() == ["llava-0"]
        assert instance.is_ready
        assert world.stopping == {}


async def test_use_between_two_looks_is_noticed() -> None:
    """Short requests between two looks keep an instance from being idle."""
    async with making() as world:
        await world.grow(1)
        for _ in range(30):
            world.clients.metrics.num_sent += 1
            assert await world.look() == ["llava-0"]


async def test_a_rate_of_requests_adds_an_instance() -> None:
    """With SageMakerVariantInvocationsPerInstance, requests that end between two looks add instances."""
    async with making(tracking=TargetTracking(metric=TrackedMetric.INVOCATIONS, target=5)) as world:
        await world.grow(1)
        world.clients.metrics.invocations += 7

        assert await world.look() == ["llava-0", "llava-1"]
        assert world.reports[-1] == "llava: from 1 to 2 instances, 7 requests per minute"


async def test_a_name_is_used_again_only_when_its_instance_is_gone() -> None:
    """Session ids contain names, so a name is reused only after its instance is gone; two processes never share one."""
    async with making(max_capacity=1) as world:
        await world.grow(1)
        await world.look()
        await world.look(after_s=10)
        await world.look()
        assert world.phase("llava-0") is Phase.STOPPING
        world.clients.num_waiting = 1
        await world.look()
        assert world.phase("llava-0") is Phase.STOPPING

        await world.be_gone("llava-0")

        assert await world.look() == ["llava-0"]


async def test_sessions_without_a_journal_keep_their_instance() -> None:
    """Without a journal an instance with sessions stays; the autoscaler asks rarely, and counts a late opening, too."""
    async with making(are_journaled=False) as world:
        (instance,) = await world.grow(1)
        world.sessions["llava-0"] = 2
        await world.look()
        assert await world.look(after_s=10) == ["llava-0"]
        assert await world.look() == ["llava-0"]
        assert world.asked == ["llava-0"]
        assert "2 open sessions and no journal" in world.reports[-1]

        world.sessions["llava-0"] = None  # a missing answer does not mean zero sessions
        assert await world.look(after_s=5) == ["llava-0"]

        world.sessions["llava-0"] = 0
        await world.look(after_s=5)
        assert instance.state is InstanceState.DRAINING
        world.sessions["llava-0"] = 1
        assert await world.look() == ["llava-0"]
        assert instance.is_ready


async def test_sessions_with_a_journal_keep_nobody() -> None:
    """With a journal any instance can adopt sessions, so the autoscaler does not ask for their number."""
    async with making() as world:
        await world.grow(1)
        world.sessions["llava-0"] = 2
        await world.look()
        assert await world.look(after_s=10) == []
        assert world.asked == []


async def test_an_operator_who_resumes_an_instance_keeps_it() -> None:
    """An instance that an operator resumes stays for another cool-down, as if it had been used."""
    async with making() as world:
        (instance,) = await world.grow(1)
        await world.look()
        await world.look(after_s=10)
        assert instance.state is InstanceState.DRAINING
        world.registry.resume("llava-0")

        assert await world.look() == ["llava-0"]
        assert await world.look() == ["llava-0"]
        assert await world.look(after_s=9) == ["llava-0"]
        assert await world.look(after_s=1) == []


async def test_an_instance_that_an_operator_drains_is_replaced_when_requests_come() -> None:
    """A drained instance is replaced up to MaxCapacity. When it is resumed, both stay for a cool-down."""
    async with making(max_capacity=2) as world:
        await world.grow(1)
        world.registry.drain("llava-0")
        assert await world.look() == []
        assert world.variant.may_start
        world.clients.num_waiting = 1

        assert await world.look() == ["llava-1"]
        assert world.variant.scale.why.endswith("; drained by an operator: llava-0")
        assert not world.variant.scale.is_limited

        world.clients.num_waiting = 0
        await world.be_ready("llava-1")
        world.registry.resume("llava-0")
        assert await world.look() == ["llava-0", "llava-1"]
        assert await world.look(after_s=9) == ["llava-0", "llava-1"]


async def test_a_drained_instance_is_stopped_when_the_variant_shrinks_to_its_minimum() -> None:
    """A drained instance is stopped when the desired number, which rose after the drain, returns to MinCapacity."""
    async with making(max_capacity=2) as world:
        await world.grow(1)
        world.scaled.settings = world.scaled.settings.replace(min_capacity=1, initial_count=1)
        world.registry.drain("llava-0")
        await world.look()
        assert await world.look() == ["llava-1"]
        await world.be_ready("llava-1")
        world.clients.num_waiting = 10
        await world.look()
        assert await world.look() == ["llava-1"]  # MaxCapacity is reached
        assert world.phase("llava-0") is Phase.WITHDRAWN

        world.clients.num_waiting = 0
        for _ in range(3):
            await world.look(after_s=11)

        assert world.phase("llava-0") is Phase.STOPPING
        assert world.running == ["llava-1"]


async def test_a_drained_instance_that_is_resumed_while_its_sessions_are_counted_stays() -> None:
    """An instance that an operator resumes while the autoscaler waits for its session count is not stopped."""
    async with making(max_capacity=1, are_journaled=False) as world:
        await world.grow(1)
        world.registry.drain("llava-0")
        await world.look()
        world.on_asked = lambda: world.registry.resume("llava-0")
        await world.look(after_s=11)
        await world.look(after_s=11)

        assert await world.look() == ["llava-0"]
        assert world.instance("llava-0").is_ready


async def test_a_draining_instance_that_an_operator_resumes_while_its_sessions_are_counted_stays() -> None:
    """The instance that the autoscaler has drained is not removed while it serves again."""
    async with making(max_capacity=1, are_journaled=False) as world:
        await world.grow(1)
        await world.look()
        await world.look(after_s=10)
        assert world.phase("llava-0") is Phase.DRAINING
        world.on_asked = lambda: world.registry.resume("llava-0")
        await world.look()

        assert await world.look() == ["llava-0"]
        assert world.instance("llava-0").is_ready


async def test_an_operators_drain_while_sessions_are_counted_stays() -> None:
    """The autoscaler chose the instance for a scale-in, and does not resume it later as its own."""
    async with making(max_capacity=1, are_journaled=False) as world:
        await world.grow(1)
        await world.look()
        world.on_asked = lambda: world.registry.drain("llava-0")
        await world.look(after_s=10)
        world.on_asked = lambda: None
        world.clients.num_waiting = 1

        assert await world.look() == []
        assert world.phase("llava-0") is Phase.WITHDRAWN


async def test_a_variant_that_is_removed_while_sessions_are_counted_starts_nothing() -> None:
    """A removed variant starts no instance, which no component would stop."""
    async with making(max_capacity=4, are_journaled=False) as world:
        await world.grow(3)
        world.registry.drain("llava-0")
        world.registry.drain("llava-1")
        await world.look()
        world.clients.num_waiting = 8
        is_asked, may_answer = asyncio.Event(), asyncio.Event()

        async def ask(*_: object, **__: object) -> OperationAnswer:
            is_asked.set()
            await may_answer.wait()
            return OperationAnswer(200, "", b"{}")

        world.operations = SimpleNamespace(ask=ask)
        looking = asyncio.create_task(world.look(after_s=10))  # two suffice now, and one of them is drained
        await is_asked.wait()
        await world.autoscaler.remove(world.scaled)
        assert list(world.scaled.members) == ["llava-0", "llava-1", "llava-2"]
        may_answer.set()
        await looking

        assert sorted(world.firsts) == ["llava-0", "llava-1", "llava-2"]


async def test_a_drained_instance_that_leaves_no_room_is_named_and_stopped_by_a_scale_in() -> None:
    """A drained instance that blocks a start is named in the log and stopped by a scale-in, never resumed."""
    async with making(max_capacity=1) as world:
        (instance,) = await world.grow(1)
        world.registry.drain("llava-0")
        lease = instance.lease()
        world.clients.num_waiting = 1
        assert await world.look() == []
        assert not world.variant.may_start
        assert world.variant.scale.why.endswith("; drained by an operator: llava-0, and MaxCapacity is reached")
        assert world.variant.scale.is_limited

        lease.release()
        world.clients.num_waiting = 0
        await world.look()
        await world.look(after_s=9)
        assert world.phase("llava-0") is Phase.WITHDRAWN
        await world.look()
        assert world.phase("llava-0") is Phase.STOPPING
        await world.be_gone("llava-0")
        world.clients.num_waiting = 1
        assert await world.look() == ["llava-0"]


async def test_what_the_autoscaler_drains_may_be_resumed() -> None:
    """Requests wait for an instance that the autoscaler has drained, because it may be resumed."""
    async with making(max_capacity=1) as world:
        (instance,) = await world.grow(1)
        await world.look()
        await world.look(after_s=10)
        assert (world.phase("llava-0"), world.variant.may_start) == (Phase.DRAINING, True)
        world.clients.num_waiting = 1
        assert await world.look() == ["llava-0"]
        assert not instance.is_resumable


async def test_an_operators_drain_of_a_draining_instance_stays() -> None:
    """A draining instance that an operator drains, too, is not resumed.

    Another one serves, and it is stopped as planned.
    """
    async with making(max_capacity=2) as world:
        (instance,) = await world.grow(1)
        await world.look()
        await world.look(after_s=10)
        assert world.phase("llava-0") is Phase.DRAINING
        world.registry.drain("llava-0")
        lease = instance.lease()

        assert await world.look() == ["llava-1"]
        assert (world.phase("llava-0"), instance.state) == (Phase.WITHDRAWN, InstanceState.DRAINING)
        assert world.variant.scale.why.endswith("; drained by an operator: llava-0")

        await world.be_ready("llava-1")
        lease.release()
        for _ in range(2):
            await world.look(after_s=11)
        assert world.phase("llava-0") is Phase.STOPPING


async def test_an_operators_drain_of_an_idle_draining_instance_does_not_keep_it() -> None:
    """An idle draining instance stops as planned, although an operator drains it, too."""
    async with making(max_capacity=1) as world:
        await world.grow(1)
        await world.look()
        await world.look(after_s=10)
        assert world.phase("llava-0") is Phase.DRAINING
        world.registry.drain("llava-0")
        assert not world.variant.may_start
        await world.look()
        assert world.phase("llava-0") is Phase.STOPPING


async def test_a_start_that_fails_is_tried_again_later_each_time() -> None:
    """A failed start is repeated at growing intervals: waiting requests are kept, and starts do not pile up."""
    async with making(max_capacity=1) as world:
        world.clients.num_waiting = 1
        waits = []
        for _ in range(3):
            assert await world.look(after_s=100) == ["llava-0"]
            world.firsts["llava-0"].set_exception(LaunchError("llava-0 cannot load its model"))
            await settle()
            assert world.registry.find("llava-0") is None
            await world.be_gone("llava-0")
            assert await world.look(after_s=0) == []
            waits.append(world.scaled.starts_after - world.now)

        assert waits == [1.0, 2.0, 4.0]
        assert "cannot load its model" in world.reports[-2]


async def test_the_first_instances_must_come_up() -> None:
    """If the first instances fail to start, the fleet ends with an error."""
    world = World(initial_count=2)
    starting = asyncio.create_task(world.autoscaler.start())
    await settle()
    assert world.running == ["llava-0", "llava-1"]
    await world.be_ready("llava-0")
    world.firsts["llava-1"].set_exception(LaunchError("there is no such thing"))

    with pytest.raises(LaunchError, match="no such thing"):
        await starting


async def test_one_that_is_down_goes_at_once() -> None:
    """An instance that is down has nothing to finish and is stopped at once."""
    async with making() as world:
        await world.grow(2)
        world.registry.set_state("llava-0", InstanceState.DOWN)
        await world.look()
        await world.look(after_s=10)

        assert [world.phase(name) for name in ("llava-0", "llava-1")] == [Phase.STOPPING, Phase.DRAINING]


async def test_an_instance_that_starts_is_not_stopped_and_then_stays_for_a_cooldown() -> None:
    """A starting instance stays for a cool-down after its start, because the client that got a 503 comes back."""
    async with making() as world:
        world.clients.num_waiting = 1
        assert await world.look() == ["llava-0"]
        world.clients.num_waiting = 0
        for _ in range(3):
            assert await world.look(after_s=100) == ["llava-0"]
        assert world.variant.scale.why == "an instance is being started, for which clients may wait"

        await world.be_ready("llava-0")

        assert await world.look() == ["llava-0"]
        assert await world.look(after_s=9) == ["llava-0"]
        assert await world.look(after_s=1) == []


async def test_an_instance_stays_until_clients_come_back() -> None:
    """An instance stays at least for the Retry-After that clients got, the duration of the last start."""
    async with making() as world:
        world.variant.last_start_s = 100.0
        world.clients.num_waiting = 1
        await world.look()
        world.instance("llava-0").started_at = world.now
        world.clients.num_waiting = 0
        await world.look()
        await world.be_ready("llava-0")

        assert await world.look(after_s=0) == ["llava-0"]
        assert await world.look(after_s=99) == ["llava-0"]
        assert await world.look(after_s=3) == []


async def test_starts_that_fail_end_with_the_cooldown_if_nothing_waits() -> None:
    """Failed starts end after the cool-down if no request waits; a later request begins them again."""
    async with making(max_capacity=1) as world:
        world.clients.num_waiting = 1
        await world.look()
        world.clients.num_waiting = 0
        await world.look(after_s=100)
        for after_s in (1, 2):
            world.firsts["llava-0"].set_exception(LaunchError("llava-0 cannot load its model"))
            await settle()
            await world.be_gone("llava-0")
            assert await world.look(after_s=0) == []
            assert await world.look(after_s=after_s) == ["llava-0"]

        assert await world.look(after_s=7) == []
        await world.be_gone("llava-0")
        world.clients.num_waiting = 1
        assert await world.look() == ["llava-0"]
        world.clients.num_waiting = 0
        assert await world.look(after_s=100) == ["llava-0"]


async def test_a_queue_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an answer of the queue its last count applies, and real-time requests are counted as before."""
    monkeypatch.setattr(autoscaler_module, "PENDING_TIMEOUT_S", 0.01)

    async with making() as world:

        async def pending() -> Backlog:
            return Backlog(waiting=1)

        async def refusing() -> Backlog:
            raise QueueUnavailable("The queue is away.")

        async def hanging() -> Backlog:
            await asyncio.sleep(3600)
            raise AssertionError

        world.pending = pending
        assert await world.look() == ["llava-0"]
        world.pending = refusing
        assert await world.look(after_s=1000) == ["llava-0"]
        world.pending = hanging
        assert await world.look(after_s=1000) == ["llava-0"]
        world.clients.num_waiting = 9
        assert await world.look() == ["llava-0", "llava-1"]


async def test_a_variant_that_fails_does_not_hold_up_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """Each look continues with the next variant. A variant whose looks fail is logged once per interval."""
    async with making() as world:
        settings = EndpointSettings(
            name="broken", variants=(VariantSettings(model="broken", scaling=world.scaled.settings),)
        )
        broken = Registry([settings]).get_endpoint("broken").variants[0]
        launches = [Launch(f"broken-{number}", "broken", "broken.mar") for number in range(3)]
        scaled = ScaledVariant(broken, launches)
        clients = Clients(broken, metrics=Unreadable())
        autoscaler = Autoscaler(
            [scaled, world.scaled], world.registry, world, world, print, are_journaled=True, clock=lambda: world.now
        )
        world.traffic = lambda: [clients, world.clients]
        world.autoscaler = autoscaler
        world.clients.num_waiting = 1
        assert await world.look() == ["llava-0"]
        await world.look()
        assert len(caplog.records) == 1
        await world.look(after_s=INTERVAL_S)
        assert [record.getMessage() for record in caplog.records] == [
            f"variant is not scaled endpoint=broken variant=AllTraffic left_out={num_left_out} error=ZeroDivisionError"
            for num_left_out in (0, 1)
        ]


async def test_is_woken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A held request wakes the autoscaler at once, and a failed look is repeated later."""
    monkeypatch.setattr(autoscaler_module, "LOOK_S", 3600.0)

    async with making() as world:
        looks = 0

        def fail_at_first() -> list[Clients]:
            nonlocal looks
            looks += 1
            if looks == 1:
                raise ZeroDivisionError
            return [world.clients]

        world.traffic = fail_at_first
        running = asyncio.create_task(world.autoscaler.run())
        while looks < 1:  # noqa: ASYNC110
            await asyncio.sleep(0)
        world.clients.num_waiting = 1
        world.autoscaler.wake()
        while world.running != ["llava-0"]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        running.cancel()


@pytest.mark.parametrize(
    ("status", "body", "number"),
    [
        (200, b'{"sessions": {"open": 3, "max": 8}}', 3),
        (200, b'{"models": []}', 0),
        (200, b"[1]", 0),
        (404, b"not found", 0),
        (503, b"", None),
    ],
)
def test_reads_what_instances_say_of_their_sessions(status: int, body: bytes, number: int | None) -> None:
    """An instance's sessions are read from its status; another handler has none, and an error is not a count."""
    assert read_open_sessions(OperationAnswer(status, "", body)) == number
