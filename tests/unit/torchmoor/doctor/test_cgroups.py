"""Limits of control groups of both versions, as the kernel shows them in files."""

from pathlib import Path

import pytest

from torchmoor.doctor.cgroups import memory_left

MIB = 1 << 20
UNLIMITED = 9223372036854771712  # version 1 has a number for it
V2, V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


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
