"""How tests wait for what another thread or process does: until it is so, never for a time."""

import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = 60.0


def wait_until(
    condition: Callable[[], Any], what: str, *, deadline_s: float = DEADLINE_S, interval_s: float = 0.01
) -> None:
    """Look until it is true; fails the test with what never came."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {deadline_s:.0f} s until {what}"
        time.sleep(interval_s)
