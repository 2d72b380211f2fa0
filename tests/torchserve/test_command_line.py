"""The commands as processes, as a user runs them, against a real fleet."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from time import sleep

import pytest

from tests.torchserve.conftest import ROOT, Fleet
from tests.torchserve.drawings import draw
from tests.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.torchserve

ENDLESS = ("--max-new-tokens", "1500", "--temperature", "1e6", "--seed", "11")  # the settings of test_cancel.py


@pytest.fixture
def picture(tmp_path: Path) -> str:
    path = tmp_path / "circle.png"
    path.write_bytes(draw("circle", "red"))
    return str(path)


def begin(fleet: Fleet, *arguments: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    where = {"TORCHMOOR_URL": fleet.runtime, "TORCHMOOR_ADMIN_URL": fleet.admin}
    return subprocess.Popen(
        [sys.executable, "-m", "torchmoor", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**{k: v for k, v in os.environ.items() if not k.startswith("AWS_")}, **where},
    )


def run(fleet: Fleet, *arguments: str) -> subprocess.CompletedProcess[str]:
    with begin(fleet, *arguments) as process:
        output, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


@contextmanager
def begin_unread(fleet: Fleet, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """Start a command, and yield it with the other end of its output, once it has begun to write.

    Its output is a socket that holds a few pieces of an answer, so the command cannot end before the test reads.
    A pipe would not do: a write of up to 4096 bytes enters it whole or, while it has less room, not at all.
    """
    reader, writer = socket.socketpair()
    writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the system makes this its smallest size
    with reader, begin(fleet, *arguments, stdout=writer.fileno()) as process:
        writer.close()
        try:
            assert select.select([reader], [], [], DEADLINE_S)[0], "the answer has not begun"
            yield process, reader
        finally:
            process.kill()


@pytest.fixture
def before(fleet: Fleet) -> Iterator[int]:
    """Return the sessions open before the test, and check that no others remain afterwards."""
    number = fleet.count("sessions", "open")
    yield number
    wait_until(lambda: fleet.count("sessions", "open") <= number, "every session of the test is closed")


def test_a_question_is_answered_on_standard_output(fleet: Fleet, picture: str, before: int) -> None:
    """The command prints the answer's text only, so that it can be piped."""
    done = run(fleet, "ask", "What color is the circle?", picture)

    assert (done.returncode, done.stdout, done.stderr) == (0, "The circle is red.\n", "")


def test_a_session_goes_on_with_its_receipt_and_is_closed(fleet: Fleet, picture: str, before: int) -> None:
    """The second question reuses the first one's KV cache; an operator then lists and closes the session."""
    first = json.loads(run(fleet, "ask", "What color is the circle?", picture, "--keep", "--json").stdout)
    second = run(fleet, "ask", "Where is it?", "--session", first["session_id"], "--keep", "--json")
    answer = json.loads(second.stdout)
    name = blake2b(first["session_id"].encode(), digest_size=8).hexdigest()  # the hash of the access log
    listed = json.loads(run(fleet, "sessions", "list", "--limit", "1000", "--json").stdout)["sessions"]
    [row] = [each for each in listed if each["session"] == name]
    closed = run(fleet, "sessions", "close", name)
    after = run(fleet, "ask", "And now?", "--session", first["session_id"])

    assert answer["receipt"]["cache_tier"] == "kv"
    assert answer["receipt"]["routing_reason"] == "session"
    assert (row["turns"], row["instance"]) == (2, answer["receipt"]["instance"])
    assert first["session_id"] not in json.dumps(listed), "the id is a credential"
    assert closed.stdout == f"{name}: closed\n"
    assert after.returncode == 1
    assert after.stderr.startswith("Error: ")


@pytest.mark.parametrize(
    "numbers", [(signal.SIGINT,), (signal.SIGTERM,), (signal.SIGTERM, signal.SIGTERM)], ids=["INT", "TERM", "TERM-TERM"]
)
def test_a_session_is_closed_when_a_question_is_given_up(
    fleet: Fleet, picture: str, before: int, numbers: tuple[signal.Signals, ...]
) -> None:
    """A question that is interrupted ends quietly with status 130; `before` checks that its session is closed.

    `timeout` sends its signal twice: to the process, and to its group.
    """
    with begin_unread(fleet, "ask", "Where is it?", picture, *ENDLESS) as (process, reader):
        for number in numbers:
            process.send_signal(number)
            sleep(0.01)
        with reader.makefile("rb") as output:
            output.read()
        _, errors = process.communicate(timeout=60)

    assert process.returncode == 130
    assert errors.strip() == ""


