"""Lines of progress: content, times, and how they are switched off."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until
from torchmoor.wire.progress import download_line, reporting


def test_the_current_line_is_reported_at_each_interval_until_the_end() -> None:
    """The thread ends with the block, so that no line follows."""
    reported: list[str] = []
    done = 0

    with reporting(lambda: f"{done} of 2", reported.append, 0.01):
        wait_until(lambda: "0 of 2" in reported, "the first line is reported")
        done = 1
        wait_until(lambda: "1 of 2" in reported, "the second line is reported")

    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_an_interval_of_zero_switches_lines_off() -> None:
    """No thread is started."""
    with reporting(lambda: "", lambda line: None, 0):
        assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_a_download_is_measured_by_what_it_has_written(tmp_path: Path) -> None:
    """Only newly written bytes count, neither earlier files nor unwritten gaps."""
    (tmp_path / "before").write_bytes(b"b" * 3_000_000)
    line = download_line(tmp_path, 10_000_000)
    assert line() == "downloading 0.0 of 10.0 MB"

    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "weights.part").write_bytes(b"w" * 2_500_000)
    assert line() == "downloading 2.5 of 10.0 MB"

    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(5_000_000)
    assert line() == "downloading 2.5 of 10.0 MB"

    (tmp_path / "more").write_bytes(b"m" * 9_000_000)
    assert line() == "downloading 10.0 of 10.0 MB"


def test_a_folder_that_does_not_exist_yet_has_no_bytes(tmp_path: Path) -> None:
    """A folder that does not exist yet, like the hub's cache before its first download, has zero bytes."""
    assert download_line(tmp_path / "none", 1_000_000)() == "downloading 0.0 of 1.0 MB"


def test_a_folder_that_is_deleted_meanwhile_ends_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pip deletes its temporary folders, at any moment, while the lines go on."""
    (tmp_path / "pip-download").mkdir()
    scandir = os.scandir

    def scan(path: str) -> Any:
        if "pip-download" in str(path):
            (tmp_path / "pip-download").rmdir()
        return scandir(path)

    line = download_line(tmp_path, 1_000_000)
    monkeypatch.setattr(os, "scandir", scan)

    said = line()

    assert not (tmp_path / "pip-download").exists()
    assert said.endswith(" of 1.0 MB")
