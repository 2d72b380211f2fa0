"""The GPU report tests itself with a tiny model on a CPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_phases
from benchmarks.gpu_bench import Bench
from benchmarks.gpu_model import SHAPES
from tests.waiting import PROGRAM_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PHASES = ("environment", "tests", "decode", "uneven", "beside", "ttft", "parked", "out_of_memory", "served", "soak")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_report", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )


def test_each_phase_is_a_line() -> None:
    """Each phase is a line of output, with the product's own engine and no failure."""
    done = run()

    assert done.returncode == 0, done.stderr
    found = {line["phase"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert tuple(found) == PHASES
    assert not [name for name, line in found.items() if "failed" in line]
    assert [name for name, line in found.items() if "skipped" in line] == ["out_of_memory"]
    assert (found["environment"]["shape"], found["environment"]["dtype"]) == ("tiny", "float32")
    assert {row["arm"] for row in found["decode"]["rows"]} == {"greedy", "sampled", "without graphs"}
    assert all(row["tokens_per_s"] > 0 for row in found["decode"]["rows"])
    assert found["ttft"]["image_tokens"] == 16
    assert [row["streams"] for row in found["served"]["rows"]] == [1, 4]
    assert all(row["tokens_per_s"] > 0 and row["alone_tokens_per_s"] > 0 for row in found["served"]["rows"])
    assert (found["soak"]["errors"], found["soak"]["answers"] > 0) == (0, True)


def test_a_phase_that_takes_too_long_ends_the_report() -> None:
    """The phase and those before it are printed."""
    done = run("--only", "environment,soak", "--soak", "1000", "--minutes", "0.25")

    assert done.returncode == 1
    first, last = map(json.loads, done.stdout.splitlines())
    assert first["copy_bytes_per_s"] > 0
    assert (last["phase"], last["failed"]) == ("soak", "not done when the time was over")


def test_output_of_tests_that_take_too_long_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has the last lines that pytest has written, each on a line of its own."""

    def run_too_long(command: list[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, 1.0, output=b"one\ntwo\n")  # bytes, also with text=True

    bench = Bench(SHAPES["tiny"], torch.device("cpu"), torch.float32, is_quick=True)
    monkeypatch.setattr(subprocess, "run", run_too_long)

    assert gpu_phases.tests(bench) == {"passed": False, "summary": "not done after 400 s", "failures": ["one", "two"]}


@pytest.mark.parametrize("arguments", [("--only", "decode,nothing"), ("--shape", "none")])
def test_unknown_names_are_refused(arguments: tuple[str, str]) -> None:
    done = run(*arguments)

    assert done.returncode == 2
    assert arguments[1].rpartition(",")[2] in done.stderr
