"""DNS answers applied to the registry: instances join, leave and move; questions and log messages."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from torchmoor.config.discovery import DiscoverySettings
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.errors import DiscoveryError
from torchmoor.fleet.discovery import Discovery
from torchmoor.fleet.discovery_dns import DnsAnswer
from torchmoor.fleet.discovery_plan import DnsTarget
from torchmoor.fleet.draining import Drainer
from torchmoor.fleet.instance_names import InstanceNames
from torchmoor.proxy.instances.handler_operations import HandlerOperations, OperationAnswer
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry

NAME = "_inference._tcp.llava.zone.test"
ENTRY = DiscoverySettings(dns_name=NAME, endpoint="llava", variant="v", min_interval_s=1, interval_s=8)


class Front:
    """A proxy whose instances have the load that the test sets."""

    def __init__(self) -> None:
        self.busy: set[str] = set()

    def is_idle(self, instance: Instance) -> bool:
        return instance.name not in self.busy


class Rig:
    """A discovery with scripted DNS answers, which looks when the test asks it to."""

    def __init__(self, *, are_journaled: bool = True) -> None:
        self.answer: DnsAnswer | None = DnsAnswer()
        self.registry = Registry([EndpointSettings(name="llava", variants=(VariantSettings(name="v", model="m"),))])
        self.front = Front()
        self.drainer = Drainer(self.registry, self.front.is_idle)
        self.discovery = Discovery(
            [],
            self.registry,
            self.drainer,
            HandlerOperations(),
            are_journaled=are_journaled,
            ask=self._ask,
            rng=Random(1),
        )

    async def _ask(self, settings: DiscoverySettings) -> DnsAnswer:
        if self.answer is None:
            raise DiscoveryError("no server answers")
        return self.answer

    async def begin(self, *entries: DiscoverySettings) -> None:
        """Start the discovery with long intervals, since the test triggers the looks."""
        self.discovery.take(entries)
        await asyncio.sleep(0)

    async def look(self, **hosts: str) -> float:
        """Process one more answer with these instances; return when the next question is due."""
        self.answer = DnsAnswer(
            targets=tuple(DnsTarget(n.replace("_", "-"), 85, (h,)) for n, h in hosts.items()), ttl_s=5.0
        )
        return await self.ask_again()

    async def ask_again(self) -> float:
        wait_s = await self.discovery.look(self.discovery.entries[NAME])
        self.drainer.check()
        return wait_s

    def ready(self, *names: str) -> None:
        for name in names:
            self.registry.set_state(name, InstanceState.READY)

    def states(self) -> dict[str, str]:
        return {instance.name: instance.state.value for instance in self.registry.instances()}

    def host(self, name: str) -> str:
        instance = self.registry.find(name)
        return instance.host


@asynccontextmanager
async def rigged(**options: Any) -> AsyncIterator[Rig]:
    rig = Rig(**options)
    async with rig.discovery:
        yield rig
    rig.drainer.stop()


async def test_an_instance_joins_ends_its_work_and_is_forgotten() -> None:
    """An instance that two answers lack gets no new work, and is removed when idle."""
    async with rigged() as rig:
        await rig.begin(ENTRY)
        assert await rig.look(a="10.0.0.1", b="10.0.0.2") == 5.0
        rig.ready("a", "b")
        rig.front.busy.add("b")

        assert await rig.look(a="10.0.0.1") == ENTRY.min_interval_s
        assert rig.states() == {"a": "ready", "b": "ready"}
        await rig.look(a="10.0.0.1")
        assert rig.states() == {"a": "ready", "b": "draining"}
        rig.front.busy.clear()
        rig.drainer.check()
        assert rig.states() == {"a": "ready"}


async def test_an_operators_drain_outlives_a_pod() -> None:
    """An operator's drain also applies to a new pod of the same name, and after DNS recalls the instance."""
    async with rigged() as rig:
        await rig.begin(ENTRY)
        await rig.look(a="10.0.0.1", b="10.0.0.2")
        rig.ready("a", "b")
        rig.registry.drain("b")

        await rig.look(a="10.0.0.1", b="10.0.0.9")
        rig.ready("b")
        assert (rig.host("b"), rig.states()["b"]) == ("10.0.0.9", "draining")

        for _ in range(2):
            await rig.look(a="10.0.0.1")
        assert "b" not in rig.states()
        await rig.look(a="10.0.0.1", b="10.0.0.10")
        rig.ready("b")
        assert rig.states()["b"] == "draining"
        rig.registry.resume("b")
        assert rig.states()["b"] == "ready"


async def test_who_leaves_and_is_named_again_serves_again() -> None:
    """An instance that DNS names again serves again; an operator's resume cannot keep one that DNS lacks."""
    async with rigged() as rig:
        await rig.begin(ENTRY)
        await rig.look(a="10.0.0.1", b="10.0.0.2")
        rig.ready("a", "b")
        rig.front.busy.add("b")
        for _ in range(2):
            await rig.look(a="10.0.0.1")
        rig.registry.resume("b")
        assert rig.states()["b"] == "draining"

        await rig.look(a="10.0.0.1", b="10.0.0.2")

        assert rig.states() == {"a": "ready", "b": "ready"}
        assert rig.drainer.is_idle


