"""A fleet whose worker and then all processes are killed, and which starts again in the same place, loses nothing."""

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.torchserve.conftest import Fleet, run_fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_async import PATIENTLY, path_of, question, state_of, submit, until_there
from tests.torchserve.test_faults import worker_pids
from tests.torchserve.test_sessions import Chat, open_session
from tests.waiting import wait_until

pytestmark = [pytest.mark.torchserve, pytest.mark.timeout(240)]
COLORS = ("red", "green", "blue")
NUM_REQUESTS = 100


@dataclass(frozen=True)
class Restarted:
    """The second fleet, and the first one's requests."""

    fleet: Fleet
    folder: Path
    answers: list[dict[str, Any]]  # to asynchronous requests
    colors: list[str]  # the expected answer of each
    session_id: str


@pytest.fixture(scope="module")
def restarted(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restarted]:
    """Kill a fleet and start another in the same directory, with the same journal and keys.

    kill -9 hits TorchServe's worker, then `torchmoor up`, during asynchronous requests and a session.
    """
    rng, folder = random.Random(6), tmp_path_factory.mktemp("killed")
    run_dir, answers, colors = folder / "run", [], []
    arguments = ("--instances", "1", "--journal", (folder / "journal").as_uri())
    environment = {"TORCHMOOR_SESSION_KEYS": "k1:" + "5a" * 32}

    with run_fleet(*arguments, run_dir=run_dir, log=folder / "first.log", environment=environment) as fleet:
        chat = open_session(fleet.client(), image=data_url(draw("circle", "red")))
        chat.ask("What color is the circle?")
        for _ in range(NUM_REQUESTS):
            colors.append(rng.choice(COLORS))
            answers.append(submit(fleet, Body=question(colors[-1])))
        wait_until_some(answers, 0.2)
        workers = worker_pids(run_dir, "llava-0")
        assert workers
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        wait_until_some(answers, 0.6)
        fleet.process.kill()
        fleet.process.wait(timeout=60)
    with run_fleet(*arguments, run_dir=run_dir, log=folder / "second.log", environment=environment) as fleet:
        yield Restarted(fleet, folder, answers, colors, chat.id)


def wait_until_some(answers: list[dict[str, Any]], fraction: float) -> None:
    """Wait until some of the results exist, but not all."""
    wait_until(
        lambda: sum(path_of(each["OutputLocation"]).exists() for each in answers) >= fraction * len(answers),
        f"{fraction:.0%} of the results are there",
        **PATIENTLY,
    )


def test_every_request_has_its_one_result(restarted: Restarted) -> None:
    """Each request succeeds exactly once, whichever process was killed."""
    for answer, color in zip(restarted.answers, restarted.colors, strict=True):
        assert color in until_there(answer["OutputLocation"])
    ids = [answer["InferenceId"] for answer in restarted.answers]
    wait_until(
        lambda: all(state_of(restarted.fleet, each) == "COMPLETED" for each in ids),
        "all requests have completed",
        **PATIENTLY,
    )

    results = restarted.folder / "run/async/results"
    assert len(list((results / "async-endpoint-outputs/llava").glob("*.out"))) == NUM_REQUESTS
    assert not list((results / "async-endpoint-failures").rglob("*.out"))


def test_sessions_survive_a_restart_of_the_whole_fleet(restarted: Restarted) -> None:
    """With a kept journal and keys, a session continues after the whole fleet was killed and restarted."""
    again = Chat(restarted.fleet.client(), restarted.session_id)

    assert "red" in again.ask("What color is the circle?")

    again.close()
    assert [path.name for path in (restarted.folder / "journal" / again.id).iterdir()] == ["closed"]
