"""The processes that `make bench NAME=proxy` compares."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from benchmarks.proxy_arms import find_compiled_wheel

ROOT = Path(__file__).parents[3]
SHOW = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
from benchmarks.proxy_arms import LOAD_CORE, PROXY_CORE
print(PROXY_CORE, LOAD_CORE)
"""


def test_only_cores_that_the_benchmark_may_use_are_used() -> None:
    """A container may be limited to some of the machine's cores, or to one."""
    last = max(os.sched_getaffinity(0))

    shown = subprocess.run(
        [sys.executable, "-c", SHOW, str(last)], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )

    assert shown.stdout.split() == [str(last), str(last)]


@pytest.mark.parametrize("change", ["", "changed", "new"])
def test_only_a_compiled_wheel_of_this_source_is_measured(tmp_path: Path, change: str) -> None:
    """A wheel is not measured if it was built before a module changed or was added."""
    version = sys.version_info
    wheel = tmp_path / f"torchmoor-0.1.0-cp{version.major}{version.minor}-cp311-linux_x86_64.whl"
    with ZipFile(wheel, "w") as bundle:
        for number, path in enumerate(sorted((ROOT / "torchmoor").rglob("*.py"))):
            if change == "new" and number == 9:
                continue
            text = path.read_text() + ("# as it was" if change == "changed" and number == 9 else "")
            bundle.writestr(str(path.relative_to(ROOT)), text)
        bundle.writestr("torchmoor/bundle/handlers/errors.py", "of the archives, which the proxy does not load")

    assert find_compiled_wheel(tmp_path) == (None if change else wheel)
