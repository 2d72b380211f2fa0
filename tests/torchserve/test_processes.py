"""`torchmoor up` with several proxy processes and a journal in Valkey, so that no disk is shared."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from botocore.exceptions import BotoCoreError
from websockets.sync.client import connect

from tests.processes import children_of
from tests.servers import RedisServer
from tests.torchserve.conftest import Fleet, processes_below, run_fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.journals import JOURNAL_URL, MAX_SESSIONS, check_fleet, check_forgotten
from tests.torchserve.test_faults import ready_instances
from tests.torchserve.test_sessions import Chat, open_session
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.torchserve, pytest.mark.redis]


def proxies_of(fleet_pid: int) -> list[int]:
    """Return the proxy processes of a fleet."""
    return sorted({*processes_below(Path("torchmoor.run.processes"))} & {*children_of(fleet_pid)})


def ask_anew(fleet: Fleet, session_id: str) -> str:
    """Send a turn on new connections, again if a process dies or none listens yet."""
    answers: list[str] = []

    def ask() -> bool:
        with suppress(BotoCoreError):
            answers.append(Chat(fleet.client(), session_id).ask("What color is the circle?"))
        return bool(answers)

    wait_until(ask, "a process takes connections")
    return answers[0]


@pytest.fixture(scope="module")
def two(archives: Path, tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Iterator[Fleet]:
    """Run two proxy processes and two instances; their logs must omit the journal's password."""
    folder = tmp_path_factory.mktemp("two")
    with run_fleet(
        *("--processes", "2", "--instances", "2"),
        run_dir=folder / "run",
        log=folder / "up.log",
        environment={JOURNAL_URL: redis_server.url, "TORCHMOOR_HANDLER_SESSION_MAX_SESSIONS": str(MAX_SESSIONS)},
    ) as fleet:
        yield fleet
        logs = [(fleet.run_dir / name / "logs/torchserve.log").read_text() for name in ready_instances(fleet)]
    assert logs
    for form in (redis_server.password, redis_server.url):
        assert not any(form in log for log in (*logs, (folder / "up.log").read_text()))


def test_session_outlives_the_process_that_it_was_opened_through(two: Fleet) -> None:
    """Any process serves any session, and the instances keep running when processes end."""
    sessions = [
        open_session(two.client(), image=data_url(draw("circle", "red"))).id  # each on its own connection
        for _ in range(4)
    ]
    before, proxies = set(processes_below(two.run_dir)), proxies_of(two.process.pid)
    assert len(proxies) == 2
    assert all("red" in ask_anew(two, session) for session in sessions)

    for proxy in proxies:
        os.kill(proxy, signal.SIGKILL)
        wait_until(lambda: proxy not in proxies_of(two.process.pid), "the process has ended")  # noqa: B023
        wait_until(lambda: len(proxies_of(two.process.pid)) == 2, "another process is started")
    assert all("red" in ask_anew(two, session) for session in sessions)

    assert ready_instances(two) == {"llava-0", "llava-1"}
    assert set(processes_below(two.run_dir)) == before


def test_unstored_responses_continue_on_their_connections(two: Fleet) -> None:
    """Each connection belongs to one process; a stored response continues through every other."""
    picture = {"type": "input_image", "image_url": data_url(draw("circle", "red"))}
    text = {"type": "input_text", "text": "What color is the circle?"}
    with ExitStack() as stack:
        address = two.runtime.replace("http", "ws", 1) + "/v1/responses"
        sockets = [stack.enter_context(connect(address, open_timeout=60)) for _ in range(6)]

        def send(number: int, **fields: Any) -> Any:
            sockets[number].send(json.dumps({"type": "response.create", "model": "llava", **fields}))
            while True:
                event = json.loads(sockets[number].recv(timeout=60))
                if event["type"] in ("response.completed", "error"):
                    return event

        asked = [{"role": "user", "content": [text, picture]}]
        ids = [send(number, input=asked, store=False)["response"]["id"] for number in range(6)]
        for number, each in enumerate(ids):
            elsewhere = send((number + 1) % 6, input="And its shape?", previous_response_id=each, store=False)
            assert elsewhere["error"]["code"] == "previous_response_not_found"
        stored = [
            send(number, input="What color is the circle?", previous_response_id=each)["response"]
            for number, each in enumerate(ids)
        ]
        for number, each in enumerate(stored):
            again = send((number + 1) % 6, input="What color is the circle?", previous_response_id=each["id"])
            assert again["response"]["output"][0]["content"] == each["output"][0]["content"]
            assert "red" in str(each["output"])


def test_forgotten_sessions_can_be_asked_again_through_another_proxy(two: Fleet) -> None:
    """Workers that hold few sessions read the others from Valkey, whichever process opened them."""
    check_forgotten(two, 3 * MAX_SESSIONS)


def test_sessions_in_valkey_survive_their_instance(two: Fleet, redis_server: RedisServer) -> None:
    """After kill -9 of a JVM, sessions continue elsewhere, and a closed one is deleted."""

    def kept(session_id: str) -> list[str]:
        with redis_server.client() as client:
            return sorted(key.decode().rpartition(":")[2] for key in client.scan_iter(f"*{session_id}*"))

    check_fleet(two, kept, ["account", "events", "pictures"], ["closed"])


def test_each_process_accepts_responses_in_the_background(two: Fleet) -> None:
    """One process works on the queue; every process answers for all responses. Each request has its own connection."""
    options: Any = {"default_headers": {"Connection": "close"}, "timeout": 60, "max_retries": 0}
    with openai.OpenAI(base_url=f"{two.runtime}/v1", api_key="any", **options) as gpt:
        asked: Any = {"model": "llava", "input": "hello", "background": True}
        ids = [gpt.responses.create(**asked).id for _ in range(6)]
        wait_until(lambda: all(gpt.responses.retrieve(each).status == "completed" for each in ids), "all are complete")
