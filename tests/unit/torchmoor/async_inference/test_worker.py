"""A worker with a real queue and directory, and instances that fail in every way: each request ends once."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.fake_instance import Gate, Received, Wire, answering, dying, refusing, silent, streaming
from tests.unit.torchmoor.async_inference.rig import QUICK, Rig, never_answering, until
from tests.unit.torchmoor.movable_loop import pass_time
from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.request import AsyncState, Claim
from torchmoor.errors import ConfigError


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


async def test_inline_body_becomes_a_result_object(rig: Rig) -> None:
    """The instance gets the inline body and the client's fields, and its answer becomes the promised object."""
    async with rig:
        rig.instance.behave = answering(body=b'{"a": 1}', headers={"Content-Type": "application/x-answer"})
        service = await rig.start()

        await service.submit(
            rig.request("one", b'{"q": 1}', content_type="application/json", accept="text/x", custom_attributes="c=1")
        )
        record = await rig.until_ended(service, "one")

        assert record.state is AsyncState.COMPLETED
        assert rig.results() == {"one.out": b'{"a": 1}'}
        [received] = rig.instance.received
        assert received.body == b'{"q": 1}'
        fields = ("content-type", "accept", "x-amzn-sagemaker-custom-attributes", "x-amzn-sagemaker-inference-id")
        assert [received.headers[name] for name in fields] == ["application/json", "text/x", "c=1", "one"]
        assert received.headers["content-length"] == "8"
        [notice] = rig.listener.notices
        assert (notice.outcome.succeeded, notice.request.inference_id) == (True, "one")
        assert notice.response == b'{"a": 1}'
        assert notice.outcome.content_type == "application/x-answer"


async def test_content_type_that_no_store_takes_is_left_out(rig: Rig) -> None:
    """A content type that stores refuse is left out, so that a decided result can always be published."""

    async def behave(received: Received, wire: Wire) -> None:
        wire.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/\xe9\r\nContent-Length: 2\r\n\r\nok")
        await wire.writer.drain()

    async with rig:
        rig.instance.behave = behave
        record = await rig.run_one()

        assert (record.state, rig.results()) == (AsyncState.COMPLETED, {"one.out": b"ok"})
        assert rig.listener.notices[0].outcome.content_type == ""


async def test_input_object_goes_with_its_length(rig: Rig) -> None:
    """An input object is sent with its Content-Length, by which TorchServe applies its limit."""
    async with rig:
        service = await rig.start()
        content = bytes(range(256)) * 20_000

        await service.submit(rig.request("one", input_location=rig.input("in", content)))
        await rig.until_ended(service, "one")

        [received] = rig.instance.received
        assert received.body == content
        assert received.headers["content-length"] == str(len(content))
        assert "transfer-encoding" not in received.headers


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_large_answer_is_staged_and_then_gets_its_name(rig: Rig, is_chunked: bool) -> None:
    """An answer too large for the queue's row is staged, and gets its name only after the decision."""
    async with rig:
        content = bytes(range(256)) * 4000
        pieces = [content[at : at + 50_000] for at in range(0, len(content), 50_000)]
        kind = "application/octet-stream"
        rig.instance.behave = streaming(pieces, kind) if is_chunked else answering(body=content)
        record = await rig.run_one()

        assert record.state is AsyncState.COMPLETED
        assert rig.results() == {"one.out": content}
        assert rig.listener.notices[0].response is None  # too large to be sent along


async def test_answer_above_the_limit_fails(rig: Rig) -> None:
    """A request whose answer exceeds the limit fails, and nothing of the answer is stored."""
    async with rig:
        rig.instance.behave = answering(body=b"x" * (5 << 20))
        record = await rig.run_one()

        assert record.state is AsyncState.FAILED
        assert list(rig.results()) == ["one-error.out"]
        assert b"could not be stored" in rig.results()["one-error.out"]


