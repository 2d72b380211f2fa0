"""Requests of a removed endpoint: each ends with one object, and a new endpoint of the name runs none of them."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.fake_instance import Gate, Received, Wire
from tests.unit.torchmoor.async_inference.rig import UrlRig, never_answering, until
from tests.unit.torchmoor.async_inference.stores import Store
from torchmoor.async_inference.objects.directory_store import DirectoryStore
from torchmoor.async_inference.objects.object_store import NO_METADATA, ObjectMetadata, ObjectUnavailable
from torchmoor.async_inference.request import AsyncOutcome, AsyncState
from torchmoor.async_inference.service import AsyncEndpointContext, AsyncInference
from torchmoor.config.async_inference import AsyncEndpointSettings
from torchmoor.config.async_queue import AsyncQueueSettings
from torchmoor.errors import QueueUnavailable, UnknownEndpoint

SETTINGS = AsyncEndpointSettings()
GONE = "The endpoint was deleted."
TIMEOUT_S = 900.0


class RemovalRig(UrlRig):
    """A rig whose service may start without the endpoint."""

    async def start_without(self) -> tuple[AsyncInference, AsyncEndpointContext]:
        """Start a service without the endpoint, as after a restart that no longer has it."""
        service = self.make_service()
        endpoint = service.endpoints.pop("llava")
        return await self._stack.enter_async_context(service), endpoint


@pytest.fixture
def rig(tmp_path: Path, store: Store) -> RemovalRig:
    return RemovalRig(tmp_path / "rig", store.url)


async def states(service: AsyncInference, *ids: str) -> list[tuple[AsyncState, str]]:
    records = [await service.queue.get(each) for each in ids]
    return [(each.state, each.reason) for each in records if each is not None]


async def test_what_runs_may_end_and_what_waits_is_cancelled(rig: RemovalRig) -> None:
    """Running requests may end, waiting ones are cancelled, and a new endpoint of the name has an empty queue."""
    gate = Gate()

    async def behave(received: Received, wire: Wire) -> None:
        await gate.pass_through()
        await wire.answer(body=b"answer")

    async with rig:
        rig.instance.behave, rig.places.num_free = behave, 1
        service = await rig.start()
        endpoint = service.endpoints["llava"]
        for name in ("one", "two", "three", "four"):
            await service.submit(rig.request(name))
        await until(gate.reached.is_set, "the instance has one")

        service.remove("llava", 60.0)
        ending = asyncio.create_task(service.end_requests("llava", SETTINGS, GONE, TIMEOUT_S))
        await asyncio.sleep(0)
        gate.open()
        await ending

        cancelled = (AsyncState.CANCELLED, GONE)
        found = await states(service, "one", "two", "three", "four")
        assert found == [(AsyncState.COMPLETED, ""), cancelled, cancelled, cancelled]
        reason = GONE.encode()
        failures = {f"{name}-error.out": reason for name in ("two", "three", "four")}
        assert rig.results() == {"one.out": b"answer", **failures}
        assert len(rig.listener.notices) == 4
        service.add(endpoint)
        await service.submit(rig.request("five"))
        assert (await rig.until_ended(service, "five")).state is AsyncState.COMPLETED
        assert [each.headers["x-amzn-sagemaker-inference-id"] for each in rig.instance.received] == ["one", "five"]


async def test_what_runs_for_too_long_is_cancelled(rig: RemovalRig) -> None:
    gate = Gate()

    async with rig:
        rig.instance.behave = never_answering(gate)
        service = await rig.start()
        await service.submit(rig.request("one"))
        await until(gate.reached.is_set, "the instance has it")

        service.remove("llava", 0.0)
        await service.end_requests("llava", SETTINGS, GONE, TIMEOUT_S)

        assert await states(service, "one") == [(AsyncState.CANCELLED, GONE)]
        assert rig.results() == {"one-error.out": GONE.encode()}


async def test_a_restart_ends_what_a_killed_process_has_left(rig: RemovalRig) -> None:
    """A restart ends what a killed process left leased or waiting; a decided result is published, not cancelled."""

    async def leave() -> None:
        queue = rig.make_queue()
        for name in ("decided", "leased", "waiting"):
            await queue.submit(rig.request(name))
        first, second = await queue.claim("llava", 3600.0), await queue.claim("llava", 3600.0)
        assert first is not None
        assert second is not None
        assert await queue.decide(first, AsyncOutcome(state=AsyncState.COMPLETED, body=b"answer"))
        assert await queue.extend(first, 0.0)
        await queue.close()

    async with rig:
        await leave()
        service, _ = await rig.start_without()

        await service.end_requests("llava", SETTINGS, GONE, TIMEOUT_S)

        assert await states(service, "decided", "leased", "waiting") == [
            (AsyncState.COMPLETED, ""),
            (AsyncState.CANCELLED, GONE),
            (AsyncState.CANCELLED, GONE),
        ]
        failures = dict.fromkeys(("leased-error.out", "waiting-error.out"), GONE.encode())
        assert rig.results() == {"decided.out": b"answer", **failures}
        assert rig.instance.received == []


async def test_a_store_or_queue_that_is_down_is_waited_for(rig: RemovalRig) -> None:
    """A removal waits for a store or queue that is down; if it is stopped meanwhile, the next process continues."""
    asked: list[str] = []

    class Down(DirectoryStore):
        async def put(self, url: str, body: bytes, metadata: ObjectMetadata = NO_METADATA) -> None:
            asked.append(url)
            raise ObjectUnavailable("down")

    async with rig:
        rig.places.instances = []
        first, _ = await rig.start_without()
        await first.queue.submit(rig.request("one"))
        first.store = Down(rig.objects)
        list_requests, num_refused = first.queue.list, 0

        async def refuse(*args: Any, **named: Any) -> Any:
            nonlocal num_refused
            if num_refused < 2:
                num_refused += 1
                raise QueueUnavailable("not now")
            return await list_requests(*args, **named)

        first.queue.list = refuse
        ending = asyncio.create_task(first.end_requests("llava", SETTINGS, GONE, TIMEOUT_S))
        await until(lambda: len(asked) > 1 and num_refused == 2, "the store was asked again")
        ending.cancel()
        await asyncio.wait([ending])
        assert (await states(first, "one"))[0][0] is AsyncState.DECIDED
        await first.store.close()

        second, _ = await rig.start_without()
        await second.end_requests("llava", SETTINGS, GONE, TIMEOUT_S)
        assert await states(second, "one") == [(AsyncState.CANCELLED, GONE)]
        assert rig.results() == {"one-error.out": GONE.encode()}


async def test_a_store_that_stays_down_does_not_keep_the_endpoint(rig: RemovalRig) -> None:
    """If the store stays down for the allowed time, the remaining requests end without an object."""
    now = time.time()
    rig.now = lambda: now
    asked: list[str] = []

    class Down(DirectoryStore):
        async def put(self, url: str, body: bytes, metadata: ObjectMetadata = NO_METADATA) -> None:
            asked.append(url)
            raise ObjectUnavailable("down")

    async with rig:
        rig.places.instances = []
        service, _ = await rig.start_without()
        service.store = Down(rig.objects)
        for name in ("decided", "waiting"):
            await service.queue.submit(rig.request(name))
        claim = await service.queue.claim("llava", 3600.0)
        assert claim is not None
        assert await service.queue.decide(claim, AsyncOutcome(state=AsyncState.COMPLETED, body=b"answer"))
        assert await service.queue.retry(claim, 0.0, "")
        ending = asyncio.create_task(service.end_requests("llava", SETTINGS, GONE, TIMEOUT_S))
        await until(lambda: len(asked) > 4, "the store was asked again")

        now += TIMEOUT_S + 1
        await ending

        (decided, reason), cancelled = await states(service, "decided", "waiting")
        assert (decided, cancelled) == (AsyncState.FAILED, (AsyncState.CANCELLED, GONE))
        assert "could not be stored" in reason
        assert rig.results() == {}


async def test_requests_of_another_proxy_stay(rig: RemovalRig) -> None:
    """Requests that another proxy of the queue accepts for an endpoint of the same name during the removal stay."""
    async with rig:
        rig.places.instances = []
        service, _ = await rig.start_without()
        await service.queue.submit(rig.request("one"))
        cancel = service.queue.cancel

        async def submit_meanwhile(*args: Any) -> Any:
            await service.queue.submit(rig.request("two"))
            return await cancel(*args)

        service.queue.cancel = submit_meanwhile

        await service.end_requests("llava", SETTINGS, GONE, TIMEOUT_S)

        assert await states(service, "one", "two") == [(AsyncState.CANCELLED, GONE), (AsyncState.WAITING, "")]


async def test_a_step_of_the_clock_changes_nothing(rig: RemovalRig, store: Store) -> None:
    """The order of arrival says which requests an endpoint has left, although the clock has gone back meanwhile."""
    async with rig:
        rig.places.instances = []
        service, _ = await rig.start_without()
        store.clock.now = time.time() + 3600
        stepping = store.make(AsyncQueueSettings(), store.clock)
        await stepping.submit(rig.request("one"))
        store.clock.step(-3600)
        await stepping.submit(rig.request("two"))
        cancel = service.queue.cancel

        async def submit_meanwhile(inference_id: str, *args: Any) -> Any:
            if inference_id == "one":
                store.clock.step(-3600)
                await stepping.submit(rig.request("three"))
            return await cancel(inference_id, *args)

        service.queue.cancel = submit_meanwhile

        await service.end_requests("llava", SETTINGS, GONE, TIMEOUT_S)

        cancelled = (AsyncState.CANCELLED, GONE)
        assert await states(service, "one", "two", "three") == [cancelled, cancelled, (AsyncState.WAITING, "")]
        await stepping.close()


async def test_an_endpoint_that_accepts_requests_keeps_them(rig: RemovalRig) -> None:
    """An endpoint that accepts requests, such as a new one of the name or an updated one, keeps its requests."""
    async with rig:
        rig.places.instances = []
        service = await rig.start()
        endpoint = service.endpoints["llava"]
        await service.submit(rig.request("one"))
        service.remove("llava", 0.0)
        with pytest.raises(UnknownEndpoint, match="Endpoint llava of account"):
            await service.submit(rig.request("two"))
        with pytest.raises(UnknownEndpoint):
            service.locate("llava", "two", filename="", extension="")
        service.add(endpoint)

        await service.end_requests("llava", SETTINGS, GONE, TIMEOUT_S)

        assert [state for state, _ in await states(service, "one")] == [AsyncState.WAITING]
