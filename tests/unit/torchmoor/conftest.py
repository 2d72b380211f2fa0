"""Run tests that are coroutine functions."""

import asyncio
import inspect

import pytest

from tests.unit.torchmoor.movable_loop import MovableLoop
from tests.waiting import DEADLINE_S


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an asynchronous test on an event loop of its own; the test must leave no task."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}

    async def bounded() -> None:
        async with asyncio.timeout(2 * DEADLINE_S):
            await test(**arguments)
        left = [task.get_coro() for task in asyncio.all_tasks() - {asyncio.current_task()}]
        assert not left, f"{len(left)} tasks are left, such as {left[0]}"

    with asyncio.Runner(loop_factory=MovableLoop) as runner:
        runner.run(bounded())
    return True
