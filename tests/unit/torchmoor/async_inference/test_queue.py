"""The contract of queues, on every store: SQLite, Valkey, a Valkey cluster."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.torchmoor.async_inference.stores import ENDPOINT, Store, claimed, ended, request, result
from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.request import CANCELLED, EXPIRED, AsyncOutcome, AsyncRequest, AsyncState, Backlog
from torchmoor.errors import InferenceIdInUse, QueueFull, ResultLocationInUse

BINARY = bytes(range(256)) * 4


def test_a_request_comes_out_as_it_went_in(store: Store, queue: Queue) -> None:
    """All fields of a request return unchanged, in any script, and so do the bytes of an inline body.

    The queue sets the time.
    """
    values = {"principal": "p" * 64, "invocation_id": "call-1", "content_type": "a/b", "accept": "c/d"}
    sent = request("r1", body=BINARY, custom_attributes='é"\n=', ttl_s=60.5, timeout_s=3.25, received_at=1.0, **values)

    stored = store.do(queue.submit(sent))
    claim = store.do(claimed(queue))

    assert stored == replace(sent, received_at=store.clock.now)
    assert (stored, 1, None) == (claim.request, claim.attempt, claim.decided)


@pytest.mark.parametrize("body", [b"", b"=", BINARY, None])
def test_bodies_that_are_empty_differ_from_none(store: Store, queue: Queue, body: bytes | None) -> None:
    """Empty bodies of a request and of its outcome differ from missing ones."""
    outcome = AsyncOutcome(
        state=AsyncState.COMPLETED, body=body, staged=None if body is not None else "s3://out/.torchmoor/r1"
    )
    store.do(queue.submit(request("r1") if body is None else request("r1", body=body)))

    first = store.do(claimed(queue))
    assert store.do(queue.decide(first, outcome))
    store.clock.step(31)
    second = store.do(claimed(queue))

    assert body == first.request.body
    assert outcome == second.decided


class LaterRequest(AsyncRequest):
    def to_json(self) -> str:
        return json.dumps({"unknown": 1} | json.loads(super().to_json()), separators=(",", ":"))


class LaterOutcome(AsyncOutcome):
    def to_json(self) -> str:
        return json.dumps({"unknown": [None]} | json.loads(super().to_json()))


def test_fields_of_a_later_version_are_left_out(store: Store, queue: Queue) -> None:
    """Proxies of two versions share a queue during a rolling update, and each runs and ends the other's requests."""
    sent, outcome = request("r1", body=b"input"), result()
    later = LaterRequest(**{name: getattr(sent, name) for name in sent.__dataclass_fields__})
    store.do(queue.submit(later))

    assert store.do(queue.backlog(ENDPOINT)).waiting == 1
    first = store.do(claimed(queue))
    assert first.request == replace(sent, received_at=store.clock.now)
    assert store.do(queue.decide(first, LaterOutcome(state=outcome.state, content_type="text/plain", body=b"answer")))
    store.clock.step(31)
    second = store.do(claimed(queue))
    assert second.decided == outcome
    assert store.do(queue.finish(second))
    (record,) = store.do(queue.list(ENDPOINT))
    assert (record.state, record.attempts) == (AsyncState.COMPLETED, 1)


def test_requests_are_claimed_in_the_order_of_arrival(store: Store, queue: Queue) -> None:
    """Each endpoint's requests are claimed in the order of arrival, even if the clock goes back between them."""
    for number in range(12):
        store.do(queue.submit(request(f"r{number}", endpoint=ENDPOINT if number % 2 else "other")))
        store.clock.step(-10)

    order = [store.do(claimed(queue)).request.inference_id for _ in range(6)]

    assert order == ["r1", "r3", "r5", "r7", "r9", "r11"]
    assert store.do(queue.claim(ENDPOINT, 30)) is None


def test_a_clients_retry_finds_the_request_that_is_stored(store: Store, queue: Queue) -> None:
    """Submits are idempotent on endpoint, principal and invocation, also once the request has ended."""
    sent = request("r1", invocation_id="call", principal="me", body=b"input")
    stored = store.do(queue.submit(sent))
    store.clock.step(5)
    again = replace(sent, inference_id="r2")

    assert stored == store.do(queue.submit(again))
    assert store.do(queue.backlog(ENDPOINT)).waiting == 1
    store.do(ended(queue))
    assert store.do(queue.submit(again)).inference_id == "r1"
    assert store.do(queue.get("r2")) is None


