"""The share of a queue that one caller may have pending, on every store."""

import pytest

from tests.unit.torchmoor.async_inference.stores import ENDPOINT, Store, claimed, ended, request, result
from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.request import AsyncOutcome, AsyncState, CallerShare
from torchmoor.errors import CallerLimited


def test_a_caller_at_its_share_is_refused_until_one_of_its_requests_ends(store: Store, queue: Queue) -> None:
    """The share counts requests and bytes over all endpoints and processes.

    A retry of a stored request still finds it.
    """
    alice, bob = CallerShare("alice", 2, 150), CallerShare("bob", 2, 150)
    first = store.do(queue.submit(request("r1", body=b"x" * 60, invocation_id="call"), share=alice))

    with pytest.raises(CallerLimited, match=r"151 bytes .* callers\.max_async_bytes is 150") as refused:
        store.do(queue.submit(request("r2", body=b"x" * 91), share=alice))
    assert refused.value.retry_after_s == 30
    store.do(queue.submit(request("r2", endpoint="other"), share=alice))
    another = store.opened()
    with pytest.raises(CallerLimited, match=r"2 asynchronous requests pending, and callers\.max_async_requests is 2"):
        store.do(another.submit(request("r3"), share=alice))
    store.do(another.submit(request("r3", body=b"x" * 150), share=bob))
    store.do(another.submit(request("r4")))

    assert store.do(queue.submit(request("r1", body=b"x" * 60, invocation_id="call"), share=alice)) == first
    assert store.do(ended(another)).request == first
    store.do(queue.submit(request("r5", body=b"x" * 150), share=alice))
    with pytest.raises(CallerLimited):
        store.do(queue.submit(request("r6"), share=alice))


@pytest.mark.parametrize("end", ["cancelled", "expired", "failed", "finished twice"])
def test_every_end_gives_a_callers_share_back_once(store: Store, queue: Queue, end: str) -> None:
    share = CallerShare("alice", 1, 1000)
    store.do(queue.submit(request("r1", ttl_s=60.0), share=share))
    if end == "cancelled":
        store.do(queue.cancel("r1"))
    elif end == "expired":
        store.clock.step(61)
    if end in ("cancelled", "expired"):
        claim = store.do(queue.claim(ENDPOINT, 30, may_begin=False))
        assert claim is not None
    else:
        claim = store.do(claimed(queue))
        failure = AsyncOutcome(state=AsyncState.FAILED, reason="no such model")
        assert store.do(queue.decide(claim, failure if end == "failed" else result()))
    with pytest.raises(CallerLimited):
        store.do(queue.submit(request("r2"), share=share))

    assert store.do(queue.finish(claim))
    if end == "finished twice":
        assert store.do(queue.finish(claim))
    store.clock.step(100_000)
    store.do(queue.forget())
    store.do(queue.submit(request("r2"), share=share))
    with pytest.raises(CallerLimited):
        store.do(queue.submit(request("r3"), share=share))
