"""Ports, folders and archives that are actually in use, missing or damaged."""

import errno
import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.archives import write_small_archive
from tests.tools import require_mount_namespace
from tests.unit.torchmoor.doctor.conftest import MakePlan
from tests.waiting import PROGRAM_S
from torchmoor.config.listen import ListenSettings
from torchmoor.doctor.finding import Level
from torchmoor.doctor.fleet import check_ports
from torchmoor.doctor.machine import check_archives, check_disk, check_memory, check_run_folder


def test_a_port_that_somebody_has_is_a_problem(make_plan: MakePlan) -> None:
    """A port in use is a problem; the finding names it and the option that changes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        runtime, admin = check_ports(make_plan(listen=ListenSettings(port=0, admin_port=port)))

    assert (runtime.level, admin.level) == (Level.OK, Level.PROBLEM)
    assert f"127.0.0.1:{port} is in use" in admin.found
    assert "--admin-port" in admin.remedy


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_is_not_this_machines_is_a_problem(make_plan: MakePlan, host: str) -> None:
    """An address that this machine does not have is a problem before the proxy starts."""
    runtime, _ = check_ports(make_plan(listen=ListenSettings(host=host, port=0, admin_port=0)))

    assert runtime.level is Level.PROBLEM


def test_a_path_too_long_for_a_workers_socket_is_a_problem(make_plan: MakePlan, tmp_path: Path) -> None:
    """A path that is too long for a worker's socket is a problem; TorchServe would only report a failed start."""
    [long, writable] = check_run_folder(make_plan(run_dir=tmp_path / ("x" * 90)))

    assert (long.level, writable.level) == (Level.PROBLEM, Level.OK)
    assert "allows 93" in long.found


def test_a_run_directory_that_cannot_be_written_is_a_problem(make_plan: MakePlan) -> None:
    """A run directory that cannot be written is a problem; /proc is one even for root."""
    [finding] = check_run_folder(make_plan(run_dir=Path("/proc/torchmoor")))

    assert finding.level is Level.PROBLEM
    assert "/proc cannot be written" in finding.found


def test_a_run_directory_on_a_full_disk_needs_room(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a run directory on a full disk, the advice is to make room, not to change its owner."""

    def refuse(**options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("torchmoor.doctor.machine.tempfile.TemporaryFile", refuse)
    [finding] = check_run_folder(make_plan(run_dir=tmp_path))

    assert finding.level is Level.PROBLEM
    assert finding.found == f"{tmp_path} cannot be written: No space left on device"
    assert finding.remedy == "make room, or give another directory"


def test_a_run_directory_that_is_mounted_read_only_needs_another_mount(tmp_path: Path) -> None:
    """On a read-only file system the advice is to mount another one, because its owner cannot write either."""
    require_mount_namespace("--map-root-user")
    check = f"""
from pathlib import Path
from torchmoor.doctor.machine import check_writable
finding = check_writable("run directory", Path("{tmp_path}/run"))
print(finding.level, finding.found, finding.remedy, sep="|")
"""
    mounted = 'mount -t tmpfs -o ro none "$1" && exec "$2" -c "$3"'
    ended = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "bash", "-c", mounted, "_", tmp_path, sys.executable, check],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
    )

    assert ended.stderr == ""
    level, found, remedy = ended.stdout.strip().split("|")
    assert (level, found) == ("problem", f"{tmp_path} cannot be written: Read-only file system")
    assert remedy == "mount a writable file system there, or give another directory"


def test_a_place_that_cannot_be_examined_is_a_problem(make_plan: MakePlan, tmp_path: Path) -> None:
    """A place that cannot be examined, such as a folder without search permission, does not end the check."""
    hidden = tmp_path / ("x" * 300) / "folder"
    plan = make_plan(run_dir=hidden, model_store=hidden)

    for found in (check_disk(plan), check_memory(plan)):
        [_] = found
    [finding] = check_archives(plan)
    assert finding.level is Level.PROBLEM
    assert "that this user can read" in finding.found


def test_an_archive_that_is_there_is_all_right(make_plan: MakePlan, tmp_path: Path) -> None:
    write_small_archive(tmp_path / "llava.mar")
    folder = tmp_path / "llm.mar" / "MAR-INF"
    folder.mkdir(parents=True)
    (folder / "MANIFEST.json").write_text('{"model": {"handler": "start.py"}}')

    levels = [finding.level for finding in check_archives(make_plan(endpoints=("llava", "llm")))]

    assert levels == [Level.OK, Level.OK]


def test_a_missing_archive_is_a_problem(make_plan: MakePlan) -> None:
    """A missing archive, as in a new clone, is a problem."""
    [finding] = check_archives(make_plan())

    assert finding.level is Level.PROBLEM
    assert "make archives" in finding.remedy


def test_an_archive_that_is_built_in_is_all_right(make_plan: MakePlan) -> None:
    """A built-in archive may be missing, since `up` writes it; an archive of another name must exist."""
    levels = [finding.level for finding in check_archives(make_plan(endpoints=("llava", "llm"), has_built_in=True))]

    assert levels == [Level.OK, Level.PROBLEM]


@pytest.mark.parametrize("damage", ["cut", "spoilt", "foreign", "empty"])
def test_a_damaged_archive_is_a_problem(make_plan: MakePlan, tmp_path: Path, damage: str) -> None:
    """A truncated download, a flipped byte, another zip and an archive without a handler are problems."""
    path = write_small_archive(tmp_path / "llava.mar", handler="" if damage == "empty" else "start.py")
    data = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "spoilt":
        data[data.index(b"www")] ^= 1
        path.write_bytes(data)
    elif damage == "foreign":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("readme", "no model")

    [finding] = check_archives(make_plan())

    assert finding.level is Level.PROBLEM
    assert str(path) in finding.found