async def test_the_old_address_is_served_to_its_end_before_the_new_one_comes() -> None:
    """An instance at the old address finishes its work before the new one joins, unless it is down."""
    async with rigged() as rig:
        await rig.begin(ENTRY)
        await rig.look(a="10.0.0.1")
        rig.ready("a")
        rig.front.busy.add("a")

        await rig.look(a="10.0.0.2")
        assert (rig.host("a"), rig.states()["a"]) == ("10.0.0.1", "draining")
        rig.registry.set_state("a", InstanceState.DOWN)
        rig.drainer.check()
        assert (rig.host("a"), rig.states()["a"]) == ("10.0.0.2", "starting")


async def test_without_a_journal_one_that_leaves_serves_its_sessions_until_it_is_down() -> None:
    async with rigged(are_journaled=False) as rig:
        await rig.begin(ENTRY)
        await rig.look(a="10.0.0.1", b="10.0.0.2")
        rig.ready("a", "b")
        for _ in range(3):
            await rig.look(a="10.0.0.1")
        assert rig.states()["b"] == "draining"

        rig.registry.set_state("b", InstanceState.DOWN)
        rig.drainer.check()
        assert rig.states() == {"a": "ready"}


async def test_one_whose_address_another_has_got_is_down_whatever_answers_there() -> None:
    """A leaving instance whose address another one gets counts as down, since its probes reach the other one."""
    async with rigged(are_journaled=False) as rig:
        await rig.begin(ENTRY)
        await rig.look(a="10.0.0.1", b="10.0.0.2")
        rig.ready("a", "b")
        await rig.look(b="10.0.0.2")
        await rig.look(b="10.0.0.2")
        assert rig.states() == {"a": "draining", "b": "ready"}
        rig.front.busy.add("a")

        await rig.look(b="10.0.0.2", c="10.0.0.1")
        assert rig.states() == {"a": "draining", "b": "ready", "c": "starting"}
        rig.front.busy.clear()
        rig.drainer.check()
        assert rig.states() == {"b": "ready", "c": "starting"}


async def test_without_an_answer_everything_stays(caplog: pytest.LogCaptureFixture) -> None:
    """Without an answer all instances stay.

    DNS is asked after 1, 2, 4 and then 8 seconds, with two log messages in all.
    """
    async with rigged() as rig:
        await rig.begin(ENTRY)
        await rig.look(a="10.0.0.1")
        rig.ready("a")
        rig.answer = None

        assert [await rig.ask_again() for _ in range(5)] == [1, 2, 4, 8, 8]

        source = rig.registry.sources[NAME]
        assert (rig.states(), source.num_failures, source.error) == ({"a": "ready"}, 5, "no server answers")
        await rig.look(a="10.0.0.1")
        assert source.error == ""
        rig.answer = None
        assert await rig.ask_again() == 1

    assert [record.getMessage().split()[1:4] for record in caplog.records if record.levelname == "WARNING"] == [
        ["failed,", "known", "instances"],
        ["recovered", f"dns_name={NAME}"],
        ["failed,", "known", "instances"],
    ]


async def test_a_static_instance_keeps_its_name(caplog: pytest.LogCaptureFixture) -> None:
    """A static instance keeps its name, which DNS cannot take over, with one log message."""
    async with rigged() as rig:
        static = Instance(name="a", endpoint="llava", variant="v", model="m", port=1)
        rig.registry.add(static)
        await rig.begin(ENTRY)

        for _ in range(3):
            await rig.look(a="10.0.0.1", b="10.0.0.2")

        assert rig.registry.find("a") is static
        assert rig.registry.sources[NAME].notes == ("a is already an instance from another source",)

    assert sum("is already an instance" in record.getMessage() for record in caplog.records) == 1


async def test_entries_come_change_and_go_at_a_reload() -> None:
    """At a reload, instances of a removed name leave, changed ones are replaced, and changed intervals affect none."""
    async with rigged() as rig:
        await rig.begin(ENTRY)
        await rig.look(a="10.0.0.1")
        rig.ready("a")
        first = rig.registry.find("a")

        await rig.begin(DiscoverySettings(dns_name=NAME, endpoint="llava", variant="v", interval_s=9))
        assert rig.registry.find("a") is first
        await rig.begin(DiscoverySettings(dns_name=NAME, endpoint="llava", variant="v", interval_s=9, capacity=7))
        rig.drainer.check()
        second = rig.registry.find("a")
        assert (second.capacity, second.host) == (7, "10.0.0.1")
        await rig.begin()
        rig.drainer.check()

        assert rig.states() == {}
        assert rig.registry.sources == {}


