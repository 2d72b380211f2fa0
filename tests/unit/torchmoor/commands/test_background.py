"""`torchmoor up -d` until the fleet is ready, and fleets whose terminal is closed."""

import errno
import fcntl
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from tests.processes import children_of
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


@contextmanager
def waiting_fleet(run_dir: Path, *more: str, stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """Yield the command `up`, whose fleet waits in the context for an earlier one to end."""
    run_dir.mkdir()
    options = ("--port", "0", "--admin-port", "0", "--min-instances", "0", "--run-dir", str(run_dir), *more)
    with (run_dir / LOCK_FILE).open("wb") as earlier:
        fcntl.flock(earlier, fcntl.LOCK_EX)
        as_in_a_terminal = ("env", "--default-signal=HUP")  # although the tests may run under nohup
        started = [*as_in_a_terminal, sys.executable, "-m", "torchmoor", "up", *options]
        command = subprocess.Popen(started, stdout=stdout, stderr=subprocess.PIPE, text=True)
        assert "waiting for the earlier fleet" in command.stderr.readline()
        yield command


def stop_fleet() -> None:
    stopped = [sys.executable, "-m", "torchmoor", "stop"]
    assert subprocess.run(stopped, capture_output=True, text=True, timeout=60).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_fleet_serves_although_its_command_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """A terminal that is closed during the start, which may take minutes, does not end the fleet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with waiting_fleet(tmp_path / "run", "-d") as command, command:
        command.send_signal(number)
        command.wait(60)

    wait_until(lambda: len(running_fleets()) == 1, "the fleet is recorded")
    [log] = (tmp_path / "torchmoor").glob("*.log")
    wait_until(lambda: "dashboard: " in log.read_text(), "the fleet serves")
    stop_fleet()
    assert log.read_text().endswith("torchmoor: stopping\n")


def test_fleet_in_the_foreground_serves_although_its_terminal_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line of JSON is lost. A terminal that is closed later does not end the fleet either."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    window, terminal = pty.openpty()
    with waiting_fleet(tmp_path / "run", stdout=terminal) as command:
        os.close(terminal)
        os.close(window)
        command.send_signal(signal.SIGHUP)

    with command:
        assert any("dashboard: " in line for line in command.stderr)
        stop_fleet()
        assert (command.wait(60), command.stderr.read()) == (0, "torchmoor: stopping\n")


def test_fleet_that_is_killed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet that is killed, as by a lack of memory, writes no error itself."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with waiting_fleet(tmp_path / "run", "-d") as command, command:
        [fleet] = children_of(command.pid)
        os.kill(fleet, signal.SIGKILL)
        _, said = command.communicate(timeout=60)

    [log] = (tmp_path / "torchmoor").glob("*.log")
    assert command.returncode == 1
    assert said.endswith(f"Error: the fleet was killed by SIGKILL while it started; its log: {log}\n")


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


def test_logs_are_removed_on_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre and NFS may have none. The newest logs are kept."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(background.fcntl, "flock", refuse)
    seconds = count()
    monkeypatch.setattr(background.time, "strftime", lambda form: f"20260101T{next(seconds):06}")
    made = [background.make_log() for _ in range(background.NUM_LOGS + 2)]
    for _, descriptor in made:
        os.close(descriptor)

    kept = sorted((tmp_path / "torchmoor").iterdir())
    assert kept == [log for log, _ in made[-background.NUM_LOGS :]]
