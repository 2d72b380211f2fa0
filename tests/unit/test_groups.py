"""Tests are shared out among processes so that nothing dear is started twice."""

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.groups import SHORT, TESTS, group_of, place_of

FILES = ("tests/unit/test_imports.py", "tests/unit/torchmoor/fleet/test_breaker.py", "tests/fuzz/test_corpus.py")


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("torchserve/test_dialects.py", "fleet"),
        ("torchserve/test_sessions.py", "fleet"),  # by a fixture of its own
        ("torchserve/many/test_two_hundred.py", "many"),
        ("torchserve/test_access.py", "torchserve/test_access.py"),  # a fleet of its own
        ("torchserve/test_faults.py", "torchserve/test_faults.py"),  # `fleet` is only an argument of its functions
        ("image/test_models.py", "image"),
        ("unit/test_groups.py", "unit/test_groups.py"),
    ],
)
def test_files_that_share_something_dear_are_a_group(path: str, group: str) -> None:
    """All that use a fleet of several files are in one group, and all of a folder like image; other files are alone."""
    assert group_of(TESTS / path) == group


def test_long_groups_are_begun_first() -> None:
    """Fleets, then folders, then what has a fleet of its own, then the folders of short tests."""
    files = sorted(TESTS.rglob("test_*.py"), key=place_of)

    first = [path.relative_to(TESTS).parts[0] for path in files]
    assert group_of(files[0]) == "fleet"
    num_long = sum(folder not in SHORT for folder in first)
    assert not set(first[:num_long]) & set(SHORT)


def test_process_runs_whole_files(tmp_path: Path) -> None:
    """Two processes, three files: no file is in both. (This is pytest-xdist's affair, but it once changed silently.)"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-n", "2", "-v", "-p", "no:cacheprovider", "--basetemp", str(tmp_path)]

    done = subprocess.run(
        [*command, *FILES],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    workers = defaultdict(set)
    for worker, file in re.findall(r"^\[(gw\d)\] .*PASSED (\S+?)::", done.stdout, re.MULTILINE):
        workers[file].add(worker)
    assert workers.keys() == set(FILES)
    assert [len(each) for each in workers.values()] == [1, 1, 1]
    assert len(set.union(*workers.values())) == 2
