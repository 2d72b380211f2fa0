"""What is said of an instance's end."""

from __future__ import annotations

import signal

import pytest

from torchmoor.fleet.instance_end import describe_exit


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "has ended"),
        (3, "has ended with exit status 3"),
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-signal.SIGRTMIN - 1, f"was killed by signal {signal.SIGRTMIN + 1}"),  # one without a name
    ],
)
def test_every_exit_status_is_described(status: int, text: str) -> None:
    """An error would end the task that starts the instance again."""
    assert describe_exit(status) == text
