"""Checks of memory, disk, open files and processors.

The needs were measured with tiny-llava on a CPU after some conversations: 230 MB for the JVM, 400 MB for the worker
without weights, 60 MB for the proxy. An archive is unpacked to disk, and its weights are loaded into memory.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torchmoor.doctor.finding import Finding, FleetPlan, ok, problem, warning

MIB = 1 << 20
INSTANCE_BYTES = 640 * MIB
PROXY_BYTES = 64 * MIB
LOG_BYTES = 256 * MIB  # logs, journal and queue of a quiet fleet
SHM_BYTES = 64 * MIB  # a container's default; torch's pools may use it
SPARE_FILES = 256


def check_memory(plan: FleetPlan) -> Iterator[Finding]:
    """Check memory for every instance and its weights."""
    available, where = available_memory(Path("/proc/meminfo"), Path("/sys/fs/cgroup"))
    if available is None:
        yield warning("memory", "this system does not report free memory", f"{_gib(_need(plan))} are needed")
        return
    need = _need(plan)
    found = f"{_gib(available)} free{where}; {plan.num_instances or 'no'} instances need about {_gib(need)}"
    if available < need:
        yield problem("memory", found, "fewer --instances, a smaller model, or more memory")
    else:
        yield ok("memory", found)


def available_memory(meminfo: Path, cgroup: Path) -> tuple[int | None, str]:
    """Return the available bytes, and a phrase if the container's limit is below the machine's."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free: int | None = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        free = None
    try:
        left = int((cgroup / "memory.max").read_text()) - int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no such limit
        return free, ""
    return (left, " to this container") if free is None or left < free else (free, "")


def check_disk(plan: FleetPlan) -> Iterator[Finding]:
    """Check disk space for the files that instances unpack and write."""
    folder = nearest(run_folder(plan))
    need = LOG_BYTES + _archive_bytes(plan)
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield problem("disk", f"{folder} cannot be checked: {error.strerror}", "give another --run-dir")
        return
    found = f"{_gib(free)} free in {folder}; about {_gib(need)} are needed"
    yield problem("disk", found, "make room, or give a --run-dir elsewhere") if free < need else ok("disk", found)


def check_shared_memory(plan: FleetPlan, folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Check /dev/shm, which is small in containers."""
    if not plan.num_instances or not folder.is_dir():
        return
    free = shutil.disk_usage(folder).free
    found = f"{_gib(free)} free in {folder}"
    if free < SHM_BYTES:
        yield warning("shared memory", found, "in a container: --shm-size 1g, or an emptyDir of medium Memory")
    else:
        yield ok("shared memory", found)


def check_open_files(plan: FleetPlan) -> Iterator[Finding]:
    """Check the limit of open files: each connection of a client, and each to an instance, is one."""
    limits = None if plan.configuration is None else plan.configuration.proxy.limits
    most = 10_000 if limits is None else limits.max_connections
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = 2 * most + SPARE_FILES
    found = f"{'any number' if soft == resource.RLIM_INFINITY else soft} may be open"
    if soft != resource.RLIM_INFINITY and soft < need:
        yield warning(
            "open files",
            f"{found}; {most} connections and as many to instances need {need}",
            f"ulimit -n {need}, or LimitNOFILE={need} in a systemd unit; or fewer limits.max_connections",
        )
    else:
        yield ok("open files", found)


def check_processors(plan: FleetPlan) -> Iterator[Finding]:
    """Check the number of CPUs, which instances without a GPU share."""
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = f"{number} for {plan.num_instances or 'no'} instances and the proxy"
    if plan.num_instances > number:
        yield warning("processors", found, "fewer --instances, unless they work on GPUs")
    else:
        yield ok("processors", found)


def run_folder(plan: FleetPlan) -> Path:
    """Return the run directory; without --run-dir a path as long as the generated one."""
    return plan.run_dir or Path(tempfile.gettempdir()) / "torchmoor-xxxxxxxx"


def nearest(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _need(plan: FleetPlan) -> int:
    return PROXY_BYTES + plan.num_instances * INSTANCE_BYTES + _archive_bytes(plan)


def _archive_bytes(plan: FleetPlan) -> int:
    """Return the size of all instances' archives."""
    sizes = [path.stat().st_size for name in plan.endpoints if (path := archive(plan, name)).is_file()]
    return sum(sizes) * plan.num_instances // max(len(plan.endpoints), 1)


def archive(plan: FleetPlan, endpoint: str) -> Path:
    """Return the path where `torchmoor up` expects an endpoint's archive."""
    return plan.model_store / f"{endpoint}.mar"


def _gib(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"
