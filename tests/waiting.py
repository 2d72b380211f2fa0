"""Wait in tests for the effect of another thread or process: until a condition holds, never for a fixed time."""

import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = 60.0


def wait_until(
    condition: Callable[[], Any], what: str, *, deadline_s: float = DEADLINE_S, interval_s: float = 0.01
) -> None:
    """Poll until a condition is true; fail the test with a description of the condition."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {deadline_s:.0f} s until {what}"
        time.sleep(interval_s)
