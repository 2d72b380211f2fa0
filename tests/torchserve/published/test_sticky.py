"""The sticky-session sample, with a third-party archive whose sessions are TorchServe's own."""

from pathlib import Path

import pytest

from tests.torchserve.published.conftest import RunClient
from tests.torchserve.sequences.test_sequences import NAME, make_archive

pytestmark = [pytest.mark.torchserve, pytest.mark.s3, pytest.mark.slow]


def test_an_uncompressed_archive_keeps_sessions_on_two_instances(run_client: RunClient, tmp_path: Path) -> None:
    """Each of the two instances has two sequence slots, which only the sessions occupy."""
    make_archive(tmp_path, "--archive-format", "no-archive")

    told = run_client("sticky.py", str(tmp_path / NAME))

    assert all(each.startswith("ts-seq-") for each in told["opened"])
    assert len(set(told["opened"])) == 4
    assert told["totals"] == [[1] * 4, [3] * 4]
    assert told["closed"] == [{"success": True}] * 4
