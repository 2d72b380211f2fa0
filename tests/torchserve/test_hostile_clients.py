"""Attacks on a fleet of several instances: their answers, and other clients' answers meanwhile."""

import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest
import requests
from websockets.sync.client import connect

from tests.proxy.test_response_sockets import masked
from tests.torchserve.conftest import Fleet, Three
from tests.torchserve.drawings import draw
from tests.torchserve.test_faults import slowed_workers, wait_until_all_serve, worker_pids
from tests.torchserve.test_response_sockets import LONG as NUMBERS
from tests.torchserve.test_response_sockets import address_of, create, num_open
from tests.waiting import wait_until
from torchmoor.wire.response_ids import compaction_id, read_conversation_id, read_file_id, read_response_id

pytestmark = [pytest.mark.slow, pytest.mark.torchserve]
SAMPLED: Any = {
    "model": "llava",
    "messages": [{"role": "user", "content": "hello"}],
    "n": 3,
    "temperature": 1e6,
    "seed": 5,
    "max_tokens": 300,
}


@pytest.fixture
def attacked(three: Three) -> Fleet:
    """Return a fleet of several instances, all of which serve."""
    wait_until_all_serve(three.fleet)
    return three.fleet


@pytest.fixture
def gpt(attacked: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{attacked.runtime}/v1", api_key="any", timeout=120, max_retries=0) as client:
        yield client


def test_other_ids_in_the_place_of_a_compaction_are_no_fault(attacked: Fleet, gpt: openai.OpenAI) -> None:
    """The id of a caller's own response, conversation or file is read as its items, or refused."""
    response = gpt.responses.create(model="llava", input="What is this?", max_output_tokens=2)
    conversation = gpt.conversations.create(items=[{"type": "message", "role": "user", "content": "hello"}])
    file = gpt.files.create(file=draw("circle", "red"), purpose="vision")
    for place in (read_response_id(response.id), read_conversation_id(conversation.id), read_file_id(file.id)):
        compaction = {"type": "compaction", "encrypted_content": compaction_id(place.session_id)}
        given = [compaction, {"role": "user", "content": "hello"}]
        body = {"model": "llava", "input": given, "max_output_tokens": 2}
        assert requests.post(f"{attacked.runtime}/v1/responses", json=body, timeout=90).status_code in (200, 400, 404)


def test_a_flood_of_messages_is_not_read(attacked: Fleet, gpt: openai.OpenAI) -> None:
    """The proxy buffers little of a flood, each instance gets one message at a time, and others are answered."""
    before, memory = num_open(attacked), psutil.Process(attacked.process.pid).memory_info().rss
    message = create("Count", **NUMBERS).encode() + b" " * 60_000
    with slowed_workers(attacked), connect(address_of(attacked), open_timeout=60) as client:
        client.socket.settimeout(5)
        with pytest.raises(TimeoutError):  # all buffers on the way are full
            client.socket.sendall(masked(message) * 2_000)
        assert psutil.Process(attacked.process.pid).memory_info().rss - memory < 32 << 20
        running = [attacked.count("turns", "in_progress") for _ in range(5)]
        assert max(running) <= 1
        wait_until(lambda: attacked.count("turns", "in_progress") == 1, "a turn runs; none did between two of them")
        answer = gpt.responses.create(model="llava", input="What is this?", max_output_tokens=2)
        assert answer.status == "incomplete"
        client.socket.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: num_open(attacked) == before, "the connection is forgotten")
    wait_until(lambda: attacked.count("turns", "in_progress") == 0, "no turn is left")


def test_several_answers_end_with_their_instance(attacked: Fleet, gpt: openai.OpenAI) -> None:
    """A stream of three answers ends with an error, and the request can be repeated."""
    whole = gpt.chat.completions.create(**SAMPLED)
    with slowed_workers(attacked):
        stream = gpt.chat.completions.create(**SAMPLED, stream=True)
        next(stream)
        kill_worker(attacked, busy_instance(attacked))
        with pytest.raises(openai.APIError, match="The answer was broken off"):
            list(stream)

    wait_until_all_serve(attacked)
    assert gpt.chat.completions.create(**SAMPLED).choices == whole.choices


def busy_instance(fleet: Fleet) -> str:
    return str(next(each["name"] for each in fleet.instances() if each["outstanding"]))


def kill_worker(fleet: Fleet, name: str) -> None:
    for pid in worker_pids(fleet.run_dir, name):
        os.kill(pid, signal.SIGKILL)
