"""The guard: however the launcher ends, nothing of its instance remains."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import is_running
from tests.unit.torchmoor.fleet import stub_torchserve
from tests.waiting import DEADLINE_S, wait_until
from torchmoor.fleet import instance_guard


@dataclass
class Layout:
    """An instance's folder below the launcher's, as created by `prepare`."""

    folder: Path
    report: Path

    @property
    def pid_file(self) -> Path:
        return self.folder / "tmp" / ".model_server.pid"

    def command(self, mode: str = "heed", grace_s: float = 5.0) -> list[str]:
        return [
            *(sys.executable, "-I", instance_guard.__file__, str(self.folder), str(self.pid_file), str(grace_s)),
            *(sys.executable, stub_torchserve.__file__, mode, str(self.pid_file), str(self.report)),
        ]

    def wait_for_pids(self) -> list[int]:
        """Wait for wrapper, JVM and worker to run; return their pids."""
        wait_until(self.report.exists, "the instance runs")
        return [int(pid) for pid in self.report.read_text().split()]


@pytest.fixture
def layout(tmp_path: Path) -> Iterator[Layout]:
    """Yield an instance's folders; at the end none of its processes may run."""
    made = Layout(tmp_path / "run" / "llava-0", tmp_path / "report")
    (made.folder / "tmp").mkdir(parents=True)
    yield made
    left = [pid for pid in made.wait_for_pids() if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "the test left processes behind"


def start_guard(layout: Layout, mode: str = "heed", grace_s: float = 5.0) -> subprocess.Popen[bytes]:
    return subprocess.Popen(layout.command(mode, grace_s), stdin=subprocess.PIPE, start_new_session=True)


def ignored_by(pid: int) -> set[int]:
    """Return the signals that the process ignores."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn:")]
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def close_and_wait(process: subprocess.Popen[bytes]) -> int:
    process.stdin.close()
    return process.wait(DEADLINE_S)


def test_a_closed_pipe_stops_everything_and_removes_the_folders(layout: Layout) -> None:
    """Closing the launcher's pipe ends all processes and removes the instance's sockets and folders."""
    process = start_guard(layout)
    pids = layout.wait_for_pids()

    status = close_and_wait(process)

    assert status == 0
    wait_until(lambda: not any(map(is_running, pids)), "nothing runs")
    assert not layout.folder.parent.exists()


def test_the_folder_of_another_instance_is_not_touched(layout: Layout) -> None:
    """A stopping instance leaves other instances' folders unchanged."""
    other = layout.folder.parent / "llava-1"
    other.mkdir()
    process = start_guard(layout)
    layout.wait_for_pids()

    close_and_wait(process)

    assert not layout.folder.exists()
    assert other.is_dir()


def test_a_jvm_that_ignores_sigterm_is_killed_after_the_grace(layout: Layout) -> None:
    process = start_guard(layout, mode="ignore", grace_s=0.5)
    pids = layout.wait_for_pids()

    close_and_wait(process)

    wait_until(lambda: not any(map(is_running, pids)), "nothing runs")


def test_a_launcher_that_is_killed_takes_its_instance_along(layout: Layout) -> None:
    """After SIGKILL to `torchmoor up`, only asynchronous requests' files, created resources and session keys remain."""
    run_dir = layout.folder.parent
    for name in (instance_guard.JOURNAL_FOLDER, instance_guard.ASYNC_FOLDER, instance_guard.MODELS_FOLDER):
        (run_dir / name).mkdir(parents=True)
    (run_dir / instance_guard.SESSION_KEYS_FILE).touch()  # of an earlier fleet
    kept = {instance_guard.ASYNC_FOLDER, instance_guard.SESSION_KEYS_FILE, instance_guard.CONTROL_FOLDER}
    code = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE); time.sleep(60)"
    launcher = subprocess.Popen([sys.executable, "-c", code, *layout.command()])
    pids = layout.wait_for_pids()

    launcher.kill()
    launcher.wait()

    wait_until(lambda: not any(map(is_running, pids)), "nothing runs")
    wait_until(lambda: {path.name for path in run_dir.iterdir()} == kept, "the folders are gone")
    wait_until(lambda: not (run_dir / instance_guard.MODELS_FOLDER).exists(), "and downloaded models")


def test_signals_that_reach_the_whole_terminal_are_the_launchers_business(layout: Layout) -> None:
    """The guard ignores signals to the whole terminal, so that the proxy can finish running requests first."""
    process = start_guard(layout)
    pids = layout.wait_for_pids()

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    assert ignored_by(process.pid).issuperset(signals)
    for number in signals:
        os.kill(process.pid, number)

    assert process.poll() is None
    assert all(map(is_running, pids))
    assert close_and_wait(process) == 0


def test_a_jvm_that_dies_ends_the_supervisor_with_its_worker_and_leaves_the_logs(layout: Layout) -> None:
    """The guard ends with its JVM, so that the launcher learns of it; the worker ends, and the logs stay."""
    log = layout.folder / "torchserve.log"
    log.write_text("why")
    process = start_guard(layout)
    pids = layout.wait_for_pids()

    os.kill(pids[1], signal.SIGKILL)
    status = process.wait(DEADLINE_S)

    assert status != 0
    wait_until(lambda: not any(map(is_running, pids)), "nothing runs")
    assert log.read_text() == "why"
    process.stdin.close()
