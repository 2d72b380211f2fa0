"""Health checks of many instances at a time."""

import asyncio
import itertools
import socket
from typing import NoReturn

import pytest
from aiohttp import ClientSession
from aiohttp.resolver import DefaultResolver

from tests.unit.torchmoor.async_inference.rig import until
from tests.unit.torchmoor.stream_server import stream_server
from tests.waiting import DEADLINE_S
from torchmoor.config.health import HealthSettings
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.fleet.health import HealthChecker, WorkerProbe
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry

READY = b'[{"workers": [{"status": "READY"}]}]'
NUM_SILENT = 150


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(READY), READY))
    await writer.drain()
    writer.close()


async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()  # until the prober gives up
    writer.close()


async def test_a_worker_that_hangs_is_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    """The default log level reports a hanging worker once, not at each probe."""

    async def tell_status(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"instance": "a"}' if is_well else b"{}"
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    async with stream_server(tell_status) as port, ClientSession() as client:
        probe = WorkerProbe(Instance(name="a", endpoint="e", model="m", port=port), 60)
        for is_well in (True, False, False, True, False):
            assert await probe.answers(client) is is_well

    assert [record.getMessage() for record in caplog.records] == ["worker does not answer instance=a"] * 2


async def test_silent_instances_keep_nobody_from_being_asked() -> None:
    """Unreachable instances must not delay the probes of those that answer."""
    registry = Registry([EndpointSettings(name="e", variants=(VariantSettings(name="v", model="m"),))])
    has_ready = asyncio.Event()
    registry.listen(lambda instance: has_ready.set() if instance.state is InstanceState.READY else None)
    async with stream_server(stay_silent, backlog=NUM_SILENT) as silent, stream_server(answer) as alive:
        for number in range(NUM_SILENT + 1):
            port = silent if number < NUM_SILENT else alive
            registry.add(
                Instance(name=f"i-{number}", endpoint="e", variant="v", model="m", port=port, management_port=port)
            )
        # Longer than the test waits, so an instance that is asked after the silent ones is never asked.
        settings = HealthSettings(probe_timeout_s=600)
        async with HealthChecker(registry, settings, lambda: None):
            await has_ready.wait()


async def test_a_failed_round_is_not_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault is logged once, not at each interval. Breakers advance although no probe begins, and the reverse."""
    rounds, has_third = itertools.count(1), asyncio.Event()
    registry = Registry([EndpointSettings(name="e", variants=(VariantSettings(model="m"),))])

    def fail() -> None:
        if next(rounds) == 3:
            has_third.set()
        raise ZeroDivisionError

    def fail_to_list() -> NoReturn:
        raise ZeroDivisionError

    monkeypatch.setattr(registry, "instances", fail_to_list)
    async with HealthChecker(registry, HealthSettings(starting_interval_s=0.01), fail):
        await asyncio.wait_for(has_third.wait(), DEADLINE_S)

    assert [record.getMessage() for record in caplog.records] == [
        "a round of probes failed left_out=0 error=ZeroDivisionError",
        "breakers were not advanced left_out=0 error=ZeroDivisionError",
    ]


async def test_probes_that_fail_by_a_fault_are_in_the_log_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An instance that is not ready is probed at each interval, and the fault is logged with its traceback."""
    probes, has_third = itertools.count(1), asyncio.Event()

    async def fail(checker: HealthChecker, instance: Instance) -> bool:
        if next(probes) == 3:
            has_third.set()
        raise ZeroDivisionError

    monkeypatch.setattr(HealthChecker, "ask", fail)
    registry = Registry([EndpointSettings(name="e", variants=(VariantSettings(model="m"),))])
    registry.add(Instance(name="a", endpoint="e", model="m", port=1, management_port=1))

    async with HealthChecker(registry, HealthSettings(starting_interval_s=0.01), lambda: None):
        await asyncio.wait_for(has_third.wait(), DEADLINE_S)

    assert [(record.getMessage(), bool(record.exc_info)) for record in caplog.records] == [
        ("a probe failed left_out=0 error=ZeroDivisionError", True)
    ]


async def test_a_name_that_dns_never_resolves_does_not_keep_the_proxy_unready(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy's readiness waits for the first probe of each instance; the others can serve meanwhile."""

    async def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "no address")

    monkeypatch.setattr(DefaultResolver, "resolve", resolve)
    registry = Registry([EndpointSettings(name="e", variants=(VariantSettings(model="m"),))])
    registry.add(Instance(name="a", endpoint="e", model="m", host="a.example", port=1, management_port=1))

    async with HealthChecker(registry, HealthSettings(starting_interval_s=0.01), lambda: None) as checker:
        await until(checker.has_asked_all, "a probe was tried")


@pytest.mark.parametrize(("number", "is_sent"), [(socket.EAI_AGAIN, False), (socket.EAI_NONAME, True)])
async def test_a_probe_without_an_answer_by_dns_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, number: int, is_sent: bool
) -> None:
    """A name that is unknown counts as a missing answer of its instance."""

    async def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(number, "no address")

    monkeypatch.setattr(DefaultResolver, "resolve", resolve)
    instance = Instance(name="a", endpoint="e", model="m", host="a.example", port=1, management_port=1)

    async with HealthChecker(Registry([]), HealthSettings(), lambda: None) as checker:
        if is_sent:
            assert await checker.ask(instance) is None
        else:
            with pytest.raises(OSError, match="no address"):
                await checker.ask(instance)
