"""Run a second proxy in front of a fleet's instances: `torchmoor serve` with a configuration of the test."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tests.torchserve.conftest import ROOT, Fleet
from tests.waiting import DEADLINE_S


@contextmanager
def serve_configured(
    fleet: Fleet, folder: Path, content: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> Iterator[Fleet]:
    """Run the proxy on free ports. Yield the fleet as the proxy serves it; assert that the proxy ends at SIGTERM.

    folder: gets the configuration and the log. environment: None for the test's own.
    """
    path, log_path = folder / "torchmoor.yaml", folder / "serve.log"
    path.write_text(yaml.safe_dump({"listen": {"port": 0, "admin_port": 0}, **content}))
    command = [sys.executable, "-m", "torchmoor", "serve", "--config", str(path)]
    with log_path.open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    with process:
        try:
            line = process.stdout.readline()
            assert line, log_path.read_text()[-4000:]
            where = json.loads(line)
            yield replace(fleet, runtime=where["runtime"], admin=where["admin"], process=process)
        finally:
            process.terminate()
        assert process.wait(DEADLINE_S) == 0
