"""Wait in tests for the effect of another thread or process: until a condition holds, never for a fixed time."""

import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = 60.0
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
