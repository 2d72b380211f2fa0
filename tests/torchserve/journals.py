"""Check fleets whose instances share no disk: their journal is in Valkey or S3."""

import os
import random
import signal
from collections.abc import Callable

from tests.torchserve.conftest import Fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_faults import ask_until_answered, find_jvm
from tests.torchserve.test_sessions import Chat, open_session

JOURNAL_URL = "TORCHMOOR_HANDLER_JOURNAL_URL"
MAX_SESSIONS = 8  # of a worker, in fleets that forget sessions
COLOURS = ("red", "blue", "green", "yellow")


def check_fleet(fleet: Fleet, kept: Callable[[str], list[str]], when_open: list[str], when_closed: list[str]) -> None:
    """Check a fleet. kept: returns a session's journal entries by its id."""
    chat = open_session(fleet.client(), image=data_url(draw("circle", "red")))
    (victim,) = fleet.holders(chat.id)
    chat.ask("What color is the circle?")
    assert kept(chat.id) == when_open

    os.kill(find_jvm(fleet.run_dir, victim), signal.SIGKILL)

    assert "red" in ask_until_answered(chat, "What color is the circle?")
    chat.close()
    assert kept(chat.id) == when_closed


def check_forgotten(fleet: Fleet, num_sessions: int) -> None:
    """Open more sessions than the workers hold, close none, and ask each one, on connections of their own."""
    names = [instance["name"] for instance in fleet.instances()]
    before = sum(fleet.status(name)["sessions"]["evicted"] for name in names)
    colours = [COLOURS[number % len(COLOURS)] for number in range(num_sessions)]
    ids = [open_session(fleet.client(), image=data_url(draw("circle", colour))).id for colour in colours]
    sessions = list(zip(ids, colours, strict=True))
    random.Random(0).shuffle(sessions)

    for session_id, colour in sessions:
        assert Chat(fleet.client(), session_id).ask("What color is the circle?") == f"The circle is {colour}."

    evicted = sum(fleet.status(name)["sessions"]["evicted"] for name in names) - before
    assert evicted >= num_sessions - MAX_SESSIONS * len(names)
