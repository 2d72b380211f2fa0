"""Memory, disk and limits, each actually too small."""

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.unit.torchmoor.doctor.conftest import MakePlan
from torchmoor.doctor.finding import Level
from torchmoor.doctor.machine import (
    available_memory,
    check_disk,
    check_memory,
    check_open_files,
    check_processors,
    check_shared_memory,
)

MIB = 1 << 20


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a full file system of 1 MB; only root can."""
    folder = tmp_path / "full"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a tmpfs")
    try:
        with (folder / "file").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_a_problem(make_plan: MakePlan, full_disk: Path) -> None:
    """A full disk is a problem, also if the run directory does not exist yet."""
    [finding] = check_disk(make_plan(run_dir=full_disk / "run" / "here"))

    assert finding.level is Level.PROBLEM
    assert str(full_disk) in finding.found
    assert "--run-dir" in finding.remedy


def test_little_shared_memory_is_a_warning(make_plan: MakePlan, full_disk: Path) -> None:
    """Little shared memory, as in a container by default, is a warning."""
    [finding] = check_shared_memory(make_plan(), full_disk)

    assert finding.level is Level.WARNING
    assert "--shm-size" in finding.remedy


def test_room_is_no_finding_to_mend(make_plan: MakePlan) -> None:
    """Enough disk space is not a problem; the archives count for each instance."""
    plan = make_plan()
    (plan.model_store / "llava.mar").write_bytes(bytes(MIB))

    assert [finding.level for finding in check_disk(plan)] == [Level.OK]


def test_more_instances_than_memory_is_a_problem(make_plan: MakePlan) -> None:
    """More instances than the memory suffices for are a problem; the need of one was measured."""
    [few] = check_memory(make_plan(num_instances=0))
    [many] = check_memory(make_plan(num_instances=100_000))

    assert (few.level, many.level) == (Level.OK, Level.PROBLEM)
    assert "fewer --instances" in many.remedy


def test_memory_is_what_the_container_may_have(tmp_path: Path) -> None:
    """The container's memory limit applies if it is below the machine's memory."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 4096 kB\nMemAvailable: 2048 kB\n")

    assert available_memory(meminfo, None) == available_memory(meminfo, 9 * MIB) == (2 * MIB, "")
    assert available_memory(meminfo, 4096) == (4096, " to this container or service")
    assert available_memory(tmp_path / "none", 4096) == (4096, " to this container or service")
    assert available_memory(tmp_path / "none", None) == (None, "")


def test_few_open_files_are_a_warning(make_plan: MakePlan) -> None:
    """A low limit of open files is a warning with the number that suits the proxy's connections."""
    [finding] = check_open_files(make_plan(), 1024)
    [good] = check_open_files(make_plan(), float("inf"))
    [none] = check_open_files(make_plan(), 257)

    assert finding.level is Level.WARNING
    assert "1024 may be open: 288 of 10000 client connections" in finding.found
    assert "ulimit -n 21280" in finding.remedy
    [enough] = check_open_files(make_plan(), 21280)
    assert enough.level is Level.OK
    assert (good.level, none.level) == (Level.OK, Level.PROBLEM)


def test_more_instances_than_processors_is_a_warning(make_plan: MakePlan) -> None:
    """More instances than processors are only a warning, because on GPUs this may be intended."""
    assert [finding.level for finding in check_processors(make_plan(num_instances=10_000))] == [Level.WARNING]
    assert [finding.level for finding in check_processors(make_plan())] == [Level.OK]


@pytest.mark.parametrize(("number", "shown"), [(1536, "1536"), (0.25, "0.25"), (1.3333, "1.33"), (2.0, "2")])
def test_the_number_of_processors_is_readable(
    make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch, number: float, shown: str
) -> None:
    monkeypatch.setattr("torchmoor.doctor.machine.available_processors", lambda: number)

    [found] = check_processors(make_plan())

    assert found.found.startswith(f"{shown} for ")
