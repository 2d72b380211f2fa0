"""The GPU report tests itself with a tiny model on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PHASES = ("environment", "decode", "uneven", "ttft", "parked", "out_of_memory", "soak")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_report", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_each_phase_is_a_line_and_a_part_of_the_page(tmp_path: Path) -> None:
    """Figures are measured with the product's engine, and nothing fails."""
    done = run("--shape", "tiny", "--minutes", "1", "--soak", "1", "--only", ",".join(PHASES), "--out", str(tmp_path))

    assert done.returncode == 0, done.stderr
    found = {line["phase"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert tuple(found) == PHASES
    assert not [name for name, line in found.items() if "failed" in line]
    assert {row["arm"] for row in found["decode"]["rows"]} == {"greedy", "sampled", "without graphs"}
    assert all(row["tokens_per_s"] > 0 for row in found["decode"]["rows"])
    assert found["ttft"]["image_tokens"] == 16
    assert (found["soak"]["errors"], found["soak"]["answers"] > 0) == (0, True)
    assert done.stdout == (tmp_path / "gpu-report.json").read_text()
    page = (tmp_path / "gpu-report.md").read_text()
    assert [name for name in PHASES if f"## {name} (" not in page] == []


@pytest.mark.parametrize("arguments", [("--only", "decode,nothing"), ("--shape", "none")])
def test_unknown_names_are_refused(arguments: tuple[str, str]) -> None:
    """With the word that is wrong."""
    done = run(*arguments)

    assert done.returncode == 2
    assert arguments[1].rpartition(",")[2] in done.stderr
