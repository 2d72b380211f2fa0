"""Records of running fleets: those of live processes are found, and those of killed ones are removed."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from torchmoor.cli.main import main
from torchmoor.cli.options import endpoint_option
from torchmoor.cli.running_fleets import recorded, running_fleets, state_folder
from torchmoor.config.launcher import INSTANCE_LOG
from torchmoor.errors import TorchmoorError

LINE = json.dumps(
    {"runtime": "http://127.0.0.1:8080", "admin": "http://127.0.0.1:8090", "endpoints": ["llava"], "run_dir": "/run"}
)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return state_folder()


def records(state: Path) -> list[Path]:
    return list(state.glob("fleet-*"))


def test_a_fleet_is_found_as_long_as_it_runs(state: Path) -> None:
    with recorded(LINE):
        [fleet] = running_fleets()
        assert (fleet.pid, fleet.port, fleet.endpoints) == (os.getpid(), 8080, ("llava",))
    assert running_fleets() == []
    assert records(state) == []


def test_a_record_that_a_full_disk_refuses_leaves_no_file(
    state: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The fleet runs without a record, and says that `torchmoor stop` does not find it."""

    def refuse(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("torchmoor.cli.running_fleets.os.write", refuse)
    with recorded(LINE):
        assert running_fleets() == []
    assert records(state) == []
    assert f"stop do not find this fleet, process {os.getpid()}: " in caplog.text


def test_a_folder_of_records_that_cannot_be_read_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As that of another user, whose HOME a command may have inherited. A fleet runs without a record."""
    name = "a" * 300  # root may read everything
    monkeypatch.setenv("XDG_STATE_HOME", f"/{name}")

    with recorded(LINE):
        assert f"{name}/torchmoor" in caplog.text
    for command in ("status", "stop", "logs"):
        result = CliRunner().invoke(main, [command])
        assert (result.exit_code, result.stdout) == (1, "")
        assert f"Error: cannot read /{name}/torchmoor: File name too long; set HOME" in result.stderr


def test_records_of_an_earlier_boot_are_removed(state: Path) -> None:
    """A record with a free lock is removed.

    A locked one stays, because its fleet may run in another process namespace.
    """
    with recorded(LINE):
        [own] = records(state)
        host, space, pid = own.stem.removeprefix("fleet-").split("-")
        elsewhere = own.with_name(f"fleet-{host}-{'0' * len(space)}-{pid}.json")
        earlier = own.with_name(f"fleet-{host}-{'1' * len(space)}-{pid}.json")
        other_host = own.with_name(f"fleet-{'2' * len(host)}-{space}-{pid}.json")
        for path in (elsewhere, earlier, other_host):
            path.write_bytes(own.read_bytes())

        with elsewhere.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert [fleet.pid for fleet in running_fleets()] == [os.getpid()]

        assert sorted(records(state)) == sorted((own, elsewhere, other_host))


@pytest.mark.parametrize(
    ("output", "status", "said"),
    [("| true", 141, ""), ("> /dev/full", 1, "Error: the output cannot be written: No space left on device\n")],
)
def test_an_output_of_logs_that_cannot_be_written_is_told(
    tmp_path: Path, state: Path, output: str, status: int, said: str
) -> None:
    """An output that cannot be written, because of its reader or a full disk, is not reported as an unreadable log."""
    log = tmp_path / "llava-0" / INSTANCE_LOG
    log.parent.mkdir(parents=True)
    log.write_text("one line\n" * 100_000)
    command = f'"$@" -n 100000 {output}; exit ${{PIPESTATUS[0]}}'
    with recorded(json.dumps({**json.loads(LINE), "run_dir": str(tmp_path)})):
        ended = subprocess.run(
            ["bash", "-c", command, "bash", sys.executable, "-m", "torchmoor", "logs", "llava-0"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[4],
            timeout=60,
        )

    assert (ended.returncode, ended.stderr) == (status, said)


def test_a_relative_folder_of_states_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As XDG's specification says: it would be another folder in each working directory."""
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", "/home/someone")

    assert state_folder() == Path("/home/someone/.local/state/torchmoor")


def test_a_user_without_a_home_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's numeric user may have no home. Its fleet runs without a record, and no folder is named `~`."""
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # KeyError, as for an unknown user
    monkeypatch.chdir(tmp_path)

    with recorded(LINE):
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(TorchmoorError, match="set HOME, or XDG_STATE_HOME"):
        running_fleets()
    option = endpoint_option(click.Command("ask", callback=lambda: None)).params[0]
    assert option.shell_complete(click.Context(click.Command("ask")), "") == []
