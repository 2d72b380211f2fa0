"""Sums and shares of several proxy processes."""

import json
import logging
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from torchmoor.config.container import ContainerSettings
from torchmoor.config.credentials import Credentials
from torchmoor.config.file import parse
from torchmoor.config.listen import ListenSettings
from torchmoor.config.routing import EndpointSettings, MultiModelSettings, VariantSettings
from torchmoor.config.scaling import ScalingSettings
from torchmoor.config.sessions import SessionIdSettings
from torchmoor.config.settings import ProxySettings
from torchmoor.errors import ConfigError, LaunchError
from torchmoor.fleet.process_commands import reopen_log, take_credentials
from torchmoor.metrics.invocations import InvocationMetrics
from torchmoor.proxy.instances.breaker import BreakerState
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry
from torchmoor.proxy.routing.reported_status import ModelReport, ReportedStatus, ReportedTier
from torchmoor.run.app import Proxy
from torchmoor.run.data_plane import DataPlane
from torchmoor.run.processes.child import ChildProxy
from torchmoor.run.processes.limits import divide, part_of_body_bytes
from torchmoor.run.processes.link import ChildAssignment, Link, Message, from_text, to_text
from torchmoor.run.processes.parent import ProcessGroup, reserve
from torchmoor.run.processes.totals import Report as ProcessReport
from torchmoor.run.processes.totals import Totals

SETTINGS = ProxySettings(
    endpoints=(
        EndpointSettings(name="chat", variants=(VariantSettings(model="chat", scaling=ScalingSettings(max_held=10)),)),
    ),
    sessions=SessionIdSettings(keys={"k1": b"0123456789abcdef"}),
)


def report(
    *, invocations: int, latency_s: float, waiting: int = 0, breaker: str = "closed", share: float = 1.0
) -> ProcessReport:
    metrics = InvocationMetrics("chat", "AllTraffic")
    metrics.invocations = invocations
    metrics.decisions["session"].count = invocations
    metrics.model_latency.observe(latency_s)
    return {
        "variants": [{"metrics": metrics.snapshot(), "num_waiting": waiting, "turns": {"chat-0": waiting}}],
        "counts": {
            "AccessDenied": {"InvalidSignature": invocations},
            "CallerLimited": {"max_requests": 2 * invocations},
            "WebSocketConnections": {"": invocations},
            "AccessLogLines": {"": invocations},
            "AccessLogDropped": {"": 1},
        },
        "instances": {
            "chat-0": {
                **{"state": "ready", "outstanding": 3, "inflight_body_bytes": 40},
                "num_pieces": 0,
                **{"breaker": breaker, "num_failures": 2, "share": share, "idle": 1},
            }
        },
        "needs_status": [],
    }


def test_totals_are_sums_of_those_that_run_and_those_that_have_ended() -> None:
    """A counter keeps the counts of ended processes; a gauge drops them."""
    registry = Registry(SETTINGS.endpoints)
    registry.add(Instance(name="chat-0", endpoint="chat", model="chat", port=1))
    totals = Totals(registry)
    totals.take(0, report(invocations=1, latency_s=0.1, waiting=3))
    totals.take(1, report(invocations=2, latency_s=0.2, waiting=4, breaker="open", share=0.5))
    totals.take(1, report(invocations=4, latency_s=0.2, waiting=4, breaker="open", share=0.5))
    totals.compute()
    (variant,), (instance,) = totals.variants, registry.instances()

    assert (variant.metrics.invocations, variant.num_waiting) == (5, 7)
    assert totals.counts == {
        "AccessDenied": {"InvalidSignature": 5},
        "CallerLimited": {"max_requests": 10},
        "WebSocketConnections": {"": 5},
        "AccessLogLines": {"": 5},
        "AccessLogDropped": {"": 2},
    }
    assert variant.waiting_turns == {"chat-0": 7}
    assert (variant.metrics.model_latency.sum, sum(variant.metrics.model_latency.counts)) == (pytest.approx(0.3), 2)
    assert variant.metrics.decisions["session"].count == 5
    assert (instance.breaker.state, instance.share, len(instance.idle)) == (BreakerState.OPEN, 0.5, 2)
    assert instance.outstanding == 6
    assert instance.inflight_body_bytes == 80

    for _ in range(2):  # a process ends, and so does its successor
        totals.end(1)
        totals.take(1, report(invocations=10, latency_s=0.2))
    totals.compute()

    assert (variant.metrics.invocations, variant.num_waiting) == (25, 3)
    assert totals.counts == {
        "AccessDenied": {"InvalidSignature": 25},
        "CallerLimited": {"max_requests": 50},
        "WebSocketConnections": {"": 11},
        "AccessLogLines": {"": 25},
        "AccessLogDropped": {"": 4},
    }
    assert sum(variant.metrics.model_latency.counts) == 4
    assert variant.metrics.decisions["session"].count == 25
    assert (instance.breaker.state, instance.share) == (BreakerState.CLOSED, 1.0)