@pytest.mark.parametrize("is_stop", [False, True], ids=["removed", "stopped"])
async def test_an_answer_that_arrives_as_its_entry_ends_changes_nothing(*, is_stop: bool) -> None:
    """wait_for of Python 3.11, which dnspython uses, loses a cancellation if its answer has just arrived."""
    rig = Rig()
    reply: asyncio.Future[DnsAnswer] = asyncio.get_running_loop().create_future()

    async def ask(settings: DiscoverySettings) -> DnsAnswer:
        return await asyncio.wait_for(asyncio.shield(reply), 60)

    discovery = Discovery([ENTRY], rig.registry, rig.drainer, HandlerOperations(), are_journaled=True, ask=ask)
    async with asyncio.timeout(30):
        async with discovery:
            for _ in range(3):
                await asyncio.sleep(0)
            reply.set_result(DnsAnswer(targets=(DnsTarget("a", 85, ("10.0.0.1",)),)))
            await asyncio.sleep(0)
            if not is_stop:
                discovery.take([])
                for _ in range(5):
                    await asyncio.sleep(0)
    rig.drainer.stop()
    assert rig.states() == {}


class Said:
    """Instances, by host, that answer the status operation as scripted."""

    def __init__(self, **answers: OperationAnswer | None) -> None:
        self.answers = {host.replace("_", "."): answer for host, answer in answers.items()}

    async def ask(
        self, instance: Instance, operation: str, body: Mapping[str, object], *, timeout_s: float
    ) -> OperationAnswer | None:
        assert operation == "status"
        return self.answers[instance.host]


def told(name: str) -> OperationAnswer:
    return OperationAnswer(200, "", json.dumps({"instance": name}).encode())


async def test_addresses_that_give_themselves_one_name_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Unnamed handlers all report `local`.

    A log message names such addresses, since all but one instance would be idle.
    """
    async with rigged() as rig:
        entry = ENTRY.replace(record="A", port=85)
        await rig.begin(entry)
        said = Said(**{"10.0.0.1": told("local"), "10.0.0.2": told("local"), "10.0.0.3": told("mine")})
        rig.discovery.entries[NAME].names = InstanceNames(
            said, lambda host: Instance(name="?", endpoint="llava", model="m", host=host, port=85)
        )
        rig.answer = DnsAnswer(hosts=("10.0.0.1", "10.0.0.2", "10.0.0.3"), ttl_s=5.0)
        await rig.ask_again()

        assert sorted(rig.states()) == ["local", "mine"]
        [note] = rig.registry.sources[NAME].notes
        assert note.startswith("2 addresses (10.0.0.1, 10.0.0.2) report the name local: one is used")
        assert note in caplog.text


async def test_known_addresses_stay_when_too_many_are_listed() -> None:
    """An address above max_instances is ignored, also if it sorts before those of the known instances."""
    async with rigged() as rig:
        await rig.begin(ENTRY.replace(record="A", port=85, max_instances=2))
        rig.discovery.entries[NAME].names = InstanceNames(
            Said(**{f"10.0.0.{number}": told(f"llava-{number}") for number in (1, 2, 3)}),
            lambda host: Instance(name="?", endpoint="llava", model="m", host=host, port=85),
        )
        for hosts in (("10.0.0.2", "10.0.0.3"), *[("10.0.0.1", "10.0.0.2", "10.0.0.3")] * 3):
            rig.answer = DnsAnswer(hosts=hosts, ttl_s=5.0)
            await rig.ask_again()
            rig.ready(*rig.states())

        assert rig.states() == {"llava-2": "ready", "llava-3": "ready"}
        assert "more than max_instances (2) addresses are listed" in rig.registry.sources[NAME].notes


async def test_addresses_have_the_names_that_instances_give_themselves() -> None:
    """A silent instance has no name yet; one without a handler of ours is named by its address after three answers."""
    foreign = OperationAnswer(200, "", b"[0.7]")
    loading = OperationAnswer(503, "", b'{"code": 503, "type": "ServiceUnavailableException", "message": ""}')
    said = Said(h1=told("llava-0"), h2=None, h3=loading)
    said.answers["10.0.0.4"] = foreign
    names = InstanceNames(said, lambda host: Instance(name="?", endpoint="e", model="m", host=host, port=85))

    async def ask(*doubtful: str) -> dict[str, tuple[str, ...]]:
        targets = await names.find_targets(["h1", "h2", "h3", "10.0.0.4"], 85, doubtful=set(doubtful))
        return {target.name: target.hosts for target in targets}

    assert await ask() == {"llava-0": ("h1",)}
    await ask()
    assert await ask() == {"llava-0": ("h1",), "ip-10-0-0-4": ("10.0.0.4",)}
    said.answers.update(h1=None, h2=told("llava-0"))
    assert (await ask("h1"))["llava-0"] == ("h1", "h2")  # it keeps its name while the host does not answer
    said.answers.update(h1=told("llava-7"), h3=told("Not A Name"))
    assert await ask("h1") == {"llava-7": ("h1",), "llava-0": ("h2",), "ip-10-0-0-4": ("10.0.0.4",)}
