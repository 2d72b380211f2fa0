"""A fleet that scales to zero while idle, on real TorchServe, driven by boto3."""

import json
import os
import re
import signal
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests

from tests.torchserve.conftest import processes_below, run_fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.long_streams import INPUTS, begin_by_boto3, num_continued
from tests.torchserve.test_faults import worker_pids
from tests.torchserve.test_sessions import open_session
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.torchserve]


def test_goes_to_zero_and_back_with_its_sessions(archives: Path, tmp_path: Path) -> None:
    """The fleet starts at zero; an asynchronous or a waiting request starts an instance and is answered.

    When idle it scales to zero without leaving a process. A session that was opened before continues on a new instance.
    A stream whose only worker is killed continues at the next one.
    """
    run_dir, log = tmp_path / "run", tmp_path / "up.log"
    arguments = ("--min-instances", "0", "--scale-in-cooldown", "2")
    with run_fleet(*arguments, run_dir=run_dir, log=log) as fleet:

        def instance_processes() -> list[int]:
            return [pid for pid in processes_below(run_dir) if pid != fleet.process.pid]

        assert (fleet.instances(), instance_processes()) == ([], [])
        assert requests.get(f"{fleet.admin}/healthz", timeout=60).status_code == 200

        submitted = fleet.client().invoke_endpoint_async(
            EndpointName="llava", ContentType="application/json", Body=json.dumps({"inputs": "Hello"}).encode()
        )
        chat = open_session(fleet.client(), image=data_url(draw("circle", "red")))

        assert "red" in chat.ask("What color is the circle?")
        result = Path(urlsplit(submitted["OutputLocation"]).path)
        wait_until(result.exists, "the asynchronous request is answered")
        assert "generated_text" in result.read_text()
        wait_until(lambda: fleet.instances() == [], "the instance is stopped")
        wait_until(lambda: instance_processes() == [], "the instance's processes have ended")

        assert "red" in chat.ask("What color is the circle?")

        wait_until(lambda: log.read_text().count("ready after") >= 2, "the second start is measured")
        (scaling,) = requests.get(f"{fleet.admin}/instances", timeout=60).json()["autoscaling"]
        assert (scaling["endpoint"], scaling["min_capacity"], scaling["max_capacity"]) == ("llava", 0, 1)
        num_starts = log.read_text().count("ready after")

        whole = begin_by_boto3(fleet, INPUTS, Accept="application/jsonlines").finish()
        stream = begin_by_boto3(fleet, INPUTS, Accept="application/jsonlines")
        for pid in worker_pids(run_dir, "llava-0"):
            os.kill(pid, signal.SIGKILL)
        assert stream.finish() == whole
        assert num_continued(fleet) == 1
        told = log.read_text()
    starts = re.findall(r"(llava-\d+) ready after ([0-9.]+) s", told)
    assert len(starts) >= 2
    assert {name for name, _ in starts} == {"llava-0"}
    assert str(scaling["last_start_s"]) == starts[num_starts - 1][1]
    assert "llava: from 0 to 1 instances, backlog" in told
    assert "llava-0 stopped" in told
