"""A thousand conversations at once in one worker with memory for a few: none is lost, all answers are right."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from threading import local
from typing import Any

import pytest
import requests

from tests.torchserve.conftest import Fleet, run_fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_faults import PATIENTLY, processes_below
from tests.waiting import wait_until

pytestmark = pytest.mark.torchserve
NUM_CLIENTS = 16
KV_BYTES = 24 << 20  # 244 blocks of the demo model: twelve turns at once, or the caches of some sixty sessions
SUBJECTS = list(product(("circle", "square", "triangle"), ("red", "blue", "green", "yellow"), ((320, 240), (200, 200))))


class Caller:
    """A client of the proxy with a connection per thread."""

    def __init__(self, fleet: Fleet) -> None:
        self._url = f"{fleet.runtime}/invocations"
        self._threads = local()

    def post(self, body: dict[str, Any], session_id: str) -> requests.Response:
        if not hasattr(self._threads, "session"):
            self._threads.session = requests.Session()
        headers = {"X-Amzn-SageMaker-Session-Id": session_id}
        answer: requests.Response = self._threads.session.post(self._url, json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer

    def open(self, picture: str) -> str:
        return str(self.post({"type": "start_session", "image": picture}, "NEW_SESSION").json()["session_id"])

    def ask(self, session_id: str, subject: int) -> str:
        """Ask a question with a known answer; return the tier that served it."""
        shape, colour, _ = SUBJECTS[subject]
        answer = self.post({"type": "send_text_prompt", "prompt_text": f"What color is the {shape}?"}, session_id)
        assert colour in answer.json()["response_text"], (shape, colour, answer.text)
        return answer.headers["X-Torchmoor-Cache-Tier"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("small") / "run"


@pytest.fixture(scope="module")
def small_fleet(archives: Path, run_dir: Path) -> Iterator[Fleet]:
    """Run one instance with little memory for keys and values."""
    environment = {
        "TORCHMOOR_HANDLER_SESSION_KV_BYTES": str(KV_BYTES),
        "TORCHMOOR_HANDLER_SESSION_FEATURES_BYTES": str(1 << 19),  # of 13 pictures
    }
    log = run_dir.with_name("up.log")
    with run_fleet("--instances", "1", run_dir=run_dir, log=log, environment=environment) as fleet:
        yield fleet


@pytest.mark.parametrize("num_sessions", [200, pytest.param(1000, marks=pytest.mark.long)])
def test_many_sessions_are_open_at_once_and_all_answer_rightly(small_fleet: Fleet, num_sessions: int) -> None:
    """Each session answers about its picture, also after its cache or its picture's features were evicted."""
    caller = Caller(small_fleet)
    before = small_fleet.status("llava-0")
    pictures = [data_url(draw(*subject)) for subject in SUBJECTS]
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        subjects = [i % len(SUBJECTS) for i in range(num_sessions)]
        ids = list(clients.map(lambda subject: caller.open(pictures[subject]), subjects))
        open_sessions = small_fleet.status("llava-0")["sessions"]["open"]
        assert open_sessions - before["sessions"]["open"] == len(set(ids)) == num_sessions

        list(clients.map(caller.ask, ids, subjects))
        again = random.Random(0).sample(range(num_sessions), num_sessions // 4)
        tiers = list(clients.map(lambda i: caller.ask(ids[i], subjects[i]), again))

    status = small_fleet.status("llava-0")
    assert status["sessions"]["open"] == open_sessions
    assert status["turns"]["finished"] - before["turns"]["finished"] == num_sessions + len(again)
    assert status["turns"]["failed"] == 0
    assert status["memory"]["kv_evicted"] - before["memory"]["kv_evicted"] > num_sessions // 2
    assert status["memory"]["kv_bytes"] <= KV_BYTES
    assert status["images"]["demoted"] > before["images"]["demoted"]
    assert len(set(tiers) & {"features", "encoded"}) > 0, tiers


def test_up_killed_with_9_takes_its_instances_along(small_fleet: Fleet, run_dir: Path) -> None:
    """A supervisor killed with kill -9 leaves no TorchServe process; only the files of asynchronous requests remain.

    It is the last to use the fleet.
    """
    assert processes_below(run_dir)

    small_fleet.process.kill()
    small_fleet.process.wait(timeout=60)

    wait_until(lambda: not processes_below(run_dir), "the fleet's processes are gone", **PATIENTLY)
    assert [path.name for path in run_dir.iterdir()] == ["async"]
