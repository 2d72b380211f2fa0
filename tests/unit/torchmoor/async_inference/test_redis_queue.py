"""Faults that only a queue on a server has: outages, lost answers, lack of memory, silence."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.fake_instance import Received, Wire
from tests.servers import LossyProxy, RedisServer, run_redis, run_silent_server
from tests.unit.torchmoor.async_inference.conftest import make_redis
from tests.unit.torchmoor.async_inference.rig import UrlRig
from tests.unit.torchmoor.async_inference.stores import ENDPOINT, Store, claimed, request, result
from tests.waiting import wait_until
from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.queues.redis_queue import RedisQueue
from torchmoor.async_inference.request import AsyncState
from torchmoor.config.async_queue import AsyncQueueSettings
from torchmoor.errors import QueueUnavailable

pytestmark = pytest.mark.redis


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """Run a server of the test's own, which it may kill."""
    with run_redis(tmp_path) as server:
        yield server


def test_a_server_that_went_away_comes_back_with_everything(server: RedisServer) -> None:
    """While the server is away each call is refused; then the queue reconnects and has all requests."""
    with Store(server.url, partial(make_redis, server)) as store:
        queue = store.opened_by_url()
        store.do(queue.submit(request("r1", body=b"input")))
        store.do(queue.submit(request("r2")))
        claim = store.do(claimed(queue, 3600))
        store.do(queue.decide(claim, result()))

        server.kill()
        for call in (queue.claim(ENDPOINT, 30), queue.backlog(ENDPOINT), queue.submit(request("r3"))):
            with pytest.raises(QueueUnavailable, match="server"):
                store.do(call)
        server.start()

        assert store.do(queue.finish(claim))
        assert store.do(claimed(queue)).request.inference_id == "r2"
        assert store.do(queue.get("r3")) is None


def test_a_server_that_went_away_is_logged_rarely(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """Clients could fill the log by their requests, which are refused meanwhile."""
    with Store(server.url, partial(make_redis, server)) as store:
        queue = store.opened_by_url()
        server.kill()
        for number in range(3):
            with pytest.raises(QueueUnavailable):
                store.do(queue.submit(request(f"r{number}")))
        server.start()

    assert len([each for each in caplog.messages if "asynchronous queue unavailable" in each]) == 1


async def test_custom_attributes_that_are_not_text_are_left_out(server: RedisServer, tmp_path: Path) -> None:
    """The server's scripts cannot read them: the request would never end, and be notified of again and again."""

    async def behave(received: Received, wire: Wire) -> None:
        attributes = b"X-Amzn-SageMaker-Custom-Attributes: caf\xe9\r\n"
        await wire.send(b"HTTP/1.1 200 OK\r\n" + attributes + b"Content-Length: 2\r\n\r\nok")

    async with UrlRig(tmp_path / "rig", server.url) as rig:
        rig.instance.behave = behave

        assert (await rig.run_one()).state is AsyncState.COMPLETED
        assert len(rig.listener.notices) == 1


def test_a_server_without_memory_refuses_and_goes_on_later(server: RedisServer) -> None:
    """A server without memory refuses a write as a whole, and accepts writes again later."""
    with Store(server.url, partial(make_redis, server)) as store, server.client() as client:
        queue = store.opened_by_url()
        store.do(queue.submit(request("r1")))

        client.config_set("maxmemory", 1)
        with pytest.raises(QueueUnavailable):
            store.do(queue.submit(request("r2")))
        client.config_set("maxmemory", 0)

        assert store.do(queue.backlog(ENDPOINT)).waiting == 1
        store.do(queue.submit(request("r2")))
        assert [store.do(claimed(queue)).request.inference_id for _ in range(2)] == ["r1", "r2"]


@pytest.mark.parametrize("store", ["valkey"], indirect=True)
@pytest.mark.parametrize("call", ["submit", "decide", "finish"])
def test_a_lost_answer_is_asked_for_again(redis_server: RedisServer, store: Store, call: str) -> None:
    """The client repeats a call without an answer, and the queue recognises it, also without an invocation id."""
    with LossyProxy(redis_server.port) as lossy:
        store.url = store.url.replace(f":{redis_server.port}/", f":{lossy.port}/")
        queue = store.opened_by_url()
        store.do(queue.backlog(ENDPOINT))  # it is connected, so that the lost answer is the call's own

        def losing(name: str) -> Queue:
            if name == call:
                lossy.is_losing.set()
            return queue

        stored = store.do(losing("submit").submit(request("r1", body=b"input")))
        claim = store.do(claimed(queue))
        assert store.do(losing("decide").decide(claim, result()))
        assert store.do(losing("finish").finish(claim))

        assert lossy.num_lost == 1
        assert stored == claim.request


def test_time_is_the_servers(server: RedisServer) -> None:
    """The server's clock applies, so that proxies with different clocks agree on ended leases."""
    with Store(server.url, partial(make_redis, server)) as store, server.client() as client:
        queue = store.opened_by_url()
        before = client.time()[0]
        received_at = store.do(queue.submit(request("r1"))).received_at
        first = store.do(claimed(queue, 0.01))

        wait_until(lambda: store.do(queue.claim(ENDPOINT, 3600)), "the lease has lapsed")

        assert before <= received_at <= client.time()[0] + 1
        assert not store.do(queue.extend(first, 1))


def test_a_server_that_never_answers_costs_one_time_out(caplog: pytest.LogCaptureFixture) -> None:
    """The caller gets an error after one time-out."""
    with run_silent_server() as port, Store(f"redis://127.0.0.1:{port}/0", lambda *_: pytest.fail("not used")) as store:
        queue = store.opened_by_url(timeout_s=0.2)

        with pytest.raises(QueueUnavailable, match="does not answer"):
            store.do(queue.submit(request("r1")))

    assert "asynchronous queue unavailable left_out=0 error=TimeoutError" in caplog.text


async def test_a_cancellation_that_the_client_loses_is_not_lost() -> None:
    """A cancellation during a call is not lost, although Python 3.11's wait_for may return the result instead."""

    class Client:
        async def eval(self, *arguments: object) -> int:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
            return 0

    client: Any = Client()
    task = asyncio.create_task(RedisQueue(client, AsyncQueueSettings()).forget())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
