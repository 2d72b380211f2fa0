"""Random histories of one session on two workers: both know the same conversation and the same waiting images."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from handlers.journal.url import open_journal
from handlers.settings.journal import JournalSettings
from tests.torchserve.drawings import draw_image
from tests.unit.handlers.conftest import Client, Exchange, ServiceFactory
from tests.unit.handlers.test_chat_service import Hold, data_url
from tests.waiting import wait_until

SEEDS = range(int(os.environ.get("RANDOM_HISTORIES", "4")))
NUM_ACTIONS = 14


def read_state(client: Client, session_id: str) -> dict[str, Any]:
    """Return what a worker knows of a session that no request uses, after it has read the journal."""
    body = {"type": "branch_session", "session_id": session_id, "turns": 1000}
    assert client.call(body).status == 400  # too many turns; the worker has the session now
    session = client.session(session_id)
    state: dict[str, Any] = {}

    def read() -> bool:
        with session.recording:
            if session.is_busy:
                return False
            client.service.recorder.catch_up(session)
            state.update(
                messages=session.messages,
                images=[image.digest for image in session.images],
                waiting=[image.digest for image in session.pending_images],
                entries=session.entries,
                chars=session.num_chars,
                events=session.num_events,
            )
        return True

    wait_until(read, "the requests whose clients have left have ended")
    return state


@pytest.fixture
def clients(make_client: ServiceFactory, tmp_path: Path) -> list[Client]:
    """Return two workers with one journal."""
    settings = JournalSettings(url=tmp_path.as_uri())
    return [make_client(instance=f"llava-{i}", journal=open_journal(settings, {"k0": b"k" * 32})) for i in range(2)]


def test_an_image_added_again_while_its_question_runs_is_that_questions(
    make_client: ServiceFactory, endless_llava: Any, red: Image.Image, tmp_path: Path
) -> None:
    """Both workers assign a repeated image to the running question, although the journal does not name it."""
    settings, keys = JournalSettings(url=tmp_path.as_uri()), {"k0": b"k" * 32}
    first = make_client(endless_llava, "llava-0", open_journal(settings, keys))
    second = make_client(endless_llava, "llava-1", open_journal(settings, keys))
    session_id, hold = first.open(), Hold(endless_llava)

    asked = first.ask(session_id, "what is it?", images=[data_url(red)], parameters={"max_new_tokens": 2})
    hold.wait()
    added = first.call({"type": "add_images", "session_id": session_id, "images": [data_url(red)]})
    hold.release()

    assert (added.status, asked.wait().status) == (200, 200)
    states = [read_state(each, session_id) for each in (first, second)]
    assert states[0] == states[1]
    assert (len(states[0]["images"]), states[0]["waiting"]) == (1, [])


def act(
    rng: random.Random, client: Client, session_id: str, running: list[Exchange], number: int, pictures: list[str]
) -> None:
    """Ask, add images, cancel a request or wait for one."""
    action = rng.choice(["ask", "ask", "add", "add", "cancel", "wait", "wait"])
    images = [rng.choice(pictures) for _ in range(rng.choice([0, 1, 1, 2]))]
    named, given = {"amz-sdk-invocation-id": f"request-{number}"}, {"images": images} if images else {}
    if action == "ask":
        length = {"max_new_tokens": rng.choice([1, 3, 8])}
        running.append(client.ask(session_id, "what is it?", headers=named, parameters=length, **given))
    elif action == "add" and images:
        running.append(client.send({"type": "add_images", "session_id": session_id, **given}, named))
    elif action == "cancel" and running:
        rng.choice(running).reply.cancel()
    elif action == "wait" and running:
        running.pop(rng.randrange(len(running))).wait()


@pytest.mark.parametrize("seed", SEEDS)
def test_workers_agree(clients: list[Client], seed: int) -> None:
    """Two workers agree on questions with and without images, images added meanwhile, and clients that disconnect."""
    rng = random.Random(seed)
    pictures = [data_url(draw_image("ellipse", "red")), data_url(draw_image("rectangle", "blue"))]
    session_id = clients[0].open(*rng.sample(pictures, rng.choice([0, 1])))
    running: list[Exchange] = []

    for number in range(NUM_ACTIONS):
        act(rng, rng.choice(clients), session_id, running, number, pictures)
    for each in running:
        each.wait()

    first, second = (read_state(client, session_id) for client in clients)
    while first["events"] != second["events"]:  # of requests whose clients have left
        first, second = (read_state(client, session_id) for client in clients)
    assert first == second
