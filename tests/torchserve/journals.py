"""Check fleets whose instances share no disk: their journal is in Valkey or S3."""

import os
import signal
from collections.abc import Callable

from tests.torchserve.conftest import Fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_faults import ask_until_answered
from tests.torchserve.test_sessions import open_session

JOURNAL_URL = "TORCHMOOR_HANDLER_JOURNAL_URL"


def check_fleet(fleet: Fleet, kept: Callable[[str], list[str]], when_open: list[str], when_closed: list[str]) -> None:
    """Check a fleet. kept: returns a session's journal entries by its id."""
    chat = open_session(fleet.client(), image=data_url(draw("circle", "red")))
    (victim,) = fleet.holders(chat.id)
    chat.ask("What color is the circle?")
    assert kept(chat.id) == when_open

    os.kill(int((fleet.run_dir / victim / "tmp" / ".model_server.pid").read_text()), signal.SIGKILL)

    assert "red" in ask_until_answered(chat, "What color is the circle?")
    chat.close()
    assert kept(chat.id) == when_closed
