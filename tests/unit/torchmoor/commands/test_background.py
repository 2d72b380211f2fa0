"""`torchmoor up -d` until the fleet is ready."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from tests.waiting import wait_until
from torchmoor.cli import background
from torchmoor.cli.running_fleets import running_fleets
from torchmoor.fleet.instance_guard import LOCK_FILE

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


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_fleet_serves_although_its_command_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """A terminal that is closed during the start, which may take minutes, does not end the fleet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    options = ("--port", "0", "--admin-port", "0", "--min-instances", "0", "--run-dir", str(tmp_path / "run"))
    with (tmp_path / "run" / LOCK_FILE).open("wb") as earlier:
        fcntl.flock(earlier, fcntl.LOCK_EX)
        started = [sys.executable, "-m", "torchmoor", "up", "-d", *options]
        with subprocess.Popen(started, stderr=subprocess.PIPE, text=True) as command:
            assert command.stderr is not None
            assert "waiting for the earlier fleet" in command.stderr.readline()

            command.send_signal(number)
            command.wait(60)

    wait_until(lambda: len(running_fleets()) == 1, "the fleet is recorded")
    [log] = (tmp_path / "torchmoor").glob("*.log")
    wait_until(lambda: "dashboard: " in log.read_text(), "the fleet serves")
    stopped = [sys.executable, "-m", "torchmoor", "stop"]
    assert subprocess.run(stopped, capture_output=True, text=True, timeout=60).returncode == 0
    assert log.read_text().endswith("torchmoor: stopping\n")


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
