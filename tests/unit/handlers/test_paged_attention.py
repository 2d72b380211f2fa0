"""The GPU's attention kernel, run on the CPU by Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import missing
from tests.waiting import PROGRAM_S

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.slow  # the package triton takes 690 MB, so only `make test-slow` installs it


def test_kernel_computes_attention() -> None:
    """The kernel equals attention for grouped heads, windows, all head sizes, scattered blocks and split contexts."""
    if importlib.util.find_spec("triton") is None:
        missing("the package triton is not installed; make test-slow installs it")

    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.handlers.paged_attention_cases"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )

    assert done.stdout == "equal\n", done.stderr