@pytest.mark.parametrize(
    "other", [{"principal": "you"}, {"endpoint": "other"}, {"invocation_id": "next"}, {"invocation_id": ""}]
)
def test_another_invocation_is_another_request(store: Store, queue: Queue, other: dict[str, str]) -> None:
    """A request with another endpoint, principal or invocation is stored, unless its inference id is in use."""
    sent = request("r1", invocation_id="call", principal="me")
    store.do(queue.submit(sent))

    with pytest.raises(InferenceIdInUse, match="InferenceId r1"):
        store.do(queue.submit(replace(sent, **other)))
    second = request("r2", invocation_id="call", principal="me")
    assert store.do(queue.submit(replace(second, **other))).inference_id == "r2"


@pytest.mark.parametrize(
    "other",
    [
        {"output_location": "s3://out/r1.out"},
        {"output_location": "s3://out/r1.err"},
        {"output_location": "s3://out/r1.out/deep/er"},
        {"output_location": "s3://out/folder"},
        {"failure_location": "s3://out/folder/r1.out"},
    ],
)
def test_location_belongs_to_its_request_until_that_ends(store: Store, queue: Queue, other: dict[str, str]) -> None:
    """Until a request ends, no other request of any endpoint can use its location or a path below it."""
    first = request("r1") if "folder" not in str(other) else request("r1", output_location="s3://out/folder/r1.out")
    store.do(queue.submit(first))

    with pytest.raises(ResultLocationInUse, match="choose another Filename, S3OutputPathExtension or InferenceId"):
        store.do(queue.submit(request("r2", endpoint="other", **other)))
    assert store.do(queue.get("r2")) is None

    store.do(ended(queue))
    assert store.do(queue.submit(request("r2", endpoint="other", **other))).inference_id == "r2"


@pytest.mark.parametrize("location", ["s3://out/r1.outer", "s3://out/r1", "s3://out/r1.out0", "s3://out/r1.out.d/x"])
def test_locations_that_only_begin_alike_are_different(store: Store, queue: Queue, location: str) -> None:
    """Locations are compared by whole parts of the path."""
    store.do(queue.submit(request("r1")))

    assert store.do(queue.submit(request("r2", output_location=location))).inference_id == "r2"


def test_refusal_is_for_new_requests(store: Store, queue: Queue) -> None:
    """A client's retry is answered where new requests are refused, because the existing object is its own."""
    sent = request("r1", invocation_id="call")
    first = store.do(queue.submit(sent))

    assert first == store.do(queue.submit(sent, refusal=ResultLocationInUse()))
    with pytest.raises(InferenceIdInUse):
        store.do(queue.submit(request("r1"), refusal=ResultLocationInUse()))
    with pytest.raises(ResultLocationInUse):
        store.do(queue.submit(request("r2"), refusal=ResultLocationInUse()))


def test_result_that_cannot_be_published_is_replaced_once_and_for_all(store: Store, queue: Queue) -> None:
    """A result that cannot be published becomes a failure before its object is written.

    Only the claim's holder may do so.
    """
    failure = AsyncOutcome(state=AsyncState.FAILED, reason="taken")
    store.do(queue.submit(request("r1")))
    late = store.do(claimed(queue))
    assert not store.do(queue.replace(late, failure))  # nothing is decided yet
    store.do(queue.decide(late, result()))
    store.clock.step(31)
    held = store.do(claimed(queue))

    assert not store.do(queue.replace(late, failure))
    assert store.do(queue.replace(held, failure))
    assert store.do(queue.replace(held, failure))
    store.clock.step(31)
    after = store.do(claimed(queue))
    assert failure == after.decided
    assert store.do(queue.finish(after))
    assert not store.do(queue.replace(after, failure))
    record = store.do(queue.get("r1"))
    assert (record.state, record.reason) == (AsyncState.FAILED, "taken")


def test_many_submits_of_one_invocation_at_once_store_one(store: Store) -> None:
    """Concurrent submits of one invocation by several processes store one request."""
    queues = [store.opened() for _ in range(3)]

    async def submit() -> list[AsyncRequest]:
        sent = [request(f"r{number}", invocation_id="call") for number in range(12)]
        return await asyncio.gather(*(queues[n % 3].submit(one) for n, one in enumerate(sent)))

    assert len({stored.inference_id for stored in store.do(submit())}) == 1
    assert store.do(queues[0].backlog(ENDPOINT)).waiting == 1


