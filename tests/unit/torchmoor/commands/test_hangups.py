"""SIGHUP while a command is imported: those that handle it later must not end."""

import signal
import subprocess
import sys

import pytest

COMMAND = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # although the tests may run under nohup
from torchmoor.cli import main
from importlib import import_module

def hang_up(name):
    os.kill(os.getpid(), signal.SIGHUP)
    return import_module(name)

main.import_module = hang_up
main.main([sys.argv[1], "--help"])
"""


@pytest.mark.parametrize(("command", "status"), [("up", 0), ("serve", 0), ("chat", -signal.SIGHUP)])
def test_a_hangup_does_not_end_a_program_that_reloads_at_it(command: str, status: int) -> None:
    """The imports take a second, in which logrotate or a closed terminal may send SIGHUP. A chat ends, as usual."""
    ended = subprocess.run([sys.executable, "-c", COMMAND, command], capture_output=True, timeout=60)

    assert ended.returncode == status
