"""Instances that share no disk: a fleet whose journal is in Valkey, and one whose journal is in S3."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.servers import BUCKET, RedisServer, S3Server
from tests.torchserve.conftest import run_fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_faults import ask_until_answered
from tests.torchserve.test_sessions import open_session

pytestmark = pytest.mark.torchserve
JOURNAL_URL = "TORCHMOOR_HANDLER_JOURNAL_URL"


@pytest.mark.redis
def test_sessions_in_valkey_survive_their_instance(archives: Path, tmp_path: Path, redis_server: RedisServer) -> None:
    """kill -9 of a JVM: its session goes on elsewhere; closed, it is gone; the password stands in no log."""

    def kept(session_id: str) -> list[str]:
        with redis_server.client() as client:
            return sorted(key.decode().rpartition(":")[2] for key in client.scan_iter(f"*{session_id}*"))

    check_fleet(tmp_path, {JOURNAL_URL: redis_server.url}, kept, ["events", "images"], ["closed"])
    for log in tmp_path.rglob("*.log"):
        for form in (redis_server.password, redis_server.url):
            assert form not in log.read_text(errors="replace"), log


@pytest.mark.s3
def test_sessions_in_s3_survive_their_instance(archives: Path, tmp_path: Path, s3_server: S3Server) -> None:
    """The same with a bucket, whose credentials come from the environment."""

    def kept(session_id: str) -> list[str]:
        found = s3_server.client().list_objects_v2(Bucket=BUCKET, Prefix="fleet/").get("Contents", [])
        return sorted({item["Key"].split("/")[4] for item in found if session_id in item["Key"]})

    environment = {JOURNAL_URL: f"s3://{BUCKET}/fleet", **s3_server.environment}
    check_fleet(tmp_path, environment, kept, ["events", "images"], ["events"])


def check_fleet(
    folder: Path,
    environment: dict[str, str],
    kept: Callable[[str], list[str]],
    when_open: list[str],
    when_closed: list[str],
) -> None:
    run_dir, log = folder / "run", folder / "up.log"
    with run_fleet("--instances", "2", run_dir=run_dir, log=log, environment=environment) as fleet:
        chat = open_session(fleet.client(), image=data_url(draw("circle", "red")))
        (victim,) = fleet.holders(chat.id)
        chat.ask("What color is the circle?")
        assert kept(chat.id) == when_open

        os.kill(int((run_dir / victim / "tmp" / ".model_server.pid").read_text()), signal.SIGKILL)

        assert "red" in ask_until_answered(chat, "What color is the circle?")
        chat.close()
        assert kept(chat.id) == when_closed
