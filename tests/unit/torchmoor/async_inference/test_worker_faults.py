"""A worker while its stores fail or answer wrongly: each request still ends once."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.proxy.fake_instance import Gate, Received, Wire, answering
from tests.unit.torchmoor.async_inference.objects import chunks_of
from tests.unit.torchmoor.async_inference.rig import Listener, Rig, never_answering, until
from tests.unit.torchmoor.movable_loop import pass_time
from torchmoor.async_inference import service as service_module
from torchmoor.async_inference.notifications.notification import Notification
from torchmoor.async_inference.objects.directory_store import DirectoryStore
from torchmoor.async_inference.objects.object_store import (
    NO_METADATA,
    Download,
    LocationRefused,
    ObjectDenied,
    ObjectError,
    ObjectMetadata,
    ObjectUnavailable,
)
from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.request import AsyncOutcome, AsyncState, Backlog, Claim
from torchmoor.config.async_inference import AsyncEndpointSettings
from torchmoor.errors import QueueUnavailable
from torchmoor.fault_log import FaultLog

LARGE = b"x" * 5000  # too large for the queue's row


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


class Failing(DirectoryStore):
    """A directory whose next operations fail as listed in `failures`."""

    failures: dict[str, list[ObjectError]]

    def _fail(self, operation: str) -> None:
        if self.failures.get(operation):
            raise self.failures[operation].pop(0)

    async def open(self, url: str) -> Download:
        self._fail("open")
        return await super().open(url)

    async def upload(self, url: str, chunks: AsyncIterator[bytes], *args: Any, **named: Any) -> str:
        self._fail("upload")
        return await super().upload(url, chunks, *args, **named)

    async def put(self, url: str, body: bytes, metadata: ObjectMetadata = NO_METADATA) -> None:
        self._fail("put")
        await super().put(url, body, metadata)

    async def publish(self, staged: str, tag: str, final: str) -> None:
        self._fail("publish")
        await super().publish(staged, tag, final)

    async def delete(self, url: str) -> None:
        self._fail("delete")
        await super().delete(url)


def fail(rig: Rig, **failures: list[ObjectError]) -> None:
    """Let the next operations of the store fail."""

    def make() -> DirectoryStore:
        store = Failing(rig.objects)
        store.failures = failures
        return store

    rig.make_store = make


DOWN = [ObjectUnavailable("down"), ObjectUnavailable("down")]


@pytest.mark.parametrize(("operation", "answer"), [("put", b"small"), ("publish", LARGE), ("upload", LARGE)])
async def test_store_that_is_down_delays_a_result_and_changes_nothing(rig: Rig, operation: str, answer: bytes) -> None:
    """A result waits until its store is back, which does not count as an attempt.

    The instance is asked again only if its answer could not be uploaded.
    """
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


async def test_input_store_that_is_down_costs_no_attempt(rig: Rig) -> None:
    """An unavailable input store does not count as an attempt."""
    async with rig:
        fail(rig, open=list(DOWN))
        service = await rig.start()

        await service.submit(rig.request("one", input_location=rig.input("in", b"{}")))
        record = await rig.until_ended(service, "one")

        assert (record.state, record.attempts) == (AsyncState.COMPLETED, 1)
        assert service.endpoints["llava"].metrics.of(None).async_download_failures == 2


async def test_answer_that_may_not_be_stored_is_a_failure(rig: Rig) -> None:
    """A result that the store refuses for lack of permission becomes a failure without a retry."""
    async with rig:
        rig.instance.behave = answering(body=LARGE)
        fail(rig, upload=[ObjectDenied("not ours")])
        record = await rig.run_one()

        assert record.state is AsyncState.FAILED
        assert b"not ours" in rig.results()["one-error.out"]


@pytest.mark.parametrize("answer", [b"small", LARGE])
@pytest.mark.parametrize("obstacle", ["file", "folder", "file above"])
async def test_result_whose_name_is_taken_meanwhile_ends_as_a_failure(rig: Rig, answer: bytes, obstacle: str) -> None:
    """The other object stays, the failure object gives the reason, and the request counts as failed."""
    gate, taken = Gate(), b"of another request"

    async def behave(received: Received, wire: Wire) -> None:
        await gate.pass_through()
        await wire.answer(body=answer)

    async with rig:
        rig.instance.behave = behave
        service = await rig.start()
        output = rig.folder / "results/async-endpoint-outputs/llava/deep/one.out"
        await service.submit(replace(rig.request("one"), output_location=output.as_uri()))
        await until(gate.reached.is_set, "the instance has it")
        (output.parents[1] if obstacle == "file above" else output.parent).mkdir(parents=True)
        if obstacle == "folder":
            output.mkdir()
        else:
            (output.parent if obstacle == "file above" else output).write_bytes(taken)

        gate.open()
        record = await rig.until_ended(service, "one")

        assert record.state is AsyncState.FAILED
        assert "could not be stored" in record.reason
        others = {} if obstacle == "folder" else {"deep" if obstacle == "file above" else "one.out": taken}
        assert rig.results() == others | {"one-error.out": record.reason.encode()}
        assert [notice.outcome.state for notice in rig.listener.notices] == [AsyncState.FAILED]
        metrics = service.endpoints["llava"].metrics.of(None)
        assert (metrics.async_processed, metrics.async_failures, metrics.async_upload_failures) == (0, 1, 1)


@pytest.mark.parametrize("answer", [b"small", LARGE])
async def test_failure_that_cannot_be_stored_ends_the_request(rig: Rig, answer: bytes) -> None:
    """Without any object, the state, the notification and the metrics report the failure."""
    async with rig:
        rig.instance.behave = answering(body=answer)
        denied = ObjectDenied("not ours")
        fail(rig, put=[denied] * (1 if answer == LARGE else 2), publish=[denied])
        service = await rig.start()

        await service.submit(rig.request("one"))
        record = await rig.until_ended(service, "one")

        assert record.state is AsyncState.FAILED
        assert "not ours" in record.reason
        assert rig.results() == {}
        assert [notice.outcome.state for notice in rig.listener.notices] == [AsyncState.FAILED]
        metrics = service.endpoints["llava"].metrics.of(None)
        assert (metrics.async_processed, metrics.async_failures) == (0, 1)


@pytest.mark.parametrize("answer", [b"small", LARGE])
async def test_result_that_was_published_before_a_crash_is_its_own(rig: Rig, answer: bytes) -> None:
    """A worker recognises an object that a dead worker published before the request's end."""

    class Dying(Listener):
        async def notify(self, notice: Notification, endpoint: AsyncEndpointSettings) -> int:
            await super().notify(notice, endpoint)
            if len(self.notices) <= 2:
                raise RuntimeError("the worker dies")
            return 0

    async with rig:
        rig.instance.behave = answering(body=answer)
        rig.listener = Dying()

        record = await rig.run_one()

        assert (record.state, len(rig.listener.notices)) == (AsyncState.COMPLETED, 3)
        assert rig.results() == {"one.out": answer}


