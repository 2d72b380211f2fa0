"""Queues of every kind under a clock that the test sets, for code that does not await."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.queues.queue_url import open_queue
from torchmoor.async_inference.request import AsyncOutcome, AsyncRequest, AsyncState, Claim
from torchmoor.config.async_queue import AsyncQueueSettings

Result = TypeVar("Result")
ENDPOINT = "chat"


class Clock:
    """Epoch seconds that only the test moves, in both directions."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now

    def step(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Store:
    """A place for requests; each `opened` queue is another process's view of it."""

    url: str
    make: Callable[[AsyncQueueSettings, Clock], Queue]
    clock: Clock = field(default_factory=Clock)
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)
    queues: list[Queue] = field(default_factory=list)

    def opened(self, **limits: Any) -> Queue:
        """Open a queue under the test's clock."""
        return self._keep(self.make(AsyncQueueSettings(**limits), self.clock))

    def opened_by_url(self, **limits: Any) -> Queue:
        """Open a queue as a proxy does, under the real clock."""
        return self._keep(open_queue(self.url, AsyncQueueSettings(**limits)))

    def do(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run an operation and return its result."""
        return self.runner.run(work)

    def _keep(self, queue: Queue) -> Queue:
        self.queues.append(queue)
        return queue

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *error: object) -> None:
        for queue in self.queues:
            self.do(queue.close())
        self.runner.close()


def request(inference_id: str, **values: Any) -> AsyncRequest:
    """Return a request with an object as input, unless a body is given."""
    source = {} if "body" in values else {"input_location": "s3://in/put"}
    locations = {"output_location": f"s3://out/{inference_id}.out", "failure_location": f"s3://out/{inference_id}.err"}
    return AsyncRequest(**{"inference_id": inference_id, "endpoint": ENDPOINT} | locations | source | values)


def result(body: bytes = b"answer") -> AsyncOutcome:
    """Return a small result."""
    return AsyncOutcome(state=AsyncState.COMPLETED, content_type="text/plain", body=body)


async def claimed(queue: Queue, lease_s: float = 30.0) -> Claim:
    """Claim the next request, which must exist."""
    claim = await queue.claim(ENDPOINT, lease_s)
    assert claim is not None
    return claim


async def ended(queue: Queue, outcome: AsyncOutcome | None = None) -> Claim:
    """Claim the next request and finish it."""
    claim = await claimed(queue)
    assert await queue.decide(claim, outcome or result())
    assert await queue.finish(claim)
    return claim
