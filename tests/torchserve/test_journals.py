"""Instances without a shared disk: a fleet whose journal is in Valkey. For S3 see test_s3.py."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.servers import RedisServer
from tests.torchserve.conftest import Fleet, run_fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_faults import ask_until_answered
from tests.torchserve.test_sessions import open_session

pytestmark = pytest.mark.torchserve
JOURNAL_URL = "TORCHMOOR_HANDLER_JOURNAL_URL"


@pytest.mark.redis
def test_sessions_in_valkey_survive_their_instance(archives: Path, tmp_path: Path, redis_server: RedisServer) -> None:
    """After kill -9 of a JVM, sessions continue elsewhere; a closed one is deleted, and logs omit the password."""

    def kept(session_id: str) -> list[str]:
        with redis_server.client() as client:
            return sorted(key.decode().rpartition(":")[2] for key in client.scan_iter(f"*{session_id}*"))

    run_dir, environment = tmp_path / "run", {JOURNAL_URL: redis_server.url}
    with run_fleet("--instances", "2", run_dir=run_dir, log=tmp_path / "up.log", environment=environment) as fleet:
        check_fleet(fleet, run_dir, kept, ["events", "images"], ["closed"])
    for log in tmp_path.rglob("*.log"):
        for form in (redis_server.password, redis_server.url):
            assert form not in log.read_text(errors="replace"), log


def check_fleet(
    fleet: Fleet, run_dir: Path, kept: Callable[[str], list[str]], when_open: list[str], when_closed: list[str]
) -> None:
    """Check a fleet. kept: returns a session's journal entries by its id."""
    chat = open_session(fleet.client(), image=data_url(draw("circle", "red")))
    (victim,) = fleet.holders(chat.id)
    chat.ask("What color is the circle?")
    assert kept(chat.id) == when_open

    os.kill(int((run_dir / victim / "tmp" / ".model_server.pid").read_text()), signal.SIGKILL)

    assert "red" in ask_until_answered(chat, "What color is the circle?")
    chat.close()
    assert kept(chat.id) == when_closed