@pytest.mark.parametrize("answer", [b"small", LARGE])
async def test_result_that_a_client_has_read_and_deleted_does_not_come_again(rig: Rig, answer: bytes) -> None:
    """While the queue cannot record the end, the result is neither published again nor replaced by a failure."""
    async with rig:
        rig.instance.behave = answering(body=answer)
        service = await rig.start()
        finish, num_refused = service.queue.finish, 0

        async def delete_and_refuse(claim: Claim) -> bool:
            nonlocal num_refused
            if num_refused == 2:
                return await finish(claim)
            if num_refused == 0:
                await asyncio.to_thread(Path(urlsplit(claim.request.output_location).path).unlink)
            num_refused += 1
            raise QueueUnavailable("not now")

        service.queue.finish = delete_and_refuse
        await service.submit(rig.request("one"))
        record = await rig.until_ended(service, "one")

        assert (record.state, num_refused) == (AsyncState.COMPLETED, 2)
        assert rig.results() == {}
        assert [notice.outcome.state for notice in rig.listener.notices] == [AsyncState.COMPLETED]


async def test_long_result_that_its_client_has_deleted_is_no_failure_after_a_stop(rig: Rig) -> None:
    """The queue knows that the result was there, also if the proxy stops before it can record the end."""
    async with rig:
        rig.instance.behave = answering(body=LARGE)
        async with rig.make_service() as first:
            num_refused = 0

            async def refuse(claim: Claim) -> bool:
                nonlocal num_refused
                num_refused += 1
                raise QueueUnavailable("not now")

            first.queue.finish = refuse
            sent = await first.submit(rig.request("one"))
            await until(lambda: num_refused > 0, "only the end is missing")
            await asyncio.to_thread(Path(urlsplit(sent.output_location).path).unlink)
        second = await rig.start()

        assert (await rig.until_ended(second, "one")).state is AsyncState.COMPLETED
        assert rig.results() == {}
        assert [notice.outcome.state for notice in rig.listener.notices] == [AsyncState.COMPLETED]


