"""The number of processors that a process may use, with quotas as the kernel shows them in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchmoor.fleet.instance_process import InstanceProcessSettings
from torchmoor.fleet.processors import available_processors
from torchmoor.fleet.torchserve import TorchServeSettings


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a control group on a machine with 64 processors."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(64))
    (tmp_path / "cpu").mkdir()
    return tmp_path


def test_a_quota_of_version_2_limits_the_processors(root: Path) -> None:
    assert available_processors(root, root / "none") == 64
    (root / "cpu.max").write_text("max 100000\n")
    assert available_processors(root, root / "none") == 64
    (root / "cpu.max").write_text("50000 100000\n")
    assert available_processors(root, root / "none") == 0.5


def test_a_quota_of_version_1_limits_the_processors(root: Path) -> None:
    """Version 1 writes -1 for no limit."""
    (root / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (root / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert available_processors(root, root / "none") == 64
    (root / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    assert available_processors(root, root / "none") == 1.5


@pytest.mark.parametrize(("number", "starting"), [(64, 32), (2, 1), (0.5, 1), (9.9, 4)])
def test_as_many_instances_start_at_once_as_the_processors_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: float, starting: int
) -> None:
    """A start needs about two processors. In a container with a quota, those of the machine do not count."""
    monkeypatch.setattr("torchmoor.fleet.instance_process.available_processors", lambda: number)

    settings = InstanceProcessSettings(torchserve=TorchServeSettings(model_store=tmp_path), run_dir=tmp_path)

    assert settings.max_starting == starting