@pytest.mark.parametrize(("status", "whose"), [(400, "client"), (404, "client"), (500, "server"), (424, "client")])
async def test_model_error_is_final(rig: Rig, status: int, whose: str) -> None:
    """An error with the handler's own code is final, as on SageMaker."""
    async with rig:
        rig.instance.behave = refusing(status, "SomeCode", "no such thing")
        record = await rig.run_one()

        assert record.state is AsyncState.FAILED
        assert len(rig.instance.received) == 1
        text = rig.results()["one-error.out"].decode()
        assert text.startswith(f'Received {whose} error ({status}) from primary with message "')
        assert "no such thing" in text
        assert rig.listener.notices[0].outcome.reason == text


async def test_input_above_torchserves_limit_is_told_the_setting(rig: Rig) -> None:
    """TorchServe answers 413 without a text, so the failure names the setting."""
    async with rig:
        rig.instance.behave = answering(413, body=b"")
        service = await rig.start()

        await service.submit(rig.request("one", input_location=rig.input("in", bytes(123_456))))
        await rig.until_ended(service, "one")

        text = rig.results()["one-error.out"].decode()
        start = "Received client error (413) from primary with message \"The input's 123456 bytes are more than"
        assert text.startswith(start)
        assert "max_request_size, which torchmoor up sets with --max-body-mib" in text


async def test_instance_without_room_is_asked_again_and_it_is_no_attempt(rig: Rig) -> None:
    """Refusals by a full instance do not count as attempts, however many there are."""
    refusals = 3 * QUICK.max_attempts

    async def behave(received: Received, wire: Wire) -> None:
        is_full = len(rig.instance.received) <= refusals
        await (refusing(429, "Overloaded", "full") if is_full else answering(body=b"done"))(received, wire)

    async with rig:
        rig.instance.behave = behave
        record = await rig.run_one()

        assert (record.state, record.attempts) == (AsyncState.COMPLETED, 1)
        assert len(rig.instance.received) == refusals + 1
        assert rig.results() == {"one.out": b"done"}


@pytest.mark.parametrize("retry_after", ["0", "1000000000"])
async def test_retry_after_keeps_to_the_back_off(rig: Rig, retry_after: str) -> None:
    """The instance's Retry-After is limited by the back-off and by the request's time to live."""
    delays: list[float] = []

    async def behave(received: Received, wire: Wire) -> None:
        is_full = len(rig.instance.received) == 1
        refusal = refusing(429, "Overloaded", "full", {"Retry-After": retry_after})
        await (refusal if is_full else answering(body=b"done"))(received, wire)

    async with rig:
        rig.instance.behave = behave
        service = await rig.start()
        retry = service.queue.retry

        async def note(claim: Claim, delay_s: float, reason: str, *, counts: bool = True) -> bool:
            delays.append(delay_s)
            return await retry(claim, delay_s, reason, counts=counts)

        service.queue.retry = note
        await service.submit(rig.request("one"))
        record = await rig.until_ended(service, "one")

        assert record.state is AsyncState.COMPLETED
        assert delays == [QUICK.min_backoff_s if retry_after == "0" else QUICK.max_backoff_s]


async def _cut(received: Received, wire: Wire) -> None:
    await wire.head(200, {"Content-Length": "100000"})
    await wire.send(b"x" * 5000)
    wire.reset()


@pytest.mark.parametrize("failure", [dying, _cut, refusing(503, None, "no worker"), refusing(507, None, "died")])
async def test_lost_attempt_is_repeated(rig: Rig, failure: object) -> None:
    """After a lost connection or a dead worker, the next attempt gives the one result, and both count as attempts."""

    async def behave(received: Received, wire: Wire) -> None:
        await (failure if len(rig.instance.received) <= 2 else answering(body=b"done"))(received, wire)

    async with rig:
        rig.instance.behave = behave
        record = await rig.run_one()

        assert (record.state, record.attempts) == (AsyncState.COMPLETED, 3)
        assert rig.results() == {"one.out": b"done"}
        assert len({each.headers["x-torchmoor-request-id"] for each in rig.instance.received}) == 3
        assert len({each.headers["amz-sdk-invocation-id"] for each in rig.instance.received}) == 1


