"""Every script starts with only the packages of `make setup`, and works where that is quick."""

import sys
from pathlib import Path

import pytest

from tests.documented.as_user import ROOT, run

pytestmark = [pytest.mark.slow]
PROGRAMS = sorted(
    path.name
    for path in (ROOT / "scripts").iterdir()
    if path.suffix == ".sh" or (path.suffix == ".py" and "__main__" in path.read_text(encoding="utf-8"))
)
# {tmp} is an empty folder. Other scripts have their own tests, or change the checkout, need a cloud, or take minutes.
QUICK = {
    "build_archives.py": "--only llava --model-store {tmp}",
    "check_prose.py": "README.md",
    "evaluate_tiny_llava.py": "--num 1 --mistakes 0",
    "make_reference.py": "--check",
    "record_run.py": "--output {tmp}/run.svg --title echo -- echo recorded",
    "register_autoscaling.py": "--endpoint llava --region us-east-1 --dry-run",
}


def start(script: str, *arguments: str) -> str:
    path = ROOT / "scripts" / script
    return run("bash" if path.suffix == ".sh" else sys.executable, path, *arguments)


@pytest.mark.parametrize("script", PROGRAMS)
def test_script_explains_itself(script: str) -> None:
    assert start(script, "--help").lower().startswith("usage: ")


@pytest.mark.parametrize(("script", "arguments"), QUICK.items(), ids=str)
def test_script_does_its_work(script: str, arguments: str, tmp_path: Path) -> None:
    """A quick use of the script exits with 0."""
    start(script, *arguments.format(tmp=tmp_path).split())
