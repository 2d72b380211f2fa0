"""Messages of a fleet that does not start; helpers to find the processes of a fleet."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import requests
from botocore.exceptions import ClientError

from tests.torchserve.conftest import Fleet, processes_below, run_fleet
from tests.torchserve.test_sessions import Chat
from tests.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.torchserve


def ready_instances(fleet: Fleet) -> set[str]:
    return {i["name"] for i in fleet.instances() if i["state"] == "ready"}


def wait_until_all_serve(fleet: Fleet) -> None:
    """Wait until each instance answers by itself and the proxy, whose view may be a second old, sends it requests."""

    def do_all_serve() -> bool:
        instances = fleet.instances()
        try:
            are_answering = all("session_ids" in fleet.status(each["name"]) for each in instances)
        except requests.RequestException:
            return False
        return are_answering and len(ready_instances(fleet)) == len(instances)

    wait_until(do_all_serve, "all instances serve")


def find_jvm(run_dir: Path, instance: str) -> int:
    """Return the process of an instance's TorchServe, which has written its id to a file."""
    return int((run_dir / instance / "tmp" / ".model_server.pid").read_text())


def worker_pids(folder: Path, instance: str) -> list[int]:
    """Return the Python worker processes of an instance."""
    pids = []
    for pid in processes_below(folder):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if b"model_service_worker" in command and f"TORCHMOOR_INSTANCE={instance}".encode() in environment:
            pids.append(pid)
    return pids


@contextmanager
def stopped_worker(folder: Path, instance: str) -> Iterator[None]:
    """Stop the instance's worker by SIGSTOP, and let it go on at the end."""
    workers = worker_pids(folder, instance)
    assert workers
    try:
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)


def processor_time(pid: int) -> float:
    """Return the seconds that a process has computed, from the clock that clock_getcpuclockid(3) names."""
    return time.clock_gettime((~pid << 3) | 2)


@contextmanager
def slowed_process(pid: int) -> Iterator[None]:
    """Let a process compute for 1 part of 26, so that an answer does not end before the test acts.

    On a busy machine this thread wakes late, and the process has run for longer; so the pause follows what it computed.
    """
    ended = threading.Event()

    def slow_down() -> None:
        with suppress(OSError):  # the process has ended
            computed_s = processor_time(pid)
            while not ended.wait(0.002):
                os.kill(pid, signal.SIGSTOP)
                before_s, computed_s = computed_s, processor_time(pid)
                ended.wait(min(max(0.05, 25 * (computed_s - before_s)), 1.0))  # a longer pause looks like a hang
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=slow_down)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def slowed_worker(folder: Path, instance: str) -> Iterator[None]:
    """Slow an instance's worker."""
    (worker,) = worker_pids(folder, instance)
    with slowed_process(worker):
        yield


@contextmanager
def slowed_workers(fleet: Fleet) -> Iterator[None]:
    """Slow all instances of a fleet."""
    with ExitStack() as stack:
        for instance in fleet.instances():
            stack.enter_context(slowed_worker(fleet.run_dir, instance["name"]))
        yield


def ask_until_answered(chat: Chat, question: str) -> str:
    """Ask like a patient client, which retries while the service is unavailable."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return chat.ask(question)
        except ClientError as error:
            if error.response["Error"]["Code"] != "ServiceUnavailable" or time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def test_missing_archive_is_a_clear_error(tmp_path: Path) -> None:
    """Without archives `up` fails and prints how to build them on standard error."""
    (tmp_path / "empty").mkdir()
    log = tmp_path / "up.log"

    with (
        pytest.raises(pytest.fail.Exception),
        run_fleet("--model-store", str(tmp_path / "empty"), run_dir=tmp_path / "run", log=log),
    ):
        pass

    assert "make archives" in log.read_text()


@pytest.mark.slow
def test_a_configuration_that_cannot_be_served_ends_up_with_its_reason(archives: Path, tmp_path: Path) -> None:
    """`torchmoor up` ends with the worker's message instead of retrying forever."""
    log = tmp_path / "up.log"

    with (
        pytest.raises(pytest.fail.Exception),
        run_fleet(run_dir=tmp_path / "run", log=log, environment={"SM_NUM_GPUS": "4"}),
    ):
        pass

    assert "one instance per GPU" in log.read_text()
