"""A process that uses a queue until it ends or is killed, and prints each acknowledgement of the queue.

`race URL`: processes all requests, with leases so short that other processes always take over.
`churn URL NAME`: submits, works and cancels until it is killed.
"""

import asyncio
import itertools
import random
import sys

from tests.unit.torchmoor.async_inference.stores import ENDPOINT, request
from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.queues.queue_url import open_queue
from torchmoor.async_inference.request import AsyncOutcome, AsyncState
from torchmoor.config.async_queue import AsyncQueueSettings


def say(*words: str) -> None:
    """Print one line at once."""
    print(*words, flush=True)


async def work(queue: Queue, lease_s: float) -> None:
    """Process one request as far as possible."""
    claim = await queue.claim(ENDPOINT, lease_s)
    if claim is None:
        return
    name = claim.request.inference_id
    if claim.decided is None:
        staged = f"s3://out/.torchmoor/{name}.{claim.token}"
        if not await queue.decide(claim, AsyncOutcome(state=AsyncState.COMPLETED, staged=staged)):
            return
        say("decided", name, staged)
    if await queue.finish(claim):
        say("finished", name)


async def race(queue: Queue) -> None:
    """Work until no request is left."""
    sys.stdin.readline()  # so that all begin at once
    while (backlog := await queue.backlog(ENDPOINT)).waiting or backlog.running or backlog.decided:
        await work(queue, 0.0005)


async def churn(queue: Queue, name: str) -> None:
    """Submit requests until the process is killed."""
    for number in itertools.count():
        sent = await queue.submit(request(f"{name}-{number}", body=b"x" * random.choice((10, 100_000))))
        say("submitted", sent.inference_id)
        if number % 7 == 0 and await queue.cancel(sent.inference_id) is AsyncState.CANCELLED:
            say("cancelled", sent.inference_id)
        if number % 5:
            await work(queue, 0.05)


async def main(mode: str, url: str, *name: str) -> None:
    """Run the mode of the command line."""
    queue = open_queue(url, AsyncQueueSettings(timeout_s=30))
    say("ready")
    await (race(queue) if mode == "race" else churn(queue, *name))
    await queue.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