def test_submits_at_once_have_each_its_own_answer(store: Store, queue: Queue) -> None:
    """Of submits in one transaction, one that is refused or cancelled does not affect the others."""
    store.do(queue.submit(request("taken")))

    async def submit() -> list[object]:
        names = ["r1", "taken", "r2", "taken", "r3"]
        tasks = [asyncio.create_task(queue.submit(request(name))) for name in [*names, "left", "r4"]]
        await asyncio.sleep(0)
        tasks[5].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = store.do(submit())

    assert [isinstance(answer, AsyncRequest) for answer in answers] == [True, False, True, False, True, False, True]
    assert [type(answers[n]) for n in (1, 3, 5)] == [InferenceIdInUse, InferenceIdInUse, asyncio.CancelledError]
    found = {record.request.inference_id for record in store.do(queue.list(ENDPOINT))}
    assert found - {"left"} == {"taken", "r1", "r2", "r3", "r4"}


def test_a_lapsed_lease_lets_another_take_the_request(store: Store, queue: Queue) -> None:
    """A request can be claimed again once its lease has ended without extension, and each claim is an attempt."""
    store.do(queue.submit(request("r1")))
    first = store.do(claimed(queue, 30))

    store.clock.step(29)
    assert store.do(queue.claim(ENDPOINT, 30)) is None
    assert store.do(queue.extend(first, 30, instance="i-1"))
    store.clock.step(29)
    assert store.do(queue.claim(ENDPOINT, 30)) is None
    store.clock.step(2)
    second = store.do(claimed(queue))

    assert (first.attempt, second.attempt) == (1, 2)
    record = store.do(queue.get("r1"))
    assert (record.state, record.attempts, record.instance) == (AsyncState.RUNNING, 2, "i-1")


def test_a_late_worker_can_do_nothing(store: Store, queue: Queue) -> None:
    """A worker whose request another one has claimed can no longer extend, decide, return or finish it."""
    store.do(queue.submit(request("r1")))
    late = store.do(claimed(queue, 30))
    store.clock.step(31)
    holder = store.do(claimed(queue, 30))

    assert not store.do(queue.extend(late, 30))
    assert not store.do(queue.decide(late, result(b"late")))
    assert not store.do(queue.retry(late, 0, "late"))
    assert not store.do(queue.finish(late))
    assert store.do(queue.decide(holder, result(b"first")))
    assert not store.do(queue.decide(late, result(b"late")))
    assert not store.do(queue.finish(late))
    assert store.do(queue.finish(holder))
    assert not store.do(queue.extend(late, 30))


def test_a_lapsed_lease_that_nobody_took_still_holds(store: Store, queue: Queue) -> None:
    """A holder whose lease ended, as after a clock step, can finish unless another claimed the request."""
    store.do(queue.submit(request("r1")))
    store.do(queue.submit(request("r2")))
    first = store.do(claimed(queue, 30))
    second = store.do(claimed(queue, 30))

    store.clock.step(3600)

    assert store.do(queue.decide(first, result()))
    assert store.do(queue.claim(ENDPOINT, 30, may_begin=False)) is None  # deciding has renewed its lease
    assert store.do(queue.extend(second, 30))
    assert store.do(queue.claim(ENDPOINT, 30)) is None


def test_deciding_again_with_the_same_outcome_is_success(store: Store, queue: Queue) -> None:
    """A holder may repeat a decision whose confirmation was lost; another outcome does not replace the first."""
    store.do(queue.submit(request("r1")))
    claim = store.do(claimed(queue))

    assert store.do(queue.decide(claim, result()))
    assert store.do(queue.decide(claim, result()))
    assert not store.do(queue.decide(claim, result(b"another")))
    assert not store.do(queue.decide(claim, AsyncOutcome(state=AsyncState.FAILED, reason="no")))
    assert store.do(queue.finish(claim))
    assert store.do(queue.finish(claim))
    assert not store.do(queue.decide(claim, result()))


