"""All events at once: each request ends once and nothing is left, whatever clients and instances do."""

import asyncio
from collections import Counter
from random import Random

import pytest

from tests.proxy.conftest import MakeStage, make_session_id
from tests.proxy.fake_instance import Received, Wire
from torchmoor.config.limits import LimitSettings
from torchmoor.config.routing import KvAwareSettings, LateBindingSettings, PrefixAwareSettings, VariantSettings
from torchmoor.config.timeouts import TimeoutSettings
from torchmoor.proxy.instances.instance import Instance, InstanceState

NUM_CLIENTS = 24
NUM_REQUESTS = 8


async def steps(number: int) -> None:
    """Run the event loop for this many iterations."""
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("strategy", ["LEAST_OUTSTANDING_REQUESTS", "RANDOM", "PREFIX_AWARE", "KV_AWARE"])
def test_every_request_is_answered_once_whatever_happens(make_stage: MakeStage, strategy: str) -> None:
    """Clients disconnect; instances refuse, reset, go down and return; turns, chunked bodies and a small queue mix.

    No instance exceeds its capacity, each client that stays gets one whole answer to each request, and the fixture
    finds no lease, place in the queue, kept byte or task left.
    """
    rng = Random(f"stress {strategy}")
    stage = make_stage(
        capacity=2,
        names=("a", "b", "c"),
        variants=(
            VariantSettings(
                model="llava",
                routing_strategy=strategy,
                prefix_aware=PrefixAwareSettings(prefix_length=1024, concurrency_threshold=1),
                kv_aware=KvAwareSettings(block_bytes=64, bytes_per_request=256),
            ),
        ),
        late_binding=LateBindingSettings(max_waiting=10, max_wait_s=10.0),
        limits=LimitSettings(max_waiting_bytes=300_000),
        timeouts=TimeoutSettings(sweep_interval_s=0.02, model_timeout_s=30.0),
        are_journaled=True,
    )
    most: Counter[str] = Counter()  # concurrent requests at an instance, by the proxy's leases

    async def behave(request: Received, wire: Wire) -> None:
        fate = rng.random()
        await steps(rng.randrange(40))
        if fate < 0.05:
            wire.reset()
        elif fate < 0.1:
            await wire.answer(503)
        else:
            await wire.answer(body=b"%d" % len(request.body))

    def watch(instance: Instance) -> None:
        update = instance.on_load

        def on_load(changed: Instance) -> None:
            most[changed.name] = max(most[changed.name], changed.outstanding)
            update(changed)

        instance.on_load = on_load

    for name, fake in stage.instances.items():
        fake.behave = behave
        watch(stage.instance(name))
    statuses: Counter[int] = Counter()

    async def client(number: int) -> None:
        for _ in range(NUM_REQUESTS):
            reader, writer = await asyncio.open_connection("127.0.0.1", stage.proxy.port)
            try:
                body = b"%d" % rng.randrange(4) * rng.choice([1, 500, 3_000, 100_000])
                is_chunked = rng.random() < 0.2
                session = f"X-Amzn-SageMaker-Session-Id: {make_session_id(rng.choice('abc'))}\r\n"
                head = "POST /endpoints/llava/invocations HTTP/1.1\r\nHost: x\r\n"
                head += session if rng.random() < 0.3 else ""
                head += "Transfer-Encoding: chunked\r\n\r\n" if is_chunked else f"Content-Length: {len(body)}\r\n\r\n"
                data = head.encode() + (b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body)
                cut = rng.randrange(1, len(data))
                writer.write(data[:cut])
                if rng.random() < 0.15:  # disconnects before all is sent
                    await steps(rng.randrange(40))
                    continue
                await asyncio.sleep(0)
                writer.write(data[cut:])
                if rng.random() < 0.1:  # disconnects before the answer
                    await steps(rng.randrange(40))
                    continue
                answer = await reader.readuntil(b"\r\n\r\n")
                status = int(answer.split(b" ")[1])
                [length] = [line[16:] for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                received = await reader.readexactly(int(length))
                statuses[status] += 1
                assert status in (200, 503), answer
                assert status != 200 or received == b"%d" % len(body)
            finally:
                writer.transport.abort()

    async def unrest() -> None:
        while True:
            name = rng.choice("abc")
            for state in (InstanceState.DOWN, InstanceState.READY, InstanceState.DRAINING, InstanceState.READY):
                await steps(rng.randrange(80))
                stage.registry.set_state(name, state)

    async def everything() -> None:
        trouble = asyncio.create_task(unrest())
        await asyncio.gather(*(client(number) for number in range(NUM_CLIENTS)))
        trouble.cancel()

    stage.run(everything())
    for name in "abc":
        stage.registry.set_state(name, InstanceState.READY)

    assert statuses[200] > 30
    assert most == {"a": 2, "b": 2, "c": 2}
