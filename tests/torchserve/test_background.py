"""A fleet in the background, as a user starts, finds and stops it."""

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.torchserve.conftest import ROOT, TORCHMOOR
from tests.waiting import wait_until

pytestmark = pytest.mark.torchserve


class User:
    """Runs commands in a folder of records of its own."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        self._environment["XDG_STATE_HOME"] = str(state)

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [TORCHMOOR, *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT, env=self._environment
        )

    def begin(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [TORCHMOOR, *arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=self._environment
        )


@pytest.fixture
def user(archives: Path, tmp_path: Path) -> Iterator[User]:
    """Return a user, whose fleets are stopped after the test."""
    user = User(tmp_path)
    yield user
    user.run("stop", "--all")


def listed(user: User) -> list[dict[str, Any]]:
    return json.loads(user.run("status", "--json").stdout)["fleets"]


@pytest.mark.slow
def test_a_fleet_in_the_background_is_found_followed_and_stopped(user: User) -> None:
    """The command returns when the fleet answers; afterwards status, logs and stop work without an address."""
    started = user.run("up", "-d", "--port", "0", "--admin-port", "0")
    ready = json.loads(started.stdout)
    [fleet] = listed(user)
    with user.begin("logs", "llava-0", "--follow", "--lines", "0") as following:
        with urllib.request.urlopen(f"{ready['runtime']}/ping", timeout=60) as ping:
            is_well = ping.status == 200
        of_fleet, of_instance = user.run("logs", "--lines", "1000"), user.run("logs", "llava-0", "--lines", "1000")
        unknown = user.run("logs", "llava-9")
        stopped = user.run("stop", "--port", ready["runtime"].rpartition(":")[2])
        followed = following.communicate(timeout=60)[0]
    after = user.run("status")

    assert started.returncode == 0, started.stderr
    assert "llava-0 ready" in started.stderr
    for line in (
        f"runtime API: {ready['runtime']} with llava",
        f"to chat in a browser: {ready['runtime']}/chat",
        f"dashboard: {ready['admin']}",
    ):
        assert f"torchmoor: {line}\n" in started.stderr
    assert is_well
    assert (fleet["runtime"], fleet["endpoints"], fleet["instances"]) == (
        *(ready["runtime"], ["llava"]),
        {"llava-0": "ready"},
    )
    assert "llava-0 ready" in of_fleet.stdout
    assert "MODEL_LOG - handler ready" in of_instance.stdout
    assert (unknown.returncode, unknown.stderr) == (
        *(1, "Error: the fleet has no log of an instance 'llava-9'; its instances: llava-0\n"),
    )
    assert (stopped.returncode, stopped.stdout) == (0, f"{ready['runtime']}: stopped\n")
    assert following.returncode == 0, "the log's reader ends with the fleet"
    assert "handler ready" not in followed, "it began at the log's end"
    assert after.returncode == 3


def test_a_start_that_fails_is_reported_by_the_command(user: User, tmp_path: Path) -> None:
    """The command in the foreground has the message and the exit status of the fleet."""
    failed = user.run("up", "-d", "--port", "0", "--admin-port", "0", "--endpoint", "nope")

    assert failed.returncode == 1
    assert failed.stdout == ""
    assert "nope.mar" in failed.stderr
    assert listed(user) == []


def test_a_killed_fleet_is_not_listed(user: User) -> None:
    """The lock on a record is free once its process is gone."""
    started = user.run("up", "-d", "--port", "0", "--admin-port", "0", "--min-instances", "0")
    [fleet] = listed(user)

    os.kill(fleet["pid"], 9)

    assert started.returncode == 0, started.stderr
    wait_until(lambda: listed(user) == [], "the killed fleet is not listed")
    assert list(user.state.glob("torchmoor/fleet-*")) == []