def test_what_is_decided_is_only_published_by_the_next(store: Store, queue: Queue) -> None:
    """A claim of a decided request contains the outcome, is not an attempt, and comes before waiting requests."""
    store.do(queue.submit(request("r0")))
    store.do(queue.submit(request("r1", body=b"input")))
    store.do(claimed(queue, 3600))
    claim = store.do(claimed(queue, 30))
    store.do(queue.decide(claim, result(BINARY)))
    store.do(queue.submit(request("r2")))

    store.clock.step(31)
    other = store.do(claimed(queue))

    assert ("r1", 1, result(BINARY), b"input") == (
        *(other.request.inference_id, other.attempt, other.decided, other.request.body),
    )
    assert not store.do(queue.finish(claim))
    assert store.do(queue.retry(other, 10, "the bucket is down"))
    assert store.do(queue.claim(ENDPOINT, 30, may_begin=False)) is None
    store.clock.step(11)
    last = store.do(queue.claim(ENDPOINT, 30, may_begin=False))
    assert (1, result(BINARY)) == (last.attempt, last.decided)
    assert store.do(queue.finish(last))


def test_nothing_is_finished_before_it_is_decided(store: Store, queue: Queue) -> None:
    """A request cannot be finished before it is decided, because it would have no outcome."""
    store.do(queue.submit(request("r1")))
    claim = store.do(claimed(queue))

    with pytest.raises(ValueError, match="decided"):
        store.do(queue.finish(claim))


def test_a_retry_waits_for_its_delay_and_then_comes_first(store: Store, queue: Queue) -> None:
    """A retried request keeps its place in the order of arrival and shows its reason while it waits."""
    for name in ("r1", "r2", "r3"):
        store.do(queue.submit(request(name)))
    assert store.do(queue.retry(store.do(claimed(queue)), 10, "instance died"))

    assert store.do(claimed(queue)).request.inference_id == "r2"
    record = store.do(queue.get("r1"))
    shown = record.state, record.attempts, record.reason, record.due_at
    assert (AsyncState.WAITING, 1, "instance died", store.clock.now + 10) == shown
    store.clock.step(11)
    again = store.do(claimed(queue))
    assert (again.request.inference_id, again.attempt) == ("r1", 2)


def test_what_was_no_attempt_is_not_counted(store: Store, queue: Queue) -> None:
    """A claim that ended by shutdown or for lack of capacity does not count as an attempt."""
    store.do(queue.submit(request("r1")))

    for _ in range(3):
        claim = store.do(claimed(queue))
        assert claim.attempt == 1
        assert store.do(queue.retry(claim, 0, "no room", counts=False))

    assert store.do(claimed(queue)).attempt == 1


def test_an_attempt_that_was_decided_stays_counted(store: Store, queue: Queue) -> None:
    """A worker that stops during publication keeps the attempt counted."""
    store.do(queue.submit(request("r1")))
    claim = store.do(claimed(queue))
    assert store.do(queue.decide(claim, result()))

    assert store.do(queue.retry(claim, 0, "stopped", counts=False))

    assert store.do(claimed(queue)).attempt == 1


@pytest.mark.parametrize("state", [AsyncState.WAITING, AsyncState.RUNNING])
def test_a_cancelled_request_is_decided(store: Store, queue: Queue, state: AsyncState) -> None:
    """A cancelled request's holder loses it, and the next claim publishes the failure; the request never runs again."""
    store.do(queue.submit(request("r1")))
    holder = store.do(claimed(queue)) if state is AsyncState.RUNNING else None

    assert AsyncState.CANCELLED == store.do(queue.cancel("r1")) == store.do(queue.cancel("r1"))

    if holder is not None:
        assert not store.do(queue.extend(holder, 30))
        assert not store.do(queue.decide(holder, result()))
        assert not store.do(queue.retry(holder, 0, "late"))
    publisher = store.do(queue.claim(ENDPOINT, 30, may_begin=False))
    assert publisher.decided == CANCELLED
    assert store.do(queue.finish(publisher))
    assert store.do(queue.cancel("r1")) == AsyncState.CANCELLED
    assert Backlog() == store.do(queue.backlog(ENDPOINT))