@pytest.mark.parametrize("answer", [b"small", LARGE])
async def test_failure_instead_of_a_result_is_decided_once_the_queue_answers(rig: Rig, answer: bytes) -> None:
    """A queue that is away for a moment costs no second attempt at a publication that can never succeed."""
    async with rig:
        rig.instance.behave = answering(body=answer)
        denied = [ObjectDenied("not ours")]
        fail(rig, **{"publish" if answer == LARGE else "put": denied})
        service = await rig.start()
        replace_, num_refused = service.queue.replace, 0

        async def refuse_once(claim: Claim, failure: AsyncOutcome) -> bool:
            nonlocal num_refused
            num_refused += 1
            if num_refused == 1:
                raise QueueUnavailable("not now")
            return await replace_(claim, failure)

        service.queue.replace = refuse_once
        await service.submit(rig.request("one"))
        record = await rig.until_ended(service, "one")

        assert (record.state, num_refused) == (AsyncState.FAILED, 2)
        assert [notice.outcome.state for notice in rig.listener.notices] == [AsyncState.FAILED]


@pytest.mark.parametrize("answer", [b"small", LARGE])
async def test_result_that_a_client_has_read_and_deleted_is_no_failure_after_a_crash(rig: Rig, answer: bytes) -> None:
    """A worker that stops during its notifications leaves a result that the next one can publish again."""

    class Silent(Listener):
        async def notify(self, notice: Notification, endpoint: AsyncEndpointSettings) -> int:
            await super().notify(notice, endpoint)
            await asyncio.Event().wait()
            return 0

    async with rig:
        rig.instance.behave = answering(body=answer)
        rig.listener, usual = Silent(), rig.listener
        async with rig.make_service() as first:
            sent = await first.submit(rig.request("one"))
            await until(lambda: len(rig.listener.notices) == 1, "the webhook has the notification")
            await asyncio.to_thread(Path(urlsplit(sent.output_location).path).unlink)
        rig.listener = usual
        second = await rig.start()

        assert (await rig.until_ended(second, "one")).state is AsyncState.COMPLETED
        assert rig.results() == {"one.out": answer}


@pytest.mark.parametrize(
    ("operation", "line"),
    [("put", "result not published yet"), ("upload", "answer not stored yet"), ("open", "input not read yet")],
)
async def test_repeated_fault_is_logged_once_and_waits_longer_each_time(
    rig: Rig, caplog: pytest.LogCaptureFixture, operation: str, line: str
) -> None:
    """A lasting fault is retried at growing intervals and logged rarely.

    Without a place for its answer, a request would keep an instance busy all the time.
    """
    clock, delays = [1000.0], []
    rig.now = lambda: clock[0]

    async with rig:
        rig.instance.behave = answering(body=LARGE if operation == "upload" else b"small")
        fail(rig, **{operation: [ObjectUnavailable("down") for _ in range(8)]})
        service = rig.make_service(min_backoff_s=1.0, max_backoff_s=60.0)
        async with service:
            retry = service.queue.retry

            async def note(claim: Claim, delay_s: float, reason: str, *, counts: bool = True) -> bool:
                delays.append(delay_s)
                is_held = await retry(claim, delay_s, reason, counts=counts)
                clock[0] += delay_s
                return is_held

            service.queue.retry = note
            given = {"input_location": rig.input("in", b"{}")} if operation == "open" else {}
            await service.submit(rig.request("one", **given))
            record = await rig.until_ended(service, "one")

        assert record.state is AsyncState.COMPLETED
        assert len(delays) == 8
        assert delays[0] <= 1.0
        assert all(delay_s >= 0.5 for delay_s in delays)
        assert delays[-1] >= 4 * delays[0]
        lines = [each.getMessage() for each in caplog.records if "down" in each.getMessage()]
        assert len(lines) == 1
        assert f"{line} endpoint=llava inference_id=one" in lines[0]
        assert not any(each.exc_info for each in caplog.records)


