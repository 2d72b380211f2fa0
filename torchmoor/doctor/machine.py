"""Memory, disk, open files and processors, against what instances need.

Measured with tiny-llava on a CPU after some conversations: 230 MB for the JVM and 400 MB for the worker before its
weights, 60 MB for the proxy. An archive is unpacked on the disk, and its weights are in memory once more.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torchmoor.doctor.finding import Finding, Patient, ok, problem, warning

MIB = 1 << 20
INSTANCE_BYTES = 640 * MIB
PROXY_BYTES = 64 * MIB
LOG_BYTES = 256 * MIB  # logs, journal and queue of a quiet fleet
SHM_BYTES = 64 * MIB  # what a container has by default, and torch's own pools may take
SPARE_FILES = 256


def check_memory(patient: Patient) -> Iterator[Finding]:
    """Room for every instance and its weights."""
    available, where = available_memory(Path("/proc/meminfo"), Path("/sys/fs/cgroup"))
    if available is None:
        yield warning("memory", "this system does not say how much is free", f"{_gib(_need(patient))} are needed")
        return
    need = _need(patient)
    found = f"{_gib(available)} free{where}; {patient.num_instances or 'no'} instances need about {_gib(need)}"
    if available < need:
        yield problem("memory", found, "fewer --instances, a smaller model, or more memory")
    else:
        yield ok("memory", found)


def available_memory(meminfo: Path, cgroup: Path) -> tuple[int | None, str]:
    """Bytes that may still be taken, and which limit that is: the machine's, or the container's where it is less."""
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


def check_disk(patient: Patient) -> Iterator[Finding]:
    """Room in the run directory for what instances unpack and write."""
    folder = nearest(run_folder(patient))
    need = LOG_BYTES + _archive_bytes(patient)
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield problem("disk", f"{folder} cannot be looked at: {error.strerror}", "give another --run-dir")
        return
    found = f"{_gib(free)} free in {folder}; about {_gib(need)} are needed"
    yield problem("disk", found, "make room, or give a --run-dir elsewhere") if free < need else ok("disk", found)


def check_shared_memory(patient: Patient, folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Containers have little of it."""
    if not patient.num_instances or not folder.is_dir():
        return
    free = shutil.disk_usage(folder).free
    found = f"{_gib(free)} free in {folder}"
    if free < SHM_BYTES:
        yield warning("shared memory", found, "in a container: --shm-size 1g, or an emptyDir of medium Memory")
    else:
        yield ok("shared memory", found)


def check_open_files(patient: Patient) -> Iterator[Finding]:
    """Every client's connection is one, and so is each to an instance."""
    limits = None if patient.configuration is None else patient.configuration.proxy.limits
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


def check_processors(patient: Patient) -> Iterator[Finding]:
    """Instances on a CPU compete for it."""
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = f"{number} for {patient.num_instances or 'no'} instances and the proxy"
    if patient.num_instances > number:
        yield warning("processors", found, "fewer --instances, unless they work on GPUs")
    else:
        yield ok("processors", found)


def run_folder(patient: Patient) -> Path:
    """Where instances would have their folders; without a --run-dir as long a path as it would be."""
    return patient.run_dir or Path(tempfile.gettempdir()) / "torchmoor-xxxxxxxx"


def nearest(folder: Path) -> Path:
    """The folder, or what is there of its path."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _need(patient: Patient) -> int:
    return PROXY_BYTES + patient.num_instances * INSTANCE_BYTES + _archive_bytes(patient)


def _archive_bytes(patient: Patient) -> int:
    """Of all instances' archives."""
    sizes = [path.stat().st_size for name in patient.endpoints if (path := archive(patient, name)).is_file()]
    return sum(sizes) * patient.num_instances // max(len(patient.endpoints), 1)


def archive(patient: Patient, endpoint: str) -> Path:
    """An endpoint's, as `torchmoor up` looks for it."""
    return patient.model_store / f"{endpoint}.mar"


def _gib(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"