def test_limits_that_are_for_all_processes_are_divided() -> None:
    """Limits for all processes are divided, so that more processes do not need more memory, retries or queue room."""
    many = EndpointSettings(
        name="many", variants=(VariantSettings(model="many"),), multi_model=MultiModelSettings(hot_outstanding=10)
    )
    limits, part = SETTINGS.limits, divide(SETTINGS.replace(endpoints=(*SETTINGS.endpoints, many)), 4)

    assert part.limits.max_connections == limits.max_connections // 4
    assert part.limits.max_waiting_bytes == limits.max_waiting_bytes // 4
    assert part.recovery.retry_burst == SETTINGS.recovery.retry_burst // 4
    assert part.endpoints[0].variants[0].scaling == ScalingSettings(max_held=3)
    assert part.endpoints[1].multi_model == MultiModelSettings(hot_outstanding=3)


def test_no_part_is_too_small_for_one_request() -> None:
    """Each process accepts the largest body, however many processes there are."""
    part = divide(SETTINGS, 64)

    assert part.limits.max_waiting_bytes >= part.limits.max_body_bytes
    assert part.limits.max_arriving_bytes >= part.limits.max_passthrough_body_bytes


def test_each_process_sends_an_instance_its_part_of_the_bodies() -> None:
    """The processes together send an instance no more than its heap holds; a runtime API body always fits."""
    instance = Instance(name="chat-0", endpoint="chat", model="chat", port=1, max_inflight_body_bytes=192 << 20)
    parts = [
        part_of_body_bytes(instance, SETTINGS.replace(listen=ListenSettings(processes=number))) for number in (2, 64)
    ]

    assert parts == [96 << 20, 17 << 19]


def test_assignment_survives_the_wire() -> None:
    """A process has its parent's settings, including secrets."""
    given = ChildAssignment(SETTINGS, port=1, index=0, log_level=30)

    assert from_text(to_text(given)) == given


class OneWayLink:
    """A link to a process that hears everything and says nothing."""

    is_clogged = False

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def send(self, kind: str, **members: Any) -> None:
        self.sent.append((kind, members))

    async def receive(self) -> AsyncIterator[Message]:
        for message in ():
            yield message

    def close(self) -> None:
        pass


