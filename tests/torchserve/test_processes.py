"""`torchmoor up` with several proxy processes and real TorchServe."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from botocore.exceptions import BotoCoreError

from tests.torchserve.conftest import Fleet, run_fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_faults import processes_below, ready_instances
from tests.torchserve.test_sessions import Chat, open_session
from tests.waiting import wait_until

pytestmark = [pytest.mark.torchserve, pytest.mark.timeout(240)]


def proxies_of(fleet_pid: int) -> list[int]:
    """Return the proxy processes of a fleet."""
    found = []
    for pid in processes_below(Path("torchmoor.run.processes.child")):
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if stat[1] == str(fleet_pid) and stat[0] != "Z":
            found.append(pid)
    return found


def ask_anew(fleet: Fleet, session_id: str) -> str:
    """Send a turn on new connections, again if a process dies or none listens yet."""
    answers: list[str] = []

    def ask() -> bool:
        with suppress(BotoCoreError):
            answers.append(Chat(fleet.client(), session_id).ask("What color is the circle?"))
        return bool(answers)

    wait_until(ask, "a process takes connections")
    return answers[0]


def test_session_outlives_the_process_that_it_was_opened_through(archives: Path, tmp_path: Path) -> None:
    """Any process serves any session, and the instances keep running when processes end."""
    run_dir = tmp_path / "run"
    with run_fleet("--processes", "2", "--instances", "1", run_dir=run_dir, log=tmp_path / "up.log") as fleet:
        sessions = [
            open_session(fleet.client(), image=data_url(draw("circle", "red"))).id  # each on its own connection
            for _ in range(4)
        ]
        before, proxies = set(processes_below(run_dir)), proxies_of(fleet.process.pid)
        assert len(proxies) == 2
        assert all("red" in ask_anew(fleet, session) for session in sessions)

        for proxy in proxies:
            os.kill(proxy, signal.SIGKILL)
            wait_until(lambda: proxy not in proxies_of(fleet.process.pid), "the process has ended")  # noqa: B023
            wait_until(lambda: len(proxies_of(fleet.process.pid)) == 2, "another process is started")
        assert all("red" in ask_anew(fleet, session) for session in sessions)

        assert ready_instances(fleet) == {"llava-0"}
        assert set(processes_below(run_dir)) == before
