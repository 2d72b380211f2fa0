"""Memory, disk and limits, each actually too small; control groups of both versions, as the kernel shows them."""

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
    memory_left,
)

MIB = 1 << 20
UNLIMITED = 9223372036854771712  # version 1 has a number for it
V2, V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


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


@pytest.fixture
def membership(tmp_path: Path) -> Path:
    """Return a file as /proc/self/cgroup, without a group."""
    return tmp_path / "self"


def write(folder: Path, **values: object) -> None:
    """Write a group's files. A name has an underscore for its first dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{value}\n")


def test_a_container_of_version_2_has_its_own_limit(tmp_path: Path, membership: Path) -> None:
    """Without a limit, the machine's memory counts."""
    assert memory_left(tmp_path, membership) is None
    write(tmp_path, memory_max="max", memory_current=MIB)
    assert memory_left(tmp_path, membership) is None
    write(tmp_path, memory_max=MIB + 4096)
    assert memory_left(tmp_path, membership) == 4096


def test_a_container_of_version_1_has_its_own_limit(tmp_path: Path, membership: Path) -> None:
    """Version 1 has a folder for each controller; a container sees its own group there, by another path."""
    membership.write_text("4:memory:/docker/0f\n1:cpu,cpuacct:/docker/0f\n0::/\n")
    write(tmp_path / "memory", memory_limit_in_bytes=MIB + 4096, memory_usage_in_bytes=MIB)

    assert memory_left(tmp_path, membership) == 4096


def test_no_limit_of_version_1_is_a_large_one(tmp_path: Path, membership: Path) -> None:
    write(tmp_path / "memory", memory_limit_in_bytes=UNLIMITED, memory_usage_in_bytes=MIB)

    assert memory_left(tmp_path, membership) == UNLIMITED - MIB


@pytest.mark.parametrize("version", [1, 2])
def test_the_lowest_limit_of_all_groups_counts(tmp_path: Path, membership: Path, version: int) -> None:
    """A service of systemd is in a group below others, each of which may have a limit."""
    top = tmp_path if version == 2 else tmp_path / "memory"
    membership.write_text("0::/a.slice/b.service\n" if version == 2 else "4:memory:/a.slice/b.service\n")
    limit, usage = (name.replace(".", "_", 1) for name in (V2 if version == 2 else V1))
    write(top / "a.slice" / "b.service", **{limit: 8 * MIB, usage: MIB})
    write(top / "a.slice", **{limit: 8 * MIB, usage: 6 * MIB})

    assert memory_left(tmp_path, membership) == 2 * MIB


def test_files_in_the_page_cache_leave_the_memory_to_the_group(tmp_path: Path, membership: Path) -> None:
    """The kernel counts cached files, such as read weights, as the group's, and drops them when needed."""
    stat = f"anon {MIB}\nfile {7 * MIB}\nactive_file {MIB}\ninactive_file {6 * MIB}"
    write(tmp_path, memory_max=9 * MIB, memory_current=8 * MIB, memory_stat=stat)
    assert memory_left(tmp_path, membership) == 7 * MIB

    stat = f"inactive_file 0\ntotal_inactive_file {5 * MIB}"
    write(tmp_path / "memory", memory_limit_in_bytes=9 * MIB, memory_usage_in_bytes=8 * MIB, memory_stat=stat)
    assert memory_left(tmp_path, membership) == 6 * MIB