async def test_process_that_starts_later_carries_out_the_newest_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process gets the newest commands before it accepts connections, so that a revoked key is not valid there."""
    link, settings = OneWayLink(), SETTINGS.replace(listen=ListenSettings(port=0, processes=1))
    old, new = (Credentials(tokens={"ann": f"the-{age}-token-of-ann"}) for age in ("old", "new"))
    monkeypatch.setattr(sys, "executable", "/bin/true")

    async with AsyncExitStack() as stack:
        group = ProcessGroup(settings, Registry(settings.endpoints), lambda instance: None)
        await group.start(stack)
        group.carry_out(take_credentials, old)
        group.carry_out(reopen_log)

        async def open_link(own: socket.socket) -> OneWayLink:
            own.close()
            group.carry_out(take_credentials, new)
            return link

        monkeypatch.setattr(Link, "open", open_link)
        with pytest.raises(LaunchError):
            await group.listen(stack)

    kinds = [kind for kind, _ in link.sent]
    calls = [from_text(members["call"]) for kind, members in link.sent if kind == "command"]
    assert kinds == ["assign", "command", "command", "listen"]
    assert calls == [(take_credentials, (new,)), (reopen_log, ())]


async def test_a_process_knows_what_an_operator_has_drained() -> None:
    """While an instance is down, too: no request waits for a start that the drain does not allow."""
    registry = Registry(SETTINGS.endpoints)
    group = ProcessGroup(SETTINGS.replace(listen=ListenSettings(processes=2)), registry, lambda instance: None)
    child: Any = ChildProxy(ChildAssignment(SETTINGS, 0, 0, logging.INFO), OneWayLink())
    messages: list[Message] = []

    class Recorder:
        def send(self, kind: str, **members: Any) -> None:
            messages.append({"kind": kind, **members})

    async def may_start() -> bool:
        for message in messages:
            await child.on_message(json.loads(json.dumps(message)))
        messages.clear()
        return child.registry.get_endpoint("chat").variants[0].may_start

    group.children = [Recorder()]
    registry.add(Instance(name="chat-0", endpoint="chat", model="chat", port=1))
    registry.set_state("chat-0", InstanceState.DOWN)
    assert await may_start()

    registry.drain("chat-0")
    assert not await may_start()
    registry.resume("chat-0")
    assert await may_start()


async def test_breakers_that_open_in_several_processes_leave_half_of_the_instances() -> None:
    """When all instances fail at once, processes may cut different ones off; each keeps half of them in use."""
    child: Any = ChildProxy(ChildAssignment(SETTINGS, 0, 0, logging.INFO), link := OneWayLink())
    registry = child.registry
    instances = [Instance(name=f"chat-{number}", endpoint="chat", model="chat", port=1) for number in range(4)]
    for instance in instances:
        registry.add(instance)
        registry.set_state(instance.name, InstanceState.READY)

    for name in ("chat-0", "chat-1", "chat-2"):
        await child.on_message({"kind": "breaker", "name": name, "is_open": True})

    assert [instance.is_ready for instance in instances] == [False, False, True, True]
    registry.refresh(instances[2])
    assert link.sent == []  # it is not reported as closed, because it may be open elsewhere
    await child.on_message({"kind": "breaker", "name": "chat-0", "is_open": False})
    assert [instance.is_ready for instance in instances] == [True, False, True, True]


async def test_a_process_that_starts_later_spares_the_instances_that_fail() -> None:
    """A new process knows the breakers that are open in the others."""
    registry = Registry(SETTINGS.endpoints)
    group = ProcessGroup(SETTINGS.replace(listen=ListenSettings(processes=2)), registry, lambda instance: None)
    for name in ("chat-0", "chat-1"):
        registry.add(Instance(name=name, endpoint="chat", model="chat", port=1, state=InstanceState.READY))
    registry.instances()[0].breaker.state = BreakerState.OPEN  # as the other processes report
    sent, child = OneWayLink(), ChildProxy(ChildAssignment(SETTINGS, 0, 0, logging.INFO), OneWayLink())

    group.on_started(sent)
    for kind, members in sent.sent:
        await child.on_message(json.loads(json.dumps({"kind": kind, **members})))

    assert [instance.is_ready for instance in child.registry.instances()] == [False, True]


def test_number_of_processes_is_a_setting() -> None:
    content = {
        "Endpoints": [
            {
                "EndpointConfig": {
                    "EndpointConfigName": "chat",
                    "ProductionVariants": [{"VariantName": "v", "ModelName": "chat"}],
                }
            }
        ],
        "Instances": [{"name": "chat-0", "port": 1}],
    }

    assert parse({**content, "listen": {"processes": 4}}).proxy.listen.processes == 4
    with pytest.raises(ConfigError, match=r"listen\.processes must be from 1 to 64, not 0"):
        parse({**content, "listen": {"processes": 0}})


def test_reserved_port_can_be_shared_by_our_own_only() -> None:
    """Only a process that shares the reserved port can listen on it.

    Other processes, and a second reservation, fail.
    """
    held, port = reserve("127.0.0.1", 0)
    try:
        with socket.socket() as ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            ours.bind(("127.0.0.1", port))
            ours.listen()

            with pytest.raises(OSError, match="in use"):
                reserve("127.0.0.1", port)
    finally:
        for each in held:
            each.close()


def test_one_process_is_the_default() -> None:
    """By default one process runs the data plane and the admin plane."""
    assert ListenSettings().processes == 1
    assert isinstance(Proxy(SETTINGS, Registry(SETTINGS.endpoints)).data, DataPlane)


def test_models_that_a_platform_loads_need_one_process() -> None:
    """Models loaded by a platform need one process, since only the process that received a load knows the model."""
    endpoint = EndpointSettings(
        name="many", variants=(VariantSettings(model="many"),), multi_model=MultiModelSettings()
    )
    settings = SETTINGS.replace(
        endpoints=(endpoint,),
        listen=ListenSettings(processes=2),
        container=ContainerSettings(serves_models=True),
    )

    with pytest.raises(ConfigError, match=r"listen\.processes must be 1"):
        Proxy(settings, Registry(settings.endpoints))


def test_status_survives_the_wire() -> None:
    """The parent's copy of an instance's status equals the original, with many models and with no report."""
    full = ReportedStatus(1, 3, ModelReport({"m": ReportedTier.DEVICE, "n": ReportedTier.DISK}, 10, 20), can_see=False)

    assert from_text(json.loads(json.dumps(to_text(full)))) == full
    assert from_text(json.loads(json.dumps(to_text(ReportedStatus())))) == ReportedStatus()
