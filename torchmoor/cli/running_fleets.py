"""The fleets of `torchmoor up` that this user runs. Each keeps its record locked while it runs.

The records and the logs of fleets in the background are in torchmoor/ below $XDG_STATE_HOME, or ~/.local/state.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from torchmoor.config.launcher import INSTANCE_LOG
from torchmoor.errors import TorchmoorError

logger = logging.getLogger(__name__)


class FleetNotFound(TorchmoorError):
    """Raised if this user runs no such fleet, or several."""


@dataclass(frozen=True, slots=True)
class FleetRecord:
    """A fleet's addresses and process. log: the file of its messages; "" if they go to a terminal or a pipe."""

    pid: int
    started: float  # seconds since 1970
    runtime: str
    admin: str
    endpoints: tuple[str, ...]
    run_dir: str
    log: str

    @property
    def port(self) -> int:
        """The port of the runtime API, by which commands select a fleet."""
        return int(self.runtime.rpartition(":")[2])

    def instances(self) -> list[str]:
        """Return the names of the instances that have logs."""
        return sorted(path.parents[1].name for path in Path(self.run_dir).glob(f"*/{INSTANCE_LOG}"))

    def instance_log(self, name: str) -> Path:
        return Path(self.run_dir, name) / INSTANCE_LOG

    def is_running(self) -> bool:
        return not is_unlocked(_path_of(self.pid))


def state_folder() -> Path:
    """Return the folder of records and logs. Raises TorchmoorError for a user without a home."""
    folder = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(folder):  # XDG: ignored
        folder = os.path.expanduser("~/.local/state")
    if not os.path.isabs(folder):
        raise TorchmoorError("this user has no home directory: set HOME, or XDG_STATE_HOME to an absolute path")
    return Path(folder, "torchmoor")


@contextmanager
def recorded(announced: str) -> Iterator[None]:
    """Keep this process's record while the context lasts. announced: the line of JSON of `torchmoor up`.

    If the record cannot be written, the fleet runs, but `torchmoor status` does not list it.
    """
    fields = json.loads(announced)
    record = FleetRecord(
        pid=os.getpid(),
        started=time.time(),
        runtime=fields["runtime"],
        admin=fields["admin"],
        endpoints=tuple(fields["endpoints"]),
        run_dir=fields["run_dir"],
        log=_file_of_messages(),
    )
    try:
        path, file = _write_record(record)
    except (OSError, TorchmoorError) as error:
        logger.warning("torchmoor status and stop do not find this fleet, process %d: %s", record.pid, error)
        yield
        return
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


def _write_record(record: FleetRecord) -> tuple[Path, int]:
    """Return the record's file and its locked descriptor. Raises OSError, TorchmoorError."""
    path = _path_of(record.pid)
    new = path.with_suffix(".new")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(new, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.write(file, json.dumps(asdict(record)).encode())
        new.rename(path)  # locked and complete before others can see it
    except OSError:
        new.unlink(missing_ok=True)
        os.close(file)
        raise
    return path, file


def running_fleets() -> list[FleetRecord]:
    """Return the fleets of this user, the oldest first. Records that a kill or a reboot has left are removed.

    Raises TorchmoorError.
    """
    found = []
    host, space, folder = _host(), _process_space(), state_folder()
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise TorchmoorError(
            f"cannot read {folder}: {error.strerror}; set HOME to this user's home directory, or XDG_STATE_HOME"
        ) from error
    for path in (folder / name for name in names if fnmatch(name, f"fleet-{host}-*.json")):
        if is_unlocked(path):
            path.unlink(missing_ok=True)
            continue
        if not path.name.startswith(f"fleet-{host}-{space}-"):
            continue
        with suppress(OSError, ValueError, KeyError, TypeError):
            fields = json.loads(path.read_bytes())
            found.append(FleetRecord(**{**fields, "endpoints": tuple(fields["endpoints"])}))
    return sorted(found, key=lambda record: record.started)


def find_fleet(port: int | None) -> FleetRecord:
    """Return the fleet of a port, or the only one. Raises FleetNotFound."""
    fleets = running_fleets()
    if not fleets:
        raise FleetNotFound("no fleet of this user runs; start one: torchmoor up -d")
    if port is None and len(fleets) == 1:
        return fleets[0]
    ports = ", ".join(str(fleet.port) for fleet in fleets)
    for fleet in fleets:
        if fleet.port == port:
            return fleet
    if port is None:
        raise FleetNotFound(f"several fleets run; select one with --port: {ports}")
    raise FleetNotFound(f"no fleet of this user serves at port {port}; the ports are: {ports}")


port_option = click.option(
    "--port", type=click.IntRange(1, 65535), help="Port of the fleet's runtime API; required if several fleets run."
)


def complete_instances(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Complete the names of the instances of this user's fleets."""
    return _complete(incomplete, FleetRecord.instances)


def complete_endpoints(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Complete the names of the endpoints of this user's fleets."""
    return _complete(incomplete, lambda fleet: fleet.endpoints)


def _complete(incomplete: str, names_of: Callable[[FleetRecord], Iterable[str]]) -> list[CompletionItem[str]]:
    with suppress(TorchmoorError):  # a user without a home
        names = {name for fleet in running_fleets() for name in names_of(fleet)}
        return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]
    return []


def _path_of(pid: int) -> Path:
    return state_folder() / f"fleet-{_host()}-{_process_space()}-{pid}.json"


def _host() -> str:
    """Return a short form of the host's name. Hosts may share a home, and not all shared file systems share locks."""
    return _short(os.uname().nodename)


def _process_space() -> str:
    """Return a name of this boot and process namespace: a pid means something here only."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return _short(f"{boot} {os.readlink('/proc/self/ns/pid')}")
    return "here"


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def is_unlocked(path: Path) -> bool:
    """Return whether no process holds the lock of a fleet's record or log."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _file_of_messages() -> str:
    """Return the file that standard error goes to; "" if it is not a file."""
    with suppress(OSError, ValueError):
        number = sys.stderr.fileno()
        if stat.S_ISREG(os.fstat(number).st_mode):
            return os.readlink(f"/proc/self/fd/{number}")
    return ""