def test_what_is_decided_cannot_be_cancelled(store: Store, queue: Queue) -> None:
    """Cancelling a decided request returns its state, and cancelling an unknown one returns None."""
    store.do(queue.submit(request("r1")))
    claim = store.do(claimed(queue))
    store.do(queue.decide(claim, result()))

    assert store.do(queue.cancel("r1")) == AsyncState.DECIDED
    store.do(queue.finish(claim))
    assert store.do(queue.cancel("r1")) == AsyncState.COMPLETED
    assert store.do(queue.cancel("unknown")) is None


def test_a_request_past_its_time_to_live_is_not_run(store: Store, queue: Queue) -> None:
    """A waiting request becomes EXPIRED, also without instances.

    A running one may go on, and expires once its lease ends.
    """
    store.do(queue.submit(request("runs", ttl_s=60)))
    store.do(queue.submit(request("waits", ttl_s=60)))
    store.do(queue.submit(request("lives", ttl_s=600)))
    running = store.do(claimed(queue, 100))

    store.clock.step(61)
    expired = store.do(queue.claim(ENDPOINT, 30, may_begin=False))

    assert (expired.request.inference_id, expired.attempt, expired.decided) == ("waits", 0, EXPIRED)
    assert not store.do(queue.decide(expired, result()))
    assert store.do(queue.finish(expired))
    assert store.do(queue.claim(ENDPOINT, 30, may_begin=False)) is None
    assert store.do(queue.extend(running, 10))
    store.clock.step(11)
    late = store.do(claimed(queue))
    assert (late.request.inference_id, late.decided) == ("runs", EXPIRED)
    assert not store.do(queue.decide(running, result()))
    assert store.do(claimed(queue)).request.inference_id == "lives"
    record = store.do(queue.get("waits"))
    assert (record.state, record.outcome) == (AsyncState.EXPIRED, EXPIRED)


def test_a_clock_that_goes_back_delays_nothing_for_long(store: Store, queue: Queue) -> None:
    """After the clock goes back, leases and delays are counted from the new time, so that requests are not stuck."""
    store.do(queue.submit(request("r1")))
    store.do(queue.submit(request("r2")))
    store.do(claimed(queue, 30))
    store.do(queue.retry(store.do(claimed(queue)), 20, "later"))
    store.clock.step(-100_000)
    store.do(queue.submit(request("r3")))

    assert store.do(claimed(queue, 300)).request.inference_id == "r3"
    assert store.do(queue.claim(ENDPOINT, 30)) is None
    store.clock.step(21)
    assert store.do(claimed(queue, 300)).request.inference_id == "r2"
    store.clock.step(10)
    assert store.do(claimed(queue, 300)).request.inference_id == "r1"


def test_the_backlog_is_counted_by_state(store: Store, queue: Queue) -> None:
    """The backlog counts requests by state until they end; its age is that of the oldest waiting or running one."""
    for number in range(5):
        store.do(queue.submit(request(f"r{number}")))
        store.clock.step(1)

    store.do(ended(queue))
    store.do(queue.decide(store.do(claimed(queue)), result()))
    store.do(claimed(queue))

    backlog = Backlog(waiting=2, running=1, decided=1, oldest_age_s=3)
    assert backlog == store.do(queue.backlog(ENDPOINT))
    assert Backlog() == store.do(queue.backlog("other"))


def test_lists_go_by_arrival_page_by_page(store: Store, queue: Queue) -> None:
    """Lists are in order of arrival, in pages, for one state or all, and without bodies."""
    for number in range(7):
        store.do(queue.submit(request(f"r{number}", body=b"secret")))
    store.do(queue.submit(request("elsewhere", endpoint="other")))
    store.do(ended(queue, AsyncOutcome(state=AsyncState.FAILED, reason="no such model", body=b"secret")))
    store.do(claimed(queue))

    def names(**query: Any) -> list[str]:
        return [record.request.inference_id for record in store.do(queue.list(ENDPOINT, **query))]

    assert [f"r{number}" for number in range(7)] == names()
    assert names(limit=3) == ["r0", "r1", "r2"]
    assert names(after="r2", limit=3) == ["r3", "r4", "r5"]
    assert names(after="r5", limit=3) == ["r6"]
    assert names(state=AsyncState.WAITING, limit=2) == ["r2", "r3"]
    assert names(state=AsyncState.WAITING, after="r3") == ["r4", "r5", "r6"]
    assert names(state=AsyncState.RUNNING) == ["r1"]
    assert [f"r{number}" for number in reversed(range(7))] == names(is_newest_first=True)
    assert names(is_newest_first=True, after="r5", limit=3) == ["r4", "r3", "r2"]
    assert names(is_newest_first=True, state=AsyncState.WAITING, after="r3") == ["r2"]
    [failed] = store.do(queue.list(ENDPOINT, state=AsyncState.FAILED))
    assert (failed.request.body, failed.reason, failed.attempts) == (b"", "no such model", 1)
    assert failed.outcome == AsyncOutcome(state=AsyncState.FAILED, reason="no such model")