async def test_attempts_end(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """A request that fails at every attempt ends with a failure object and its reason.

    Logs do not repeat model output.
    """
    async with rig:
        rig.instance.behave = refusing(503, None, "no worker today")
        record = await rig.run_one(max_attempts=3)

        assert (record.state, record.attempts) == (AsyncState.FAILED, 3)
        assert len(rig.instance.received) == 3
        assert "no worker today" in rig.results()["one-error.out"].decode()
        assert "attempts exhausted inference_id=one" in caplog.text
        assert "no worker today" not in caplog.text


async def test_instance_that_cannot_be_reached_costs_no_attempt(rig: Rig) -> None:
    """A failed connection does not count as an attempt, because the instance did nothing."""
    async with rig:
        await rig.instance.die()
        service = await rig.start(max_attempts=2)
        await service.submit(rig.request("one"))
        await until(lambda: len(rig.places.failures) >= 4, "several connections refused")

        await rig.instance.start()
        record = await rig.until_ended(service, "one")

        assert (record.state, record.attempts) == (AsyncState.COMPLETED, 1)


async def test_time_out_is_final_and_the_instance_is_told(rig: Rig) -> None:
    """After InvocationTimeoutSeconds the request fails as on SageMaker, and the instance is asked to cancel."""
    async with rig:
        rig.instance.behave = silent
        service = await rig.start()

        await service.submit(rig.request("one", timeout_s=20.0))
        await until(lambda: len(rig.instance.received) == 1, "the instance has it")
        await pass_time(25.0)
        record = await rig.until_ended(service, "one")

        assert record.state is AsyncState.FAILED
        assert b"timed out while waiting" in rig.results()["one-error.out"]
        assert rig.places.abandoned == [rig.instance.received[0].headers["x-torchmoor-request-id"]]


async def test_late_error_in_a_text_is_a_failure(rig: Rig) -> None:
    async with rig:
        mark = b'\x1e{"error": {"code": "OutOfMemory", "message": "no room"}}'
        rig.instance.behave = streaming([b"Once ", b"upon", mark])
        record = await rig.run_one()

        assert record.state is AsyncState.FAILED
        assert list(rig.results()) == ["one-error.out"]
        assert b"OutOfMemory: no room" in rig.results()["one-error.out"]


async def test_late_error_with_half_a_surrogate_pair_is_a_failure(rig: Rig) -> None:
    """JSON may have it, and a queue or an object may not: the request ends at its first attempt all the same."""
    async with rig:
        mark = b'\x1e{"error": {"code": "OutOfMemory", "message": "no room \\ud83d"}}'
        rig.instance.behave = streaming([b"Once ", b"upon", mark])
        record = await rig.run_one()

        assert (record.state, record.attempts) == (AsyncState.FAILED, 1)
        assert b"OutOfMemory: no room ?" in rig.results()["one-error.out"]


async def test_missing_input_is_a_failure(rig: Rig) -> None:
    async with rig:
        service = await rig.start()
        url = (rig.folder / "inputs/nothing").as_uri()

        await service.submit(rig.request("one", input_location=url))
        record = await rig.until_ended(service, "one")

        assert (record.state, record.attempts) == (AsyncState.FAILED, 1)
        assert rig.instance.received == []
        assert b"input could not be read" in rig.results()["one-error.out"]


async def test_cancelled_request_stops_at_the_instance(rig: Rig) -> None:
    """Cancelling a running request cancels it at the instance and leaves a failure object instead of a result."""
    gate = Gate()

    async with rig:
        rig.instance.behave = never_answering(gate)
        service = await rig.start(lease_s=60.0)
        await service.submit(rig.request("one"))
        await until(gate.reached.is_set, "the instance has it")

        assert await service.cancel("one") is AsyncState.CANCELLED
        record = await rig.until_ended(service, "one")

        assert record.state is AsyncState.CANCELLED
        assert list(rig.results()) == ["one-error.out"]
        await until(lambda: len(rig.places.abandoned) == 1, "the instance gets the cancellation")
        assert await service.cancel("one") is AsyncState.CANCELLED


async def test_cancelled_while_waiting_never_runs(rig: Rig) -> None:
    async with rig:
        rig.places.instances = []
        service = await rig.start()
        await service.submit(rig.request("one"))

        await service.cancel("one")
        record = await rig.until_ended(service, "one")

        assert record.state is AsyncState.CANCELLED
        assert rig.instance.received == []
        assert list(rig.results()) == ["one-error.out"]


async def test_time_to_live_passes_without_an_instance(rig: Rig) -> None:
    """A request that no instance serves within its time to live ends with a failure object."""
    clock = [1000.0]
    rig.now = lambda: clock[0]

    async with rig:
        rig.places.instances = []
        service = await rig.start()
        await service.submit(rig.request("one", ttl_s=60.0))

        clock[0] += 61
        record = await rig.until_ended(service, "one")

        assert record.state is AsyncState.EXPIRED
        assert list(rig.results()) == ["one-error.out"]
        assert service.endpoints["llava"].metrics.of(None).async_expired == 1


async def test_places_bound_what_runs(rig: Rig) -> None:
    """At most as many requests run as there are places, in the order of arrival."""

    async def behave(received: Received, wire: Wire) -> None:
        await asyncio.sleep(0)
        await answering(body=received.body)(received, wire)

    async with rig:
        rig.places.num_free = 2
        rig.instance.behave = behave
        service = await rig.start()

        for number in range(20):
            await service.submit(rig.request(f"r{number}", b"%d" % number))
        for number in range(20):
            await rig.until_ended(service, f"r{number}")

        assert rig.results() == {f"r{number}.out": b"%d" % number for number in range(20)}
        assert 1 <= rig.places.most_held <= 2
        assert service.endpoints["llava"].metrics.of(None).async_processed == 20


async def test_stopped_service_gives_back_what_runs(rig: Rig) -> None:
    """A stopped worker returns its request to the queue at once, without counting an attempt."""
    gate = Gate()

    async def behave(received: Received, wire: Wire) -> None:
        gate.reached.set()
        if len(rig.instance.received) == 1:
            await wire.until_closed()
        else:
            await wire.answer(body=b"done")

    async with rig:
        rig.instance.behave = behave
        first = rig.make_service(lease_s=3600.0)
        async with first:
            await first.submit(rig.request("one"))
            await until(gate.reached.is_set, "the instance has it")

        second = await rig.start(lease_s=3600.0)
        record = await rig.until_ended(second, "one")

        assert (record.state, record.attempts) == (AsyncState.COMPLETED, 1)
        assert rig.results() == {"one.out": b"done"}


async def test_service_that_stops_while_it_claims_gives_the_claim_back(rig: Rig) -> None:
    """The answer of the queue is on its way: no worker would run the request before its lease lapses."""
    claimed, may_answer = asyncio.Event(), asyncio.Event()

    class Slow:
        """A queue whose answer to a claim takes its time."""

        def __init__(self, queue: Queue) -> None:
            self._queue = queue

        def __getattr__(self, name: str) -> Any:
            return getattr(self._queue, name)

        async def claim(self, endpoint: str, lease_s: float, *, may_begin: bool) -> Claim | None:
            found = await self._queue.claim(endpoint, lease_s, may_begin=may_begin)
            if found is not None:
                claimed.set()
                await may_answer.wait()
            return found

    async with rig:
        rig.wrap_queue = lambda queue: Slow(queue)
        async with rig.make_service(lease_s=3600.0) as first:
            await first.submit(rig.request("one"))
            await claimed.wait()
            stopping = asyncio.create_task(first.workers["llava"].stop())
            await asyncio.sleep(0)  # the stop reaches it
            may_answer.set()
            await stopping

        rig.wrap_queue = lambda queue: queue
        after = rig.make_queue()
        record = await after.get("one")
        await after.close()

        assert (record.state, record.attempts) == (AsyncState.WAITING, 0)


@pytest.mark.parametrize("is_in_time", [True, False])
async def test_removed_endpoint_lets_requests_end_for_a_while(rig: Rig, is_in_time: bool) -> None:
    """Requests of a removed endpoint may end within a time.

    Then they return to the queue without counting an attempt.
    """
    gate = Gate()

    async def behave(received: Received, wire: Wire) -> None:
        if len(rig.instance.received) == 1:
            await gate.pass_through()
        await wire.answer(body=b"%d" % len(rig.instance.received))

    async with rig:
        rig.instance.behave = behave
        first = await rig.start(lease_s=3600.0)
        await first.submit(rig.request("one"))
        await until(gate.reached.is_set, "the instance has it")

        first.remove("llava", 60.0 if is_in_time else 0.0)
        second = await rig.start(lease_s=3600.0)
        if is_in_time:
            gate.open()
        record = await rig.until_ended(second, "one")

        assert (record.state, record.attempts) == (AsyncState.COMPLETED, 1)
        assert rig.results() == {"one.out": b"1" if is_in_time else b"2"}
        gate.open()


async def _stand_still(*args: object, **named: object) -> bool:
    """Replace `extend` of a suspended worker: the lease is not extended, and the worker does not notice."""
    return True


@pytest.mark.parametrize("size", [100, 5000])
async def test_worker_whose_claim_was_taken_changes_nothing(rig: Rig, size: int) -> None:
    """A worker that lost its lease meanwhile finds another's decision and deletes its own staged answer."""
    gate, clock = Gate(), [1000.0]
    rig.now = lambda: clock[0]

    async def behave(received: Received, wire: Wire) -> None:
        number = len(rig.instance.received)
        if number == 1:
            await gate.pass_through()
        await wire.answer(body=b"%d" % number * size)

    async with rig:
        rig.instance.behave = behave
        slow = await rig.start(lease_s=60.0)
        slow.queue.extend = _stand_still
        await slow.submit(rig.request("one"))
        await until(gate.reached.is_set, "the instance has it")
        worker = slow.workers["llava"]
        quick = await rig.start()

        clock[0] += 61
        record = await rig.until_ended(quick, "one")
        assert rig.results() == {"one.out": b"2" * size}
        gate.open()
        await worker.drain(60.0)  # until the slow one is done

        assert (record.state, record.attempts) == (AsyncState.COMPLETED, 2)
        assert rig.results() == {"one.out": b"2" * size}
        assert len(rig.listener.notices) == 1


async def test_request_whose_workers_die_is_given_up(rig: Rig) -> None:
    """A request that kills each of its workers ends after the last attempt."""

    async def _try(queue: object) -> bool:
        return await queue.claim("llava", 0.01) is not None

    async with rig:
        queue = rig.make_queue()
        await queue.submit(rig.request("one"))
        for _ in range(3):
            await until(lambda: _try(queue), "the lease has lapsed")
        await queue.close()
        service = await rig.start(max_attempts=3)

        record = await rig.until_ended(service, "one")

        assert record.state is AsyncState.FAILED
        assert rig.instance.received == []
        assert b"worker was lost" in rig.results()["one-error.out"]


async def test_metrics_tell_of_the_backlog(rig: Rig) -> None:
    """The metrics show how many requests wait, the oldest one's age, and whether instances serve them."""
    async with rig:
        rig.places.instances = []
        service = await rig.start()
        metrics = service.endpoints["llava"].metrics
        for number in range(3):
            await service.submit(rig.request(f"r{number}"))

        await until(lambda: dict(metrics.gauges())["ApproximateBacklogSize"] == 3, "the backlog is seen")
        gauges = dict(metrics.gauges())

        assert gauges["HasBacklogWithoutCapacity"] == 1
        assert gauges["ApproximateBacklogSizePerInstance"] == 3
        rig.places.instances = [rig.instance]
        await rig.until_ended(service, "r2")
        await until(lambda: dict(metrics.gauges())["ApproximateBacklogSize"] == 0, "nothing waits")
        assert dict(metrics.gauges())["HasBacklogWithoutCapacity"] == 0


async def test_results_that_could_not_be_written_are_refused_at_the_start(rig: Rig) -> None:
    """An unwritable place for results stops the start instead of failing each request."""
    async with rig:
        service = rig.make_service()
        service.endpoints["llava"].output_path = "file:///elsewhere"

        with pytest.raises(ConfigError, match=r"endpoint 'llava': .* below the directories"):
            await service.__aenter__()


def test_settings_group_is_checked() -> None:
    """A number out of range is refused by its name."""
    with pytest.raises(ConfigError, match=r"async_inference\.lease_s must be positive, not 0"):
        QUICK.replace(lease_s=0)
    with pytest.raises(ConfigError, match="max_backoff_s must be min_backoff_s or more"):
        QUICK.replace(max_backoff_s=0.001)
