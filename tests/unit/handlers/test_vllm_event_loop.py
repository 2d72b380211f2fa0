"""The thread of vLLM's event loop: no caller waits for a result that cannot arrive."""

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from handlers.engine.vllm.event_loop import EventLoopThread
from handlers.errors import InternalError


@pytest.mark.timeout(60)
def test_a_caller_that_waits_is_answered_when_the_loop_stops() -> None:
    """A thread that waits for an image when the worker stops gets an error instead of waiting forever."""
    loop = EventLoopThread()
    began = threading.Event()

    async def wait() -> None:
        began.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as threads:
        waiting: Future[None] = threads.submit(lambda: loop.run(wait()))
        assert began.wait(30)
        loop.stop()

        with pytest.raises(InternalError, match="the worker is stopping"):
            waiting.result(30)


def test_what_was_posted_before_the_stop_runs_and_nothing_is_accepted_after_it() -> None:
    """A cancellation posted before the stop has its effect; later ones are refused."""
    loop = EventLoopThread()
    done: list[int] = []

    async def add(number: int) -> int:
        done.append(number)
        return number

    assert loop.run(add(1)) == 1
    loop.post(lambda: done.append(2))
    loop.stop()

    assert done == [1, 2]
    with pytest.raises(InternalError):
        loop.run(add(3))
    with pytest.raises(InternalError):
        loop.post(lambda: done.append(3))
    assert done == [1, 2]