async def test_backlog_that_cannot_be_read_is_logged_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A record that this version cannot read, as after a downgrade, would fill the log with traces."""
    monkeypatch.setattr(service_module, "BACKLOG_INTERVAL_S", 0.01)
    num_asked = 0

    def wrap(queue: Queue) -> Queue:
        async def backlog(endpoint: str) -> Backlog:
            nonlocal num_asked
            num_asked += 1
            raise TypeError("an unknown field")

        monkeypatch.setattr(queue, "backlog", backlog)
        return queue

    rig.wrap_queue = wrap
    async with rig:
        await rig.start()
        await until(lambda: num_asked >= 3, "the backlog is read again")

    assert len([each for each in caplog.messages if "an unknown field" in each]) == 1


def test_fault_log_counts_what_it_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    """Repeated faults give one log line per minute and kind, with the number of faults that it stands for."""
    now = [0.0]
    faults = FaultLog(logging.getLogger("faults"), "llava", clock=lambda: now[0])

    for second in range(100):
        now[0] = float(second)
        faults.add("down", ValueError(f"at {second}"))
        faults.add("slow", ValueError("slow"))

    lines = [each.getMessage() for each in caplog.records]
    assert [line for line in lines if line.startswith("down")] == [
        "down endpoint=llava inference_id= left_out=0 error=at 0",
        "down endpoint=llava inference_id= left_out=59 error=at 60",
    ]
    assert len(lines) == 4


@pytest.mark.parametrize("answer", [b"small", LARGE])
async def test_decision_whose_confirmation_is_lost_is_one(rig: Rig, answer: bytes) -> None:
    """A decision whose confirmation is lost is repeated, and the staged object becomes the result."""
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

        service.queue.decide = decide_in_silence
        await service.submit(rig.request("one"))
        record = await rig.until_ended(service, "one")

        assert told == [True, True]
        assert record.state is AsyncState.COMPLETED
        assert rig.results() == {"one.out": answer}


async def test_long_result_stays_in_its_store_if_the_endpoints_results_move(rig: Rig) -> None:
    """A request that waits while the endpoint gets another S3OutputPath has the location that its client knows."""

    class OfTwoDisks(DirectoryStore):
        async def publish(self, staged: str, tag: str, final: str) -> None:
            if ("/earlier/" in staged) is not ("/earlier/" in final):
                raise LocationRefused("they must be on one file system")
            await super().publish(staged, tag, final)

    async with rig:
        rig.instance.behave = answering(body=LARGE)
        rig.make_store = lambda: OfTwoDisks(rig.objects)
        service = await rig.start()
        location = (rig.folder / "results/earlier/one.out").as_uri()

        await service.submit(replace(rig.request("one"), output_location=location))
        record = await rig.until_ended(service, "one")

        assert record.state is AsyncState.COMPLETED
        assert rig.results() == {"one.out": LARGE}


async def test_answer_that_arrives_late_in_the_store_replaces_no_other(rig: Rig) -> None:
    """An attempt that was not counted may still be written when the next one's answer is decided."""

    late: list[tuple[str, bytes]] = []

    class Slow(DirectoryStore):
        async def upload(self, url: str, chunks: AsyncIterator[bytes], *args: Any, **named: Any) -> str:
            if not late:
                late.append((url, b"".join([chunk async for chunk in chunks])))
                raise ObjectUnavailable("no answer in time")
            tag = await super().upload(url, chunks, *args, **named)
            await super().upload(late[0][0], chunks_of(late[0][1]))
            return tag

    async def behave(received: Received, wire: Wire) -> None:
        await wire.answer(body=b"%d" % len(rig.instance.received) * 5000)

    async with rig:
        rig.instance.behave = behave
        rig.make_store = lambda: Slow(rig.objects)

        record = await rig.run_one()

        assert (record.state, record.attempts) == (AsyncState.COMPLETED, 1)
        assert rig.results()["one.out"] == b"2" * 5000