def test_an_unknown_endpoint_is_answered_with_the_known_ones(fleet: Fleet) -> None:
    """The error for a mistyped endpoint, or another fleet's default, lists the known ones."""
    done = run(fleet, "ask", "What color is the circle?", "--endpoint", "nope")

    assert done.returncode == 1
    assert done.stderr == f"Error: {fleet.runtime} has no endpoint nope, but llava: select one with --endpoint\n"


def test_a_reader_that_has_enough_ends_the_question(fleet: Fleet, picture: str, before: int) -> None:
    """`torchmoor ask ... | head -c 1` ends early, and its session is closed, too."""
    with begin_unread(fleet, "ask", "Where is it?", picture, *ENDLESS) as (process, reader):
        reader.shutdown(socket.SHUT_RD)  # closing it with unread bytes would be a reset
        errors = process.stderr.read()
        process.wait(60)

    assert (process.returncode, errors) == (141, "")


def test_a_load_finds_what_sessions_save(fleet: Fleet, picture: str, before: int) -> None:
    """The load test compares the same conversations with and without sessions, and every question is answered."""
    load = ("bench", "--image", picture, "--users", "2", "--turns", "3", "--requests", "12", "--max-new-tokens", "16")

    found = json.loads(run(fleet, *load, "--json").stdout)
    stateless = json.loads(run(fleet, *load, "--stateless", "--json").stdout)

    for each in (found, stateless):
        assert (each["completed"], each["failed"]) == (12, 0), each["errors"]
        assert each["p50_ttft_ms"] <= each["p50_e2el_ms"] <= each["p99_e2el_ms"]
        assert 12 <= each["total_output_tokens"] <= 12 * 16
    assert found["instances"].keys() <= {"llava-0", "llava-1"}
    assert sum(found["instances"].values()) == 12
    assert found["routing_reasons"] == {"session": 12}
    assert found["total_prefilled_tokens"] < found["total_input_tokens"]


def test_a_load_that_is_ended_leaves_no_session_open(fleet: Fleet, picture: str, before: int) -> None:
    """After `timeout` or a service manager stops a load test, it closes its sessions and reports results."""
    load = ("bench", "--image", picture, "--users", "2", "--turns", "100", "--duration", "600", "--json")
    with begin(fleet, *load) as process:
        wait_until(lambda: fleet.count("sessions", "open") > before, "a conversation has begun")

        for _ in range(2):  # to the process and to its group
            process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)

    assert process.returncode == 130
    assert json.loads(output)["is_interrupted"] is True


def test_the_doctor_finds_a_machine_that_runs_a_fleet_to_be_well(fleet: Fleet, archives: Path) -> None:
    """The doctor finds no problem on a machine that runs a fleet; it imports torch in a separate process."""
    done = run(fleet, "doctor", "--port", "0", "--admin-port", "0", "--json")

    found = json.loads(done.stdout)
    assert done.returncode == 0, [each for each in found["findings"] if each["level"] == "problem"]
    checks = {each["check"] for each in found["findings"]}
    assert {"java", "packages", "gpu", "memory", "disk", "archives", "fleet", "clock"} <= checks


def test_instances_are_listed(fleet: Fleet) -> None:
    """The command lists instances with their sessions and memory."""
    lines = run(fleet, "instances").stdout.splitlines()

    assert [line.split()[0] for line in lines] == ["NAME", "llava-0", "llava-1"]
    assert all(len(line) <= 80 and len(line.split()) == 8 for line in lines)


def test_a_second_fleet_in_the_same_directory_changes_nothing(fleet: Fleet, picture: str) -> None:
    """A second fleet waits for the first one's end; Ctrl-C ends it, and the first one's sessions continue."""
    opened = run(fleet, "ask", "What color is the circle?", picture, "--keep", "--json")
    session = json.loads(opened.stdout)["session_id"]
    with begin(fleet, "up", "--port", "0", "--admin-port", "0", "--run-dir", str(fleet.run_dir)) as second:
        assert "waiting for the earlier fleet to end" in second.stderr.readline()
        second.send_signal(signal.SIGINT)
        second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 0

    answer = run(fleet, "ask", "And its shape?", "--session", session)

    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout
