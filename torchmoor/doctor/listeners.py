"""Checks of ports, the run directory and archives."""

from __future__ import annotations

import errno
import json
import os
import socket
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from torchmoor.doctor.finding import Finding, FleetPlan, ok, problem
from torchmoor.doctor.machine import archive, nearest, run_folder
from torchmoor.fleet.torchserve import MAX_TMPDIR_CHARS

MANIFEST = "MAR-INF/MANIFEST.json"


def check_ports(plan: FleetPlan) -> Iterator[Finding]:
    """Check that the proxy's ports are free."""
    places = ((plan.host, plan.port, "--port"), (plan.admin_host, plan.admin_port, "--admin-port"))
    for host, port, option in places:
        reason = why_taken(host, port)
        if reason is None:
            yield ok("ports", f"{host}:{port} is free" if port else f"{host}: any free port will be used")
        elif reason == errno.EADDRINUSE:
            remedy = f"give another {option}, or find who has it: ss -ltnp 'sport = :{port}'"
            yield problem("ports", f"{host}:{port} is in use", remedy)
        else:
            yield problem(
                "ports", f"{host}:{port} cannot be used: {os.strerror(reason)}", f"give another {option} or host"
            )


def why_taken(host: str, port: int) -> int | None:
    """Return the errno of listening there; None if it succeeds."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except socket.gaierror:
        return errno.EADDRNOTAVAIL
    except OSError as error:
        return error.errno
    return None


def check_run_folder(plan: FleetPlan) -> Iterator[Finding]:
    """Check that the run directory is writable, and its path short enough for a worker's socket."""
    if not plan.num_instances:
        return
    folder = run_folder(plan)
    longest = max((f"{name}-{plan.num_instances - 1}" for name in plan.endpoints), key=len)
    path = folder / longest / "tmp"
    if len(str(path)) > MAX_TMPDIR_CHARS:
        found = f"{path} has {len(str(path))} characters, a worker's socket allows {MAX_TMPDIR_CHARS}"
        yield problem("run directory", found, "give a shorter --run-dir, or set a shorter TMPDIR")
    there = nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        found = f"{there} cannot be written: {error.strerror}"
        yield problem("run directory", found, f"chown it to user {os.getuid()}, or give another --run-dir")
    else:
        yield ok("run directory", f"{there} can be written")


def check_archives(plan: FleetPlan) -> Iterator[Finding]:
    """Check that each endpoint's archive exists, is complete and names a handler."""
    if not plan.num_instances:
        return
    for name in plan.endpoints:
        path = archive(plan, name)
        if not path.exists():
            yield problem("archives", f"there is no {path}", "make archives, or say where they are: --model-store")
            continue
        reason = why_unreadable(path)
        if reason:
            yield problem("archives", f"{path}: {reason}", "make archives builds it again")
        else:
            yield ok("archives", f"{path}, {path.stat().st_size / 2**20:.1f} MiB")


def why_unreadable(path: Path) -> str:
    """Return the fault of an archive, a file or a folder; "" if there is none."""
    try:
        if path.is_dir():
            manifest = (path / MANIFEST).read_bytes()
        else:
            with zipfile.ZipFile(path) as opened:
                manifest = opened.read(MANIFEST)
                spoilt = opened.testzip()
            if spoilt is not None:
                return f"{spoilt} is damaged"
        handler = json.loads(manifest)["model"]["handler"]
    except zipfile.BadZipFile as error:
        return f"it is not a complete archive ({error})"
    except (OSError, KeyError, ValueError, TypeError) as error:
        return f"it cannot be read ({error})"
    return "" if handler else "its manifest names no handler"