async def test_what_dead_workers_staged_goes_with_the_result(rig: Rig) -> None:
    """The worker removes objects that dead workers have staged for the request."""
    async with rig:
        staged = rig.folder / "results/async-endpoint-outputs/llava/.torchmoor"
        staged.mkdir(parents=True)
        queue = rig.make_queue()
        request = await queue.submit(rig.request("one"))
        (staged / f"{request.identity}.1").write_bytes(b"of a worker that died")
        await queue.claim("llava", 0.01)
        await queue.close()
        rig.instance.behave = answering(body=LARGE)
        service = await rig.start()

        record = await rig.until_ended(service, "one")

        assert (record.state, record.attempts) == (AsyncState.COMPLETED, 2)
        assert rig.results() == {"one.out": LARGE}


async def test_stop_between_an_answer_and_its_decision_leaves_no_object(rig: Rig) -> None:
    """The staged answer is removed, because the next attempt does not know it."""
    async with rig:
        rig.instance.behave = answering(body=LARGE)
        is_deciding = asyncio.Event()

        async def wait(claim: Claim, outcome: AsyncOutcome) -> bool:
            is_deciding.set()
            await asyncio.Event().wait()
            return False

        async with rig.make_service() as first:
            first.queue.decide = wait
            await first.submit(rig.request("one"))
            await is_deciding.wait()
            assert list(rig.results().values()) == [LARGE]
        assert rig.results() == {}

        record = await rig.until_ended(await rig.start(), "one")
        assert (record.state, record.attempts) == (AsyncState.COMPLETED, 1)
        assert rig.results() == {"one.out": LARGE}


async def test_decision_that_fails_in_the_proxy_leaves_no_object(rig: Rig) -> None:
    """The staged answer is removed, and the request is tried again after a delay, as after other faults."""
    async with rig:
        rig.instance.behave = answering(body=LARGE)
        returned: list[tuple[float, str, bool]] = []
        service = rig.make_service()
        async with service:
            decide, retry = service.queue.decide, service.queue.retry

            async def fail_once(claim: Claim, outcome: AsyncOutcome) -> bool:
                service.queue.decide = decide
                raise ZeroDivisionError

            async def note(claim: Claim, delay_s: float, reason: str, *, counts: bool = True) -> bool:
                if is_held := await retry(claim, delay_s, reason, counts=counts):
                    returned.append((delay_s, reason, counts))
                return is_held

            service.queue.decide, service.queue.retry = fail_once, note
            await service.submit(rig.request("one"))
            record = await rig.until_ended(service, "one")

        assert (record.state, record.attempts) == (AsyncState.COMPLETED, 2)
        assert rig.results() == {"one.out": LARGE}
        [(delay_s, reason, counts)] = returned
        assert (delay_s > 0, reason, counts) == (True, "The proxy failed: ZeroDivisionError", True)


