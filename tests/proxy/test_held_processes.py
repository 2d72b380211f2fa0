"""Several proxy processes with instances that start on demand: each holds requests and wakes the parent."""

import asyncio
import http.client
import json
import socket
from contextlib import closing

import pytest

from tests.proxy.conftest import KEY
from tests.proxy.fake_instance import FakeInstance
from tests.waiting import DEADLINE_S, until
from torchmoor.config.health import HealthSettings
from torchmoor.config.listen import ListenSettings
from torchmoor.config.routing import EndpointSettings
from torchmoor.config.routing import VariantSettings as Variant
from torchmoor.config.scaling import ScalingSettings
from torchmoor.config.sessions import SessionIdSettings
from torchmoor.config.settings import ProxySettings
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry
from torchmoor.run.app import Proxy

pytestmark = pytest.mark.slow

NUM_REQUESTS = 4  # the default executor has more threads than that
NO_PROBES = HealthSettings(starting_interval_s=3600, ready_interval_s=3600)


def ask(port: int) -> tuple[int, str]:
    """Send a request on its own connection; return status and body or message."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)) as connection:
        connection.request("POST", "/endpoints/llava/invocations", body=b"{}")
        answer = connection.getresponse()
        body = json.loads(answer.read())
        return answer.status, body.get("Message", "")


def make_settings(**scaling: float) -> ProxySettings:
    variant = Variant(model="llava", scaling=ScalingSettings(**scaling))
    return ProxySettings(
        endpoints=(EndpointSettings(name="llava", variants=(variant,)),),
        listen=ListenSettings(port=0, admin_port=0, processes=2),
        health=NO_PROBES,
        sessions=SessionIdSettings(keys={"k1": KEY}),
    )


async def num_waiting(proxy: Proxy) -> int:
    await proxy.data.refresh()
    (traffic,) = proxy.data.traffic()
    return traffic.num_waiting


def test_what_every_process_holds_wakes_the_parent_and_is_served() -> None:
    """The parent counts all processes' waiting requests.

    Each process learns of the new instance and answers its own.
    """
    settings = make_settings(max_hold_s=40)
    registry = Registry(settings.endpoints)
    wakes: list[None] = []

    async def scenario() -> None:
        fake = FakeInstance("llava-0")
        await fake.start()
        async with asyncio.timeout(DEADLINE_S), Proxy(settings, registry) as proxy:
            proxy.data.on_need(lambda: wakes.append(None))
            asking = [asyncio.create_task(asyncio.to_thread(ask, proxy.port)) for _ in range(NUM_REQUESTS)]
            await until(lambda: len(wakes) == NUM_REQUESTS)
            while await num_waiting(proxy) < NUM_REQUESTS:
                pass

            registry.add(Instance(name="llava-0", endpoint="llava", model="llava", port=fake.port, capacity=2))
            registry.set_state("llava-0", InstanceState.READY)

            assert [status for status, _ in await asyncio.gather(*asking)] == [200] * NUM_REQUESTS
            while await num_waiting(proxy):
                pass
            instance = registry.instances()[0]
            registry.drain("llava-0")
            while not proxy.data.is_idle(instance):
                await proxy.data.refresh()
            registry.dismiss("llava-0")
        await fake.stop()

    asyncio.run(scenario())


def test_a_process_knows_how_long_starts_take() -> None:
    """A process's refusal states the duration that the parent's launcher has measured."""
    settings = make_settings(max_hold_s=0.5)
    registry = Registry(settings.endpoints)

    async def scenario() -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            async with asyncio.timeout(DEADLINE_S), Proxy(settings, registry) as proxy:
                loop = asyncio.get_running_loop()
                registry.get_endpoint("llava").variants[0].last_start_s = 1000.0
                registry.add(
                    Instance(
                        name="llava-0",
                        endpoint="llava",
                        model="llava",
                        port=free.getsockname()[1],
                        started_at=loop.time(),
                    )
                )

                message = ""
                while "the last start took 1000 s" not in message:  # the parent's message may arrive after a request
                    status, message = await asyncio.to_thread(ask, proxy.port)
                    assert status == 503
                registry.dismiss("llava-0")

    asyncio.run(scenario())
