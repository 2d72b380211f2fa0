"""A thousand conversations at once in one worker whose memory is for a few: none is lost, all answer rightly."""

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

pytestmark = pytest.mark.torchserve
NUM_CLIENTS = 16
KV_BYTES = 24 << 20  # 244 blocks of the demo model: twelve turns at once, or the caches of some sixty sessions
SUBJECTS = list(product(("circle", "square", "triangle"), ("red", "blue", "green", "yellow"), ((320, 240), (200, 200))))


class Caller:
    """Talks to the proxy, with a connection for each thread."""

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
        """A question with a known answer; returns the tier that it was answered from."""
        shape, colour, _ = SUBJECTS[subject]
        answer = self.post({"type": "send_text_prompt", "prompt_text": f"What color is the {shape}?"}, session_id)
        assert colour in answer.json()["response_text"], (shape, colour, answer.text)
        return answer.headers["X-Torchmoor-Cache-Tier"]


@pytest.fixture
def small_fleet(archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """One instance with little memory for keys and values."""
    monkeypatch.setenv("TORCHMOOR_HANDLER_SESSION_KV_BYTES", str(KV_BYTES))
    monkeypatch.setenv("TORCHMOOR_HANDLER_SESSION_FEATURES_BYTES", str(1 << 19))  # of 13 pictures
    with run_fleet("--instances", "1", run_dir=tmp_path / "run", log=tmp_path / "up.log") as fleet:
        yield fleet


@pytest.mark.parametrize("num_sessions", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_sessions_are_open_at_once_and_all_answer_rightly(small_fleet: Fleet, num_sessions: int) -> None:
    """Each is asked about its picture, then a part of them again in any order, when most have lost their caches and
    many pictures their features."""
    caller = Caller(small_fleet)
    pictures = [data_url(draw(*subject)) for subject in SUBJECTS]
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        subjects = [i % len(SUBJECTS) for i in range(num_sessions)]
        ids = list(clients.map(lambda subject: caller.open(pictures[subject]), subjects))
        assert small_fleet.status("llava-0")["sessions"]["open"] == len(set(ids)) == num_sessions

        list(clients.map(caller.ask, ids, subjects))
        again = random.Random(0).sample(range(num_sessions), num_sessions // 4)
        tiers = list(clients.map(lambda i: caller.ask(ids[i], subjects[i]), again))

    status = small_fleet.status("llava-0")
    assert status["sessions"]["open"] == num_sessions
    assert status["turns"]["finished"] == num_sessions + len(again)
    assert status["turns"]["failed"] == 0
    assert status["memory"]["kv_evicted"] > num_sessions // 2
    assert status["memory"]["kv_bytes"] <= KV_BYTES
    assert status["images"]["demoted"] > 0
    assert len(set(tiers) & {"features", "encoded"}) > 0, tiers
