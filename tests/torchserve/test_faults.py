"""A worker dies: what clients see, and that the fleet mends itself."""

import os
import signal
import time
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from tests.torchserve.conftest import Fleet, run_fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_sessions import Chat, open_session
from tests.waiting import wait_until

pytestmark = pytest.mark.torchserve
DEADLINE_S = 90
PATIENTLY = {"deadline_s": DEADLINE_S, "interval_s": 0.2}


def ready_instances(fleet: Fleet) -> set[str]:
    return {i["name"] for i in fleet.instances() if i["state"] == "ready"}


def processes_below(folder: Path) -> list[int]:
    """Every process whose command line or environment names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in text:
                found.append(int(entry.name))
    return found


def worker_pids(folder: Path, instance: str) -> list[int]:
    """The Python worker processes of an instance."""
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


def ask_until_answered(chat: Chat, question: str) -> str:
    """As a patient client does: again while the answer is that the service is unavailable."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return chat.ask(question)
        except ClientError as error:
            if error.response["Error"]["Code"] != "ServiceUnavailable" or time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def test_sessions_survive_the_death_of_their_worker(archives: Path, tmp_path: Path) -> None:
    """kill -9 of a worker: its session goes on elsewhere under the same id and knows what was said; the worker comes
    back under its name and serves the session again; after Ctrl-C no process and no file of the fleet is left."""
    run_dir = tmp_path / "run"
    with run_fleet("--instances", "2", run_dir=run_dir, log=tmp_path / "up.log") as fleet:
        client = fleet.client()
        chats = [open_session(client, image=data_url(draw("circle", "red"))) for _ in range(2)]
        (victim,), (survivor,) = (fleet.holders(chat.id) for chat in chats)
        assert victim != survivor
        chats[0].ask("What color is the circle?")

        for pid in worker_pids(run_dir, victim):
            os.kill(pid, signal.SIGKILL)

        assert "red" in chats[1].ask("What color is the circle?")
        assert "red" in ask_until_answered(chats[0], "What color is the circle?")
        open_session(client, image=data_url(draw("square", "blue"))).close()
        wait_until(lambda: ready_instances(fleet) == {victim, survivor}, "the worker is back", **PATIENTLY)
        assert "red" in ask_until_answered(chats[0], "What color is the circle?")
        again = open_session(client, image=data_url(draw("square", "blue")))
        assert "blue" in again.ask("What color is the square?")

        hung, *_ = fleet.holders(again.id)
        stop_and_go(fleet, run_dir, hung, again)

    assert processes_below(run_dir) == []
    assert not run_dir.exists()


def stop_and_go(fleet: Fleet, run_dir: Path, hung: str, chat: Chat) -> None:
    """SIGSTOP of the Python worker behind a TorchServe that goes on saying it is READY: a turn that is sent there is
    answered elsewhere, once the worker's silence is noticed; after SIGCONT the instance serves again."""
    workers = worker_pids(run_dir, hung)
    assert workers
    try:
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        assert "blue" in chat.ask("What color is the square?")
        wait_until(lambda: hung not in ready_instances(fleet), "the hanging worker is noticed", **PATIENTLY)
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
    wait_until(lambda: hung in ready_instances(fleet), "the worker is back", **PATIENTLY)
    assert "blue" in ask_until_answered(chat, "What color is the square?")


def test_without_a_journal_a_dead_workers_session_is_lost(archives: Path, tmp_path: Path) -> None:
    """Then the next question is told so, as a ValidationError that says what to do, and the fleet goes on."""
    run_dir = tmp_path / "run"
    with run_fleet("--instances", "1", "--journal", "off", run_dir=run_dir, log=tmp_path / "up.log") as fleet:
        chat = open_session(fleet.client(), image=data_url(draw("circle", "red")))

        for pid in worker_pids(run_dir, "llava-0"):
            os.kill(pid, signal.SIGKILL)

        with pytest.raises(ClientError, match=r"ValidationError.*memory is gone"):
            ask_until_answered(chat, "What color is the circle?")
        wait_until(lambda: ready_instances(fleet) == {"llava-0"}, "the worker is back", **PATIENTLY)
        again = open_session(fleet.client(), image=data_url(draw("square", "blue")))
        assert "blue" in again.ask("What color is the square?")


def test_sessions_survive_a_restart_of_the_whole_fleet(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a journal and keys that stay, a session goes on after everything was stopped and started again."""
    monkeypatch.setenv("TORCHMOOR_SESSION_KEYS", "k1:" + "5a" * 32)
    journal = ("--journal", (tmp_path / "journal").as_uri())
    with run_fleet("--instances", "1", *journal, run_dir=tmp_path / "run", log=tmp_path / "up.log") as fleet:
        chat = open_session(fleet.client(), image=data_url(draw("circle", "red")))
        chat.ask("What color is the circle?")

    with run_fleet("--instances", "1", *journal, run_dir=tmp_path / "run", log=tmp_path / "up.log") as fleet:
        again = Chat(fleet.client(), chat.id)
        assert "red" in again.ask("What color is the circle?")
        again.close()

    assert [path.name for path in (tmp_path / "journal" / chat.id).iterdir()] == ["closed"]


def test_up_killed_with_9_takes_its_instances_along(archives: Path, tmp_path: Path) -> None:
    """Even a supervisor that cannot clean up leaves no TorchServe behind; of its files, only asynchronous requests."""
    run_dir = tmp_path / "run"
    with run_fleet("--instances", "1", run_dir=run_dir, log=tmp_path / "up.log") as fleet:
        assert processes_below(run_dir)

        fleet.process.kill()
        fleet.process.wait(timeout=10)

        wait_until(lambda: not processes_below(run_dir), "the fleet's processes are gone", **PATIENTLY)
        assert [path.name for path in run_dir.iterdir()] == ["async"]


def test_missing_archive_is_a_clear_error(tmp_path: Path) -> None:
    """Without archives `up` says how to build them, on standard error, and fails."""
    (tmp_path / "empty").mkdir()
    log = tmp_path / "up.log"

    with (
        pytest.raises(pytest.fail.Exception),
        run_fleet("--model-store", str(tmp_path / "empty"), run_dir=tmp_path / "run", log=log),
    ):
        pass

    assert "make archives" in log.read_text()
