"""Checks of memory, disk, limits, the run directory and archives.

The needs were measured with tiny-llava on a CPU after some conversations: 230 MB for the JVM, 400 MB for the worker
without weights, 60 MB for the proxy. An archive is unpacked to disk, and its weights are loaded into memory.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torchmoor.config.group import MIB
from torchmoor.config.limits import LimitSettings
from torchmoor.doctor.finding import Finding, FleetPlan, Level, counted, expect, ok, problem, warning
from torchmoor.fleet.archives import archive_name, built_in, find_fault
from torchmoor.fleet.processors import available_processors
from torchmoor.fleet.torchserve import MAX_TMPDIR_BYTES
from torchmoor.proxy.http.descriptors import BODY_FILES, find_limit, limit_connections
from torchmoor.wire.cgroups import MEMBERSHIP, ROOT, groups

INSTANCE_BYTES = 640 * MIB
PROXY_BYTES = 64 * MIB
LOG_BYTES = 256 * MIB  # logs, journal and queue of a quiet fleet
SHM_BYTES = 64 * MIB  # a container's default; torch's pools may use it

_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
)


def check_memory(plan: FleetPlan) -> Iterator[Finding]:
    """Check memory for every instance and its weights."""
    need = PROXY_BYTES + plan.num_instances * INSTANCE_BYTES + _archive_bytes(plan)
    available, where = available_memory(Path("/proc/meminfo"), memory_left())
    if available is None:
        yield warning("memory", "this system does not report free memory", f"{_gib(need)} are needed")
        return
    found = f"{_gib(available)} free{where}; about {_gib(need)} needed for {_instances(plan)} and the proxy"
    yield expect(available >= need, "memory", found, "fewer --instances, a smaller model, or more memory")


def available_memory(meminfo: Path, left: int | None) -> tuple[int | None, str]:
    """Return the available bytes, and a phrase if the groups of this process allow less than the machine has.

    left: what they allow.
    """
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free: int | None = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        free = None
    if left is None or (free is not None and free <= left):
        return free, ""
    return left, " to this container or service"


def check_disk(plan: FleetPlan) -> Iterator[Finding]:
    """Check disk space for the files that instances unpack and write."""
    folder = nearest(plan.run_dir)
    need = LOG_BYTES + _archive_bytes(plan)
    free = shutil.disk_usage(folder).free
    found = f"{_gib(free)} free in {folder}; about {_gib(need)} are needed"
    yield expect(free >= need, "disk", found, "make room, or give a --run-dir elsewhere")


def check_shared_memory(plan: FleetPlan, folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Check /dev/shm, which is small in containers."""
    if not plan.num_instances or not folder.is_dir():
        return
    free = shutil.disk_usage(folder).free
    remedy = "in a container: --shm-size 1g, or an emptyDir of medium Memory"
    yield expect(free >= SHM_BYTES, "shared memory", f"{_gib(free)} free in {folder}", remedy, Level.WARNING)


def check_open_files(plan: FleetPlan, descriptors: float | None = None) -> Iterator[Finding]:
    """Check the limit of open files, from which the proxy derives its number of client connections.

    descriptors: the limit to check; None: this machine's, to which the proxy raises its own at the start.
    """
    limits = LimitSettings() if plan.configuration is None else plan.configuration.proxy.limits
    descriptors = find_limit(is_hard=True) if descriptors is None else descriptors
    reserved, most = limits.reserved_descriptors, -(-limits.max_connections // plan.listen.processes)
    allowed = limit_connections(most, descriptors=descriptors, reserved=reserved)
    need = 2 * most + BODY_FILES + reserved
    remedy = f"ulimit -n {need}, or LimitNOFILE={need} in a systemd unit; or fewer limits.max_connections"
    found = f"{descriptors:.0f} may be open: {allowed} of {most} client connections per process"
    level = Level.WARNING if allowed else Level.PROBLEM
    yield expect(allowed == most, "open files", found, remedy, level)


def check_processors(plan: FleetPlan) -> Iterator[Finding]:
    """Check the number of CPUs, which instances without a GPU share."""
    number = available_processors()
    found = f"{round(number, 2):g} for {_instances(plan)} and the proxy"
    remedy = "fewer --instances, unless they work on GPUs"
    yield expect(plan.num_instances <= number, "processors", found, remedy, Level.WARNING)


def check_run_folder(plan: FleetPlan) -> Iterator[Finding]:
    """Check that the run directory is writable, and its path short enough for a worker's socket."""
    if not plan.num_instances:
        return
    longest = max((f"{name}-{plan.num_instances - 1}" for name in plan.endpoints), key=len)
    path = plan.run_dir / longest / "tmp"
    if (num_bytes := len(os.fsencode(path))) > MAX_TMPDIR_BYTES:
        found = f"{path} has {num_bytes} bytes, a worker's socket allows {MAX_TMPDIR_BYTES}"
        yield problem("run directory", found, "give a shorter --run-dir, or set a shorter TMPDIR")
    yield check_writable("run directory", plan.run_dir)


def check_writable(check: str, folder: Path, shown: str = "") -> Finding:
    """Write to the folder, or to its nearest parent that exists. shown: what the folder is for."""
    there = nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        remedies = {
            errno.ENOSPC: "make room",
            errno.EDQUOT: "make room",
            errno.EROFS: "mount a writable file system there",
        }
        remedy = f"{remedies.get(error.errno or 0, f'chown it to user {os.getuid()}')}, or give another directory"
        return problem(check, f"{shown and shown + ': '}{there} cannot be written: {error.strerror}", remedy)
    return ok(check, f"{shown or there} can be written")


def check_archives(plan: FleetPlan) -> Iterator[Finding]:
    """Check that each model's archive exists, is complete and names a handler."""
    for name in plan.models if plan.num_instances else ():
        path = archive(plan, name)
        if os.path.exists(path):
            fault = find_fault(path, reads_all=True)
            found = f"{path}: {fault or f'{path.stat().st_size / MIB:.1f} MiB'}"
            yield expect(not fault, "archives", found, "make archives builds it again")
        elif plan.has_built_in and built_in(name) is not None:
            yield ok("archives", f"{name} is built in: its archive is written when it starts")
        else:
            yield problem(
                "archives",
                f"there is no {path} that this user can read",
                "make archives, or say where they are: --model-store",
            )


def archive(plan: FleetPlan, model: str) -> Path:
    """Return the path where `torchmoor up` or `serve` expects a model's archive."""
    return plan.model_store / archive_name(model)


def nearest(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists and that this user can find."""
    # Path.exists would raise PermissionError.
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


def _archive_bytes(plan: FleetPlan) -> int:
    """Return the size of all instances' archives."""
    sizes = [path.stat().st_size for name in plan.models if os.path.isfile(path := archive(plan, name))]
    return sum(sizes) * plan.num_instances // max(len(plan.models), 1)


def _instances(plan: FleetPlan) -> str:
    return counted(plan.num_instances, "instance") if plan.num_instances else "no instances"


def _gib(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"


def memory_left(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """Return how many bytes the control groups still allow; None if they have no limit.

    They are a container's or a service's, and the lowest limit applies. The kernel counts cached files as the group's,
    too, and drops those that are not in use when memory is needed.
    """
    found = []
    for folder in groups("memory", root, membership):
        for limit, usage, unused in _MEMORY_FILES:
            with suppress(OSError, ValueError):  # not this version, or no limit
                left = int((folder / limit).read_text()) - int((folder / usage).read_text())
                with suppress(OSError, ValueError, KeyError):
                    counts = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
                    left += int(counts[unused])
                found.append(left)
    return min(found, default=None)