def test_a_full_queue_refuses_and_takes_again(store: Store) -> None:
    """Each endpoint has limits of requests and of inline bytes; a retry of a stored request still finds it."""
    queue = store.opened(max_pending=3, max_pending_bytes=100)
    first = store.do(queue.submit(request("r1", body=b"x" * 60, invocation_id="call")))

    with pytest.raises(QueueFull, match="max_pending_bytes"):
        store.do(queue.submit(request("r2", body=b"x" * 41)))
    store.do(queue.submit(request("r2", body=b"x" * 40)))
    store.do(queue.submit(request("r3")))
    with pytest.raises(QueueFull, match=r"chat .*max_pending\)") as refused:
        store.do(queue.submit(request("r4")))
    store.do(queue.submit(request("r4", endpoint="other", body=b"x" * 100)))

    assert refused.value.retry_after_s
    assert first == store.do(queue.submit(request("r1", body=b"x" * 60, invocation_id="call")))
    store.do(ended(queue))
    store.do(queue.submit(request("r5", body=b"x" * 60)))
    assert store.do(queue.get("r4")) is not None
    assert store.do(queue.backlog(ENDPOINT)).waiting == 3


def test_what_ended_is_remembered_for_its_time(store: Store) -> None:
    """An ended request is forgotten after its time, which frees its id and invocation; others are never forgotten."""
    queue = store.opened(remember_s=100)
    store.do(queue.submit(request("r1", invocation_id="call")))
    store.do(queue.submit(request("r2")))
    store.do(ended(queue))

    store.clock.step(99)
    assert store.do(queue.forget()) == 0
    store.clock.step(2)
    assert store.do(queue.forget()) == 1

    assert store.do(queue.get("r1")) is None
    assert [record.request.inference_id for record in store.do(queue.list(ENDPOINT))] == ["r2"]
    assert store.clock.now == store.do(queue.submit(request("r1", invocation_id="call"))).received_at


def test_a_forgotten_place_in_the_order_is_not_used_again(store: Store) -> None:
    """A later request arrives after all earlier ones, those that are forgotten included."""
    queue = store.opened(remember_s=100)
    store.do(queue.submit(request("r1")))
    [first] = store.do(queue.list(ENDPOINT))
    store.do(ended(queue))
    store.clock.step(101)
    assert store.do(queue.forget()) == 1

    store.do(queue.submit(request("r2")))

    [second] = store.do(queue.list(ENDPOINT))
    assert second.arrival > first.arrival


def test_of_too_many_ended_the_oldest_are_forgotten(store: Store) -> None:
    """Beyond a limit the oldest ended requests are forgotten, however young they are."""
    queue = store.opened(max_remembered=3)
    for number in range(5):
        store.do(queue.submit(request(f"r{number}")))
        store.do(ended(queue))
        store.clock.step(1)

    assert store.do(queue.forget()) == 2
    assert store.do(queue.forget()) == 0

    assert [record.request.inference_id for record in store.do(queue.list(ENDPOINT))] == ["r2", "r3", "r4"]


def test_a_queue_opened_anew_has_everything(store: Store) -> None:
    """A new queue object on the same store has everything."""
    queue = store.opened()
    for name in ("r1", "r2", "r3"):
        store.do(queue.submit(request(name, body=b"input")))
    store.do(queue.decide(store.do(claimed(queue)), result()))
    running = store.do(claimed(queue))
    store.do(queue.close())

    other = store.opened()

    assert store.do(other.extend(running, 30))
    assert ((claim := store.do(claimed(other))).request.body, claim.request.inference_id) == (b"input", "r3")
    assert ((backlog := store.do(other.backlog(ENDPOINT))).waiting, backlog.running, backlog.decided) == (0, 2, 1)
