"""`make demo`: a program that starts a fleet and talks to it."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "scripts" / "demo.py"

pytestmark = pytest.mark.torchserve


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 1)])
def test_demo_that_is_ended_stops_its_fleet(tmp_path_factory: pytest.TempPathFactory, number: int, status: int) -> None:
    """No process and no file of the fleet stays, and Ctrl-C shows no traceback."""
    folder = tmp_path_factory.mktemp("demo")  # `tmp_path` is too long a path for the sockets below it
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(
        [sys.executable, DEMO],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        process_group=0,
    ) as demo:
        assert any("starting" in line for line in demo.stderr)
        demo.send_signal(number)
        try:
            assert demo.wait(timeout=60) == status
            with pytest.raises(ProcessLookupError):
                os.killpg(demo.pid, 0)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(demo.pid, signal.SIGTERM)
        assert "Traceback" not in demo.stderr.read()
    assert list(folder.iterdir()) == []
