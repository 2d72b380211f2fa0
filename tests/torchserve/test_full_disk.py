"""A fleet with a full disk refuses new work, stays up, loses nothing, and continues when there is space."""

import errno
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from tests.tools import require_mount_namespace
from tests.torchserve.conftest import TORCHMOOR, Fleet, run_fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_async import path_of, question, submit
from tests.torchserve.test_faults import worker_pids
from tests.torchserve.test_sessions import Chat, open_session, refusal
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.torchserve, pytest.mark.ends_fleet]
DISK_BYTES = 320 << 20  # more than the free space that the asynchronous queue requires
COLORS = ("red", "green", "blue")
# The fleet sees a file system in memory at its disk's place; the tests reach it through /proc.
ON_SMALL_DISK = """#!/bin/bash
exec unshare --mount --map-root-user bash -c \
    'mount -t tmpfs -o size={num_bytes},mode=700 tmpfs {disk} && exec {torchmoor} "$@"' torchmoor "$@"
"""
JOURNAL_REFUSAL = ("ServiceUnavailable", "the session's journal is full; try again later")


@dataclass(frozen=True)
class SmallDisk:
    """A fleet whose journal, queue, results and logs are on one small file system."""

    fleet: Fleet
    folder: Path  # of the file system, as the fleet names it

    def seen(self, path: Path) -> Path:
        """Return the path by which this process reaches a file of the fleet's."""
        return Path(f"/proc/{self.fleet.process.pid}/root", *path.parts[1:])

    def fill(self) -> None:
        """Write a file until the system says that no space is left."""
        with self.seen(self.folder / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def free(self) -> None:
        self.seen(self.folder / "filler").unlink()


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallDisk]:
    require_mount_namespace("--map-root-user")
    folder = tmp_path_factory.mktemp("disk")
    disk, program = folder / "disk", folder / "torchmoor-on-small-disk"
    disk.mkdir()
    program.write_text(ON_SMALL_DISK.format(num_bytes=DISK_BYTES, disk=disk, torchmoor=TORCHMOOR))
    program.chmod(0o700)
    with run_fleet(
        *("--journal", (disk / "journal").as_uri()),
        run_dir=disk / "run",
        log=folder / "up.log",
        program=program,
        environment={"TORCHMOOR_HANDLER_JOURNAL_MIN_FREE_BYTES": "0"},
    ) as fleet:
        yield SmallDisk(fleet, disk)


def test_full_disk_refuses_new_work_and_loses_nothing(small_disk: SmallDisk) -> None:
    """What was acknowledged before is stored; refused requests can be repeated."""
    fleet, client = small_disk.fleet, small_disk.fleet.client()
    chat = open_session(client, image=data_url(draw("circle", "red")))
    assert "red" in chat.ask("What color is the circle?")
    accepted = [(submit(fleet, Body=question(color)), color) for color in COLORS * 8]

    small_disk.fill()
    assert refusal(lambda: open_session(client, image=data_url(draw("circle", "blue")))) == JOURNAL_REFUSAL
    assert refusal(lambda: chat.ask("What color is the circle?")) == JOURNAL_REFUSAL
    assert refusal(chat.close) == JOURNAL_REFUSAL
    code, message = refusal(lambda: submit(fleet, Body=question("green")))
    assert (code, "min_free_bytes" in message) == ("ServiceUnavailable", True)
    alone = client.invoke_endpoint(EndpointName="llava", ContentType="application/json", Body=question("green"))
    assert "green" in alone["Body"].read().decode()

    small_disk.free()
    assert "red" in chat.ask("What color is the circle?")
    for answer, color in accepted:
        result = small_disk.seen(path_of(answer["OutputLocation"]))
        wait_until(result.is_file, f"{result} is there")
        assert color in result.read_text()
        assert not small_disk.seen(path_of(answer["FailureLocation"])).exists()
    for pid in worker_pids(fleet.run_dir, "llava-0"):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_answered(chat), "another worker has the session")
    chat.close()
    assert not list(small_disk.seen(small_disk.folder).glob("**/." + "[0-9a-f]" * 16))


def is_answered(chat: Chat) -> bool:
    """Repeat the question; return False if no worker is ready."""
    try:
        return "red" in chat.ask("What color is the circle?")
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] not in (503, 507):
            raise
        return False
