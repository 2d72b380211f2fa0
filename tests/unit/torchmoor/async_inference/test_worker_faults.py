"""A worker while its stores fail or answer wrongly: each request still ends once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.fake_instance import answering
from tests.unit.torchmoor.async_inference.rig import Rig, pass_time, play, until
from torchmoor.async_inference.objects.directory_store import DirectoryStore
from torchmoor.async_inference.objects.object_store import Download, ObjectDenied, ObjectError, ObjectUnavailable
from torchmoor.async_inference.request import AsyncState
from torchmoor.errors import QueueUnavailable

LARGE = b"x" * 5000  # too large for the queue's row


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


class Failing(DirectoryStore):
    """A directory whose next operations fail as `failures` lists; the others succeed."""

    failures: dict[str, list[ObjectError]]

    def _fail(self, operation: str) -> None:
        if self.failures.get(operation):
            raise self.failures[operation].pop(0)

    async def open(self, url: str) -> Download:
        self._fail("open")
        return await super().open(url)

    async def upload(self, url: str, chunks: AsyncIterator[bytes], *args: Any, **named: Any) -> int:
        self._fail("upload")
        return await super().upload(url, chunks, *args, **named)

    async def put(self, url: str, body: bytes, content_type: str = "") -> None:
        self._fail("put")
        await super().put(url, body, content_type)

    async def publish(self, staged: str, final: str) -> None:
        self._fail("publish")
        await super().publish(staged, final)


def fail(rig: Rig, **failures: list[ObjectError]) -> None:
    """Let the next operations of the store fail."""

    def make() -> DirectoryStore:
        store = Failing(rig.objects)
        store.failures = failures
        return store

    rig.make_store = make


DOWN = [ObjectUnavailable("down"), ObjectUnavailable("down")]


@pytest.mark.parametrize(("operation", "answer"), [("put", b"small"), ("publish", LARGE), ("upload", LARGE)])
def test_store_that_is_down_delays_a_result_and_changes_nothing(rig: Rig, operation: str, answer: bytes) -> None:
    """A result waits until its store is back. What is decided is not asked again; the instance is asked no more than
    it takes."""

    async def scene() -> None:
        async with rig:
            rig.instance.behave = answering(body=answer)
            fail(rig, **{operation: list(DOWN)})
            service = await rig.start()

            await service.submit(rig.request("one"))
            record = await rig.until_ended(service, "one")

            assert (record.state, record.attempts) == (AsyncState.COMPLETED, 1)
            assert rig.results() == {"one.out": answer}
            assert len(rig.instance.received) == (3 if operation == "upload" else 1)
            assert len(rig.listener.notices) == 1
            assert service.endpoints["llava"].metrics.of(None).async_upload_failures == 2

    play(scene())


def test_input_store_that_is_down_costs_no_attempt(rig: Rig) -> None:
    """The request is not to blame."""

    async def scene() -> None:
        async with rig:
            fail(rig, open=list(DOWN))
            service = await rig.start()

            await service.submit(rig.request("one", input_location=rig.input("in", b"{}")))
            record = await rig.until_ended(service, "one")

            assert (record.state, record.attempts) == (AsyncState.COMPLETED, 1)
            assert service.endpoints["llava"].metrics.of(None).async_download_failures == 2

    play(scene())


def test_answer_that_may_not_be_stored_is_a_failure(rig: Rig) -> None:
    """Missing rights do not come back with a retry: the client gets a failure."""

    async def scene() -> None:
        async with rig:
            rig.instance.behave = answering(body=LARGE)
            fail(rig, upload=[ObjectDenied("not ours")])
            service = await rig.start()

            await service.submit(rig.request("one"))
            record = await rig.until_ended(service, "one")

            assert record.state is AsyncState.FAILED
            assert b"not ours" in rig.results()["one-error.out"]

    play(scene())


@pytest.mark.parametrize("answer", [b"small", LARGE])
def test_decision_whose_confirmation_is_lost_is_one(rig: Rig, answer: bytes) -> None:
    """The queue has written it and cannot say so: it is said again, and what was staged is the result."""

    async def scene() -> None:
        async with rig:
            rig.instance.behave = answering(body=answer)
            service = await rig.start()
            decide, told = service.queue.decide, []

            async def decide_in_silence(*args: Any) -> bool:
                is_settled = await decide(*args)
                told.append(is_settled)
                if len(told) == 1:
                    raise QueueUnavailable("the answer was lost")
                return is_settled

            service.queue.decide = decide_in_silence  # type: ignore[method-assign]
            await service.submit(rig.request("one"))
            record = await rig.until_ended(service, "one")

            assert told == [True, True]
            assert record.state is AsyncState.COMPLETED
            assert rig.results() == {"one.out": answer}

    play(scene())


def test_what_dead_workers_staged_goes_with_the_result(rig: Rig) -> None:
    """The worker removes the objects of attempts whose workers died."""

    async def scene() -> None:
        async with rig:
            staged = rig.folder / "results/async-endpoint-outputs/llava/.torchmoor"
            staged.mkdir(parents=True)
            (staged / "one.1").write_bytes(b"of a worker that died")
            queue = rig.make_queue()
            await queue.submit(rig.request("one"))
            await queue.claim("llava", 0.01)
            await queue.close()
            rig.instance.behave = answering(body=LARGE)
            service = await rig.start()

            record = await rig.until_ended(service, "one")

            assert (record.state, record.attempts) == (AsyncState.COMPLETED, 2)
            assert rig.results() == {"one.out": LARGE}

    play(scene())


def test_slow_input_does_not_use_up_the_instances_time(rig: Rig) -> None:
    """InvocationTimeoutSeconds are the instance's: while an object store is waited for, they stand still."""

    async def slow(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        await pass_time(25.0)
        async for chunk in chunks:
            yield chunk

    class Slow(DirectoryStore):
        async def open(self, url: str) -> Download:
            download = await super().open(url)
            return Download(download.size, download.content_type, slow(download.chunks), download.release)

    async def scene() -> None:
        async with rig:
            rig.make_store = lambda: Slow(rig.objects)
            service = await rig.start()

            await service.submit(rig.request("one", input_location=rig.input("in", b"{}"), timeout_s=20.0))
            record = await rig.until_ended(service, "one")

            assert record.state is AsyncState.COMPLETED

    play(scene())


def test_queue_that_cannot_be_reached_is_not_asked_without_a_pause(rig: Rig) -> None:
    """The worker frees the place that it took in vain, and pauses before it asks again."""

    async def scene() -> None:
        async with rig:
            service = await rig.start(poll_interval_s=3600.0)
            num_refused = 0

            async def refuse(*args: Any) -> Any:
                nonlocal num_refused
                num_refused += 1
                await asyncio.sleep(0)
                raise QueueUnavailable("not now")

            service.queue.claim = refuse  # type: ignore[method-assign]
            await service.submit(rig.request("one"))
            await until(lambda: num_refused > 0, "the worker has looked")
            for _ in range(100):
                await asyncio.sleep(0)

            assert num_refused <= 2  # at the start, and for the submit

    play(scene())


def test_queue_that_cannot_be_reached_is_waited_for(rig: Rig) -> None:
    """A worker goes on when its queue does."""

    async def scene() -> None:
        async with rig:
            service = await rig.start()
            claim, num_refused = service.queue.claim, [0]

            async def refuse(*args: Any) -> Any:
                if num_refused[0] < 5:
                    num_refused[0] += 1
                    raise QueueUnavailable("not now")
                return await claim(*args)

            service.queue.claim = refuse  # type: ignore[method-assign]
            await service.submit(rig.request("one"))
            record = await rig.until_ended(service, "one")

            assert record.state is AsyncState.COMPLETED
            assert num_refused == [5]

    play(scene())


def test_instance_that_does_not_read_is_out_of_time(rig: Rig) -> None:
    """An instance that takes nothing of a large input holds its worker no longer than the request allows."""

    async def scene() -> None:
        async with rig:
            await rig.instance.stop()
            writers: list[asyncio.StreamWriter] = []
            deaf = await asyncio.start_server(
                lambda reader, writer: writers.append(writer), "127.0.0.1", rig.instance.port, limit=1024
            )
            service = await rig.start()

            await service.submit(rig.request("one", input_location=rig.input("in", b"x" * (32 << 20)), timeout_s=0.3))
            record = await rig.until_ended(service, "one")
            assert record.state is AsyncState.FAILED
            await until(lambda: len(rig.places.abandoned) == 1, "the instance gets the cancellation")
            deaf.close()
            for writer in writers:
                writer.transport.abort()  # ends the worker's side too, which still has bytes to send
                with suppress(ConnectionError):
                    await writer.wait_closed()

    play(scene())
