"""A fleet whose worker and then all processes are killed loses nothing when it starts again in the same folder."""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import FileObject
from openai.types.responses import Response

from tests.torchserve.conftest import Fleet, processes_below, run_small
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_async import path_of, question, state_of, submit, until_there
from tests.torchserve.test_faults import worker_pids
from tests.torchserve.test_sessions import Chat, open_session
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.torchserve, pytest.mark.ends_fleet]
COLORS = ("red", "green", "blue")
NUM_REQUESTS = 100
NUM_QUEUED = 5
LONG_QUESTION = "What color is the circle, please, as exactly as you can tell it from the picture that you see? " * 2


@dataclass(frozen=True)
class Restarted:
    """The second fleet, and the first one's requests."""

    fleet: Fleet
    folder: Path
    answers: list[dict[str, Any]]  # to asynchronous requests
    colors: list[str]  # the expected answer of each
    session_id: str
    responses: list[Response]  # a chain
    queued: list[Response]  # in the background
    file: FileObject


@pytest.fixture(scope="module")
def restarted(small: Fleet) -> Iterator[Restarted]:
    """Kill the small fleet and start another in the same directory, with the same journal and keys.

    kill -9 hits TorchServe's worker, then `torchmoor up`, during asynchronous requests and a session.
    """
    rng, folder, answers, colors = random.Random(6), small.run_dir.parent, [], []
    chat = open_session(small.client(), image=data_url(draw("circle", "red")))
    chat.ask(LONG_QUESTION)
    responses = respond(small)
    with openai_client(small) as gpt:
        file = gpt.files.create(file=draw("square", "green"), purpose="vision")
    wait_until(lambda: small.status("llava-0")["stored_kv"]["written"] > 0, "the session's KV cache is written")
    for _ in range(NUM_REQUESTS):
        colors.append(rng.choice(COLORS))
        answers.append(submit(small, Body=question(colors[-1])))
    with openai_client(small) as gpt:
        last = responses[-1].id
        asked: Any = {"model": "llava", "input": "What color is it?", "previous_response_id": last}
        queued = [gpt.responses.create(**asked, background=True) for _ in range(NUM_QUEUED)]
    wait_until_some(answers, 0.2)
    workers = worker_pids(small.run_dir, "llava-0")
    assert workers
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    wait_until_some(answers, 0.6)
    small.process.kill()
    small.process.wait(timeout=60)
    with run_small(folder, "second.log") as fleet:
        yield Restarted(fleet, folder, answers, colors, chat.id, responses, queued, file)


@contextmanager
def openai_client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fleet.runtime}/v1", api_key="any", timeout=90, max_retries=0) as gpt:
        yield gpt


def respond(fleet: Fleet) -> list[Response]:
    """Create a chain of responses about an image."""
    picture = {"type": "input_image", "image_url": data_url(draw("circle", "red")), "detail": "auto"}
    asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": "What color is it?"}, picture]}]
    with openai_client(fleet) as gpt:
        chain = [gpt.responses.create(model="llava", input=asked)]
        for _ in range(3):
            last = chain[-1].id
            chain.append(gpt.responses.create(model="llava", input="What shape is it?", previous_response_id=last))
    return chain


def wait_until_some(answers: list[dict[str, Any]], fraction: float) -> None:
    """Wait until this fraction of the results exists."""
    wait_until(
        lambda: sum(path_of(each["OutputLocation"]).exists() for each in answers) >= fraction * len(answers),
        f"{fraction:.0%} of the results are there",
    )


def test_every_request_has_its_one_result(restarted: Restarted) -> None:
    """Each request succeeds exactly once, whichever process was killed."""
    for answer, color in zip(restarted.answers, restarted.colors, strict=True):
        assert color in until_there(answer["OutputLocation"])
    ids = [answer["InferenceId"] for answer in restarted.answers]
    wait_until(
        lambda: all(state_of(restarted.fleet, each) == "COMPLETED" for each in ids),
        "all requests have completed",
    )

    results = restarted.folder / "run/async/results"
    assert len(list((results / "async-endpoint-outputs/llava").glob("*.out"))) == NUM_REQUESTS
    assert not list((results / "async-endpoint-failures").rglob("*.out"))


def test_sessions_survive_a_restart_of_the_whole_fleet(restarted: Restarted) -> None:
    """With a kept journal and keys, a session continues after the whole fleet was killed and restarted.

    Its KV cache comes from the journal.
    """
    again = Chat(restarted.fleet.client(), restarted.session_id)

    assert "red" in again.ask("What color is the circle?")

    status = restarted.fleet.status("llava-0")
    assert status["tokens"]["restored"] >= 64
    assert status["stored_kv"]["read"] >= 1

    again.close()
    left = {path.name.partition(".")[0] for path in (restarted.folder / "journal" / again.id).iterdir()}
    assert left == {"closed", "owner"}


def test_every_response_survives_a_restart_of_the_whole_fleet(restarted: Restarted) -> None:
    """Responses survive with their image, and the chain continues."""
    with openai_client(restarted.fleet) as gpt:
        assert [gpt.responses.retrieve(each.id) for each in restarted.responses] == restarted.responses
        last = restarted.responses[-1].id
        assert (
            "red"
            in gpt.responses.create(
                model="llava", input="What color is the circle?", previous_response_id=last
            ).output_text
        )


def test_every_response_in_the_background_is_generated_after_a_restart(restarted: Restarted) -> None:
    """Background responses that were acknowledged before the kill were in the queue, and are generated."""
    with openai_client(restarted.fleet) as gpt:
        for each in restarted.queued:
            wait_until(
                lambda each=each: gpt.responses.retrieve(each.id).status == "completed",
                "the response is complete",
            )
            assert "red" in gpt.responses.retrieve(each.id).output_text


def test_every_file_survives_a_restart_of_the_whole_fleet(restarted: Restarted) -> None:
    """Files and their list survive."""
    with openai_client(restarted.fleet) as gpt:
        assert restarted.file in list(gpt.files.list())
        assert gpt.files.content(restarted.file.id).read() == draw("square", "green")


def test_up_killed_with_9_takes_its_instances_along(restarted: Restarted) -> None:
    """`torchmoor up` killed with kill -9 leaves no TorchServe process; only asynchronous requests and results remain.

    It is the last to use the fleet.
    """
    fleet = restarted.fleet
    assert processes_below(fleet.run_dir)

    fleet.process.kill()
    fleet.process.wait(timeout=60)

    wait_until(lambda: not processes_below(fleet.run_dir), "the fleet's processes are gone")
    assert [path.name for path in fleet.run_dir.iterdir()] == ["async"]
