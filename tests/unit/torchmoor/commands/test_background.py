"""`torchmoor up -d` until the fleet is ready."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from tests.waiting import wait_until
from torchmoor.cli import background

SLOW_FLEET = """
import os, signal, sys
from pathlib import Path
from torchmoor.cli.background import detach
detach()
Path(sys.argv[1]).write_text(str(os.getpid()))
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_fleet_that_is_not_ready(tmp_path: Path, number: signal.Signals) -> None:
    """The fleet of a command that `timeout` or a service manager has ended does not start in the background."""
    noted = tmp_path / "pid"
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    started = [sys.executable, "-c", SLOW_FLEET, noted]
    with subprocess.Popen(started, env=environment, stderr=subprocess.DEVNULL) as command:
        wait_until(lambda: noted.exists() and noted.read_text() != "", "the fleet is being started")
        fleet = int(noted.read_text())

        command.send_signal(number)
        command.wait(60)

    try:
        os.kill(fleet, signal.SIGKILL)
    except ProcessLookupError:
        return
    pytest.fail("the fleet goes on")


def test_logs_of_fleets_that_start_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log is in use from its beginning, before its fleet is ready; of the others, only the newest are kept."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    seconds = count()
    monkeypatch.setattr(background.time, "strftime", lambda form: f"20260101T{next(seconds):06}")
    made = [background.make_log() for _ in range(background.NUM_LOGS + 2)]
    assert all(log.exists() for log, _ in made)

    for _, descriptor in made:
        os.close(descriptor)
    last, descriptor = background.make_log()
    os.close(descriptor)

    kept = [log.name for log, _ in made[-background.NUM_LOGS + 1 :]]
    assert sorted(each.name for each in last.parent.iterdir()) == [*kept, last.name]
