"""Runs the tests of LangChain's classes, its own suite and tests/clients, in an environment that has LangChain."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.tools import missing
from tests.waiting import PROGRAM_S

ROOT = Path(__file__).parents[4]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
TESTS = ROOT / "tests" / "clients"


@pytest.mark.slow
def test_langchain_classes_pass_their_tests() -> None:
    if not PYTHON.exists():
        missing("the clients are not installed; run make clients")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "PYTHON", "PYTEST"))}

    done = subprocess.run(
        [PYTHON, "-m", "pytest", "-c", TESTS / "pytest.ini", TESTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        env=environment,
    )

    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout.splitlines()[-1]
