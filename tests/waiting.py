"""Wait in tests for the effect of another thread or process: until a condition holds, never for a fixed time."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

# A limit only ends what hangs, so one that suits the slowest machine serves all tests. CI's machines are shared: a run
# has taken three times as long there as on a quiet machine of two cores.
DEADLINE_S = 180.0
PROGRAM_S = 540.0  # for a whole program that a test runs; a test may take 600 s (pyproject.toml)
MAX_PAUSE_S = 0.25


def wait_until(
    condition: Callable[[], Any], what: str, *, deadline_s: float = DEADLINE_S, interval_s: float = 0.01
) -> None:
    """Poll until a condition is true; fail the test with a description of the condition.

    The pauses grow to a tenth of the time that has passed: a condition that asks a fleet often would slow down what it
    waits for.
    """
    started = time.monotonic()
    while not condition():
        waited = time.monotonic() - started
        assert waited < deadline_s, f"waited {deadline_s:.0f} s until {what}"
        time.sleep(max(interval_s, min(waited / 10, MAX_PAUSE_S)))


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until a condition holds; the test's time-out ends what hangs."""
    while not condition():  # noqa: ASYNC110  (no event tells of it)
        await asyncio.sleep(0.01)
