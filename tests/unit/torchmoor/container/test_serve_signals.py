"""Signals to the role `serve`, whose instances are left out."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.archives import write_small_archive
from tests.servers import free_ports
from tests.waiting import DEADLINE_S
from torchmoor.container.environment import read_environment
from torchmoor.container.serve import run
from torchmoor.run.host_fleet import HostFleet


def test_a_hangup_opens_the_access_log_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """logrotate sends SIGHUP after it has moved the file; the container goes on until SIGTERM."""
    (tmp_path / "model").mkdir()
    write_small_archive(tmp_path / "model" / "llava.mar", modelName="llava")
    port, admin_port = free_ports(2)
    log = tmp_path / "access.log"
    variables = read_environment(
        {
            "SAGEMAKER_BIND_TO_PORT": str(port),
            "TORCHMOOR_ADMIN_PORT": str(admin_port),
            "TORCHMOOR_MODEL_DIR": str(tmp_path / "model"),
            "TORCHMOOR_ACCESS_LOG": str(log),
            "TORCHMOOR_DRAIN_S": "1",
        }
    )
    reports: list[str] = []

    async def start(fleet: HostFleet) -> None:
        """Start no instance."""

    async def until(condition: str) -> None:
        while not any(condition in report for report in reports):  # noqa: ASYNC110  (the test has the deadline)
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        async with asyncio.timeout(DEADLINE_S):
            serving = asyncio.create_task(run(variables, reports.append))
            await until("ready")
            log.rename(tmp_path / "access.log.1")
            os.kill(os.getpid(), signal.SIGHUP)
            while not log.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            await serving

    monkeypatch.setattr(HostFleet, "start", start)
    monkeypatch.setenv("HOME", str(tmp_path))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # without a handler, the signal would end the tests
    try:
        asyncio.run(scenario())
    finally:
        signal.signal(signal.SIGHUP, before)

    assert reports[-1] == "stopped"