async def test_staged_objects_that_cannot_be_removed_are_logged_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has one line for all requests whose staged objects stay, as without the right to delete."""
    async with rig:
        fail(rig, delete=[ObjectDenied("denied") for _ in range(3)])
        rig.instance.behave = answering(body=LARGE)
        service = await rig.start()

        for name in ("one", "two", "three"):
            await service.submit(rig.request(name))
            assert (await rig.until_ended(service, name)).state is AsyncState.COMPLETED

    (line,) = [each for each in caplog.messages if "denied" in each]
    assert line.startswith("staged object not removed endpoint=llava inference_id=one")


class SlowStore(DirectoryStore):
    """Takes `delay_s` to open an input, and as long again until its first bytes."""

    delay_s = 13.0

    async def open(self, url: str) -> Download:
        download = await super().open(url)
        await pass_time(self.delay_s)
        download.chunks = self._delay(download.chunks)
        return download

    async def _delay(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        await pass_time(self.delay_s)
        async for chunk in chunks:
            yield chunk


async def test_slow_input_does_not_use_up_the_instances_time(rig: Rig) -> None:
    """Waiting for an object store does not count towards InvocationTimeoutSeconds."""
    async with rig:
        rig.make_store = lambda: SlowStore(rig.objects)
        service = await rig.start()

        await service.submit(rig.request("one", input_location=rig.input("in", b"{}"), timeout_s=10.0))
        record = await rig.until_ended(service, "one")

        assert record.state is AsyncState.COMPLETED


async def test_input_that_arrives_too_slowly_is_a_failure(rig: Rig) -> None:
    """An input's host occupies a place at an instance for a limited time. All waits count together."""
    async with rig:
        rig.make_store = lambda: SlowStore(rig.objects)
        service = await rig.start(input_timeout_s=20.0)

        await service.submit(rig.request("one", input_location=rig.input("in", b"{}")))
        record = await rig.until_ended(service, "one")

        assert record.outcome is not None
        assert record.outcome.reason == "The input could not be read: it did not arrive within 20 s"


async def test_queue_that_cannot_be_reached_is_not_asked_without_a_pause(rig: Rig) -> None:
    """Without a queue, a worker frees its place and pauses before it asks again."""
    async with rig:
        service = await rig.start(poll_interval_s=3600.0)
        num_refused = 0

        async def refuse(*args: Any, **named: Any) -> Any:
            nonlocal num_refused
            num_refused += 1
            await asyncio.sleep(0)
            raise QueueUnavailable("not now")

        service.queue.claim = refuse
        await service.submit(rig.request("one"))
        await until(lambda: num_refused > 0, "the worker has looked")
        for _ in range(100):
            await asyncio.sleep(0)

        assert num_refused <= 2  # at the start, and for the submit


async def test_queue_that_cannot_be_reached_is_waited_for(rig: Rig) -> None:
    """A worker continues once its queue is available again."""
    async with rig:
        service = await rig.start()
        claim, num_refused = service.queue.claim, [0]

        async def refuse(*args: Any, **named: Any) -> Any:
            if num_refused[0] < 5:
                num_refused[0] += 1
                raise QueueUnavailable("not now")
            return await claim(*args, **named)

        service.queue.claim = refuse
        await service.submit(rig.request("one"))
        record = await rig.until_ended(service, "one")

        assert record.state is AsyncState.COMPLETED
        assert num_refused == [5]


async def test_lease_is_extended_soon_after_the_queue_did_not_answer(rig: Rig) -> None:
    """A failed extension is repeated well before the next one is due, since the lease may end before that."""
    async with rig:
        gate = Gate()
        rig.instance.behave = never_answering(gate)
        service = await rig.start(lease_s=3600.0)
        extend, num_tries = service.queue.extend, 0

        async def refuse_once(*args: Any, **named: Any) -> bool:
            nonlocal num_tries
            num_tries += 1
            if num_tries == 1:
                raise QueueUnavailable("not now")
            return await extend(*args, **named)

        service.queue.extend = refuse_once
        await service.submit(rig.request("one"))
        await until(gate.reached.is_set, "the instance has the request")
        for tried in (1, 2):
            await pass_time(1.0)
            await until(lambda tried=tried: num_tries == tried, "the lease is extended")


async def test_instance_that_does_not_read_is_out_of_time(rig: Rig) -> None:
    """An instance that does not read a large input times out with the request."""
    async with rig:
        await rig.instance.die()
        writers: list[asyncio.StreamWriter] = []
        deaf = await asyncio.start_server(
            lambda reader, writer: writers.append(writer),
            "127.0.0.1",
            rig.instance.port,
            limit=1024,
            reuse_port=True,
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
