"""SIGHUP while a command is imported: those that handle it later must not end."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # although the tests may run under nohup
from importlib import import_module
main = import_module(sys.argv[1])

def hang_up(name):
    os.kill(os.getpid(), signal.SIGHUP)
    return import_module(name)

main.import_module = hang_up
sys.exit(main.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(("command", "status"), [("up", 0), ("serve", 0), ("chat", -signal.SIGHUP)])
def test_a_hangup_does_not_end_a_program_that_reloads_at_it(command: str, status: int) -> None:
    """The imports take a second, in which logrotate or a closed terminal may send SIGHUP. A chat ends, as usual."""
    arguments = ["torchmoor.cli.main", command, "--help"]
    ended = subprocess.run([sys.executable, "-c", COMMAND, *arguments], capture_output=True, timeout=60)

    assert ended.returncode == status


@pytest.mark.parametrize("role", ["serve", "instance"])
def test_a_hangup_does_not_end_a_container_that_starts(role: str, tmp_path: Path) -> None:
    """The image's init passes SIGHUP on, so that the kernel does not protect the entry point from it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("TS_")}  # as workers' tests set
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND, "torchmoor.container.__main__", role],
        env={**own, "TORCHMOOR_MODEL_DIR": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert ended.returncode == 1
    assert f"there is no model in {tmp_path / 'none'}" in ended.stderr


def test_a_hangup_does_not_end_a_proxy_process_that_starts() -> None:
    """`systemctl kill -s HUP` sends the signal to every process of a service. The parent handles it."""
    own, others = socket.socketpair()
    own.close()  # a process without a parent ends well
    with others:
        ended = subprocess.run(
            [sys.executable, "-c", COMMAND, "torchmoor.run.processes.__main__", str(others.fileno()), "20"],
            pass_fds=(others.fileno(),),
            capture_output=True,
            timeout=60,
        )

    assert (ended.returncode, ended.stderr) == (0, b"")
