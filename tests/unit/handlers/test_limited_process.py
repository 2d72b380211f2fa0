"""Limited processes whose limits are reached just when a request has been answered."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from handlers.worker import limited_process
from handlers.worker.limited_process import LimitedProcess

TEMPLATE = {"compiled": "{{ messages }}"}
# Prints where the time limit is set and removed, on the same pipe as the answers.
TRACED = """
import os, signal, sys
from handlers.worker import limited_child
signal.setitimer = lambda kind, seconds: os.write(2, f"limit {seconds:g}\\n".encode())
limited_child.WORK["echo"] = lambda: lambda request: request
limited_child.main()
"""


@pytest.fixture
def templates() -> Iterator[LimitedProcess]:
    process = LimitedProcess("template", cpu_s=20.0, memory_bytes=1 << 30)
    yield process
    process.stop()


def test_a_deadline_that_meets_the_answer_does_not_fail_the_next_request(
    templates: LimitedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may be killed after its answer; the next request gets another process."""

    class MeetsTheAnswer(threading.Timer):
        """Kills in the moment in which it is cancelled."""

        def __init__(self, interval: float, function: Callable[[], None]) -> None:
            super().__init__(interval, lambda: None)
            self._kill = function

        def cancel(self) -> None:
            super().cancel()
            self._kill()

    with monkeypatch.context() as patched:
        patched.setattr(limited_process.threading, "Timer", MeetsTheAnswer)
        assert templates.ask(TEMPLATE) == {"text": ""}

    assert templates.ask(TEMPLATE) == {"text": ""}


def test_the_time_limit_ends_before_the_answer() -> None:
    """A signal after the answer would end the process during the next request."""
    requests = "".join(json.dumps({"number": number}) + "\n" for number in range(2))

    ran = subprocess.run(
        [sys.executable, "-c", TRACED, "echo", "5", str(1 << 30)],
        input=requests.encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=True,
    )

    assert ran.stdout.decode().splitlines() == [
        "ready",
        *("limit 5", "limit 0", '{"number": 0}'),
        *("limit 5", "limit 0", '{"number": 1}'),
    ]
