"""A thousand conversations at once in one worker with memory for a few: none is lost, all answers are right."""

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from threading import local
from typing import Any

import pytest
import requests

from tests.torchserve.conftest import SMALL_KV_BYTES, Fleet
from tests.torchserve.drawings import data_url, draw

pytestmark = [pytest.mark.slow, pytest.mark.torchserve]
NUM_CLIENTS = 16
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


@pytest.mark.parametrize("num_sessions", [200, pytest.param(1000, marks=pytest.mark.long)])
def test_many_sessions_are_open_at_once_and_all_answer_rightly(small: Fleet, num_sessions: int) -> None:
    """Each session answers about its image, also after its cache or its image's features were evicted."""
    caller = Caller(small)
    before = small.status("llava-0")
    pictures = [data_url(draw(*subject)) for subject in SUBJECTS]
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        subjects = [i % len(SUBJECTS) for i in range(num_sessions)]
        ids = list(clients.map(lambda subject: caller.open(pictures[subject]), subjects))
        open_sessions = small.status("llava-0")["sessions"]["open"]
        assert open_sessions - before["sessions"]["open"] == len(set(ids)) == num_sessions

        list(clients.map(caller.ask, ids, subjects))
        again = random.Random(0).sample(range(num_sessions), num_sessions // 4)
        tiers = list(clients.map(lambda i: caller.ask(ids[i], subjects[i]), again))

    status = small.status("llava-0")
    assert status["sessions"]["open"] == open_sessions
    assert status["turns"]["finished"] - before["turns"]["finished"] == num_sessions + len(again)
    assert status["turns"]["failed"] == 0
    assert status["memory"]["kv_evicted"] - before["memory"]["kv_evicted"] > num_sessions // 2
    assert status["memory"]["kv_bytes"] <= SMALL_KV_BYTES
    assert status["images"]["demoted"] > before["images"]["demoted"]
    assert len(set(tiers) & {"features", "encoded"}) > 0, tiers
