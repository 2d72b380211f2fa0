"""Several proxy processes on one port are one proxy, to clients and to operators."""

import http.client
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests
from click.testing import CliRunner

from tests.processes import is_running
from tests.proxy.conftest import make_session_id
from tests.proxy.processes import TIMEOUT_S, Holding, Served, read, serve_in_vain, serving, write_config
from tests.proxy.test_cors import APP, check_readable
from tests.waiting import wait_until
from torchmoor.cli.main import main

PROCESSES = 3


@pytest.fixture(scope="module")
def holding() -> Iterator[Holding]:
    with Holding(("a", "b")) as instances:
        yield instances


@pytest.fixture(scope="module")
def config(holding: Holding, tmp_path_factory: pytest.TempPathFactory) -> Path:
    fakes = holding.fakes
    path = tmp_path_factory.mktemp("processes") / "torchmoor.yaml"
    return write_config(
        path,
        {"chat": (fakes["a"], fakes["b"])},
        listen={"port": 0, "admin_port": 0, "allowed_origins": [APP]},
        sessions={"are_journaled": True},
        timeouts={"stop_grace_s": 60.0},
    )


@pytest.fixture(scope="module")
def shared(config: Path) -> Iterator[Served]:
    """Share one fleet among tests that leave it unchanged."""
    with serving(config, PROCESSES) as served:
        yield served


@pytest.fixture
def served(shared: Served, holding: Holding) -> Iterator[Served]:
    """Yield a fleet; at the end, check that no process has outstanding or held requests."""
    holding.most = dict.fromkeys(holding.most, 0)
    yield shared
    shared.hang_up()
    holding.release()
    wait_until(lambda: shared.outstanding() == 0, "all leases of all processes are released")


def test_every_process_spreads_its_requests_and_the_admin_plane_shows_the_sum(served: Served, holding: Holding) -> None:
    """Each process counts its own requests, so each is at most one off between two instances."""
    holding.hold()
    connections = []
    for number in range(1, 13):
        connections.append(served.send())
        wait_until(lambda: holding.num_held == number, "the instance has it")  # noqa: B023
    rows = served.instances()

    running = holding.running["a"], holding.running["b"]
    assert abs(running[0] - running[1]) <= PROCESSES
    assert (rows["a"]["outstanding"], rows["b"]["outstanding"]) == running
    holding.release()
    assert sorted(map(read, connections)) == ["a"] * running[0] + ["b"] * running[1]


def test_metrics_are_sums_over_the_processes(served: Served) -> None:
    """Each request counts once, in whichever process served it."""
    before = served.count("Invocations"), served.count("ModelLatency_count")

    for _ in range(20):
        served.ask()

    assert served.count("Invocations") == before[0] + 20
    wait_until(lambda: served.count("ModelLatency_count") == before[1] + 20, "every answer is counted")


def test_drain_and_resume_reach_every_process(served: Served) -> None:
    """No process sends new requests to a draining instance."""
    served.move("a", "drain")
    assert {served.ask() for _ in range(12)} == {"b"}

    served.move("a", "resume")
    wait_until(lambda: served.instances()["a"]["state"] == "ready", "the instance is probed and ready")
    wait_until(lambda: "a" in {served.ask() for _ in range(4)}, "it gets work again")


def test_session_goes_on_through_any_process(served: Served) -> None:
    """A session continues through any process, because its id contains the instance."""
    session = make_session_id("b", endpoint="chat")

    answers = {served.ask(**{"X-Amzn-SageMaker-Session-Id": session}) for _ in range(12)}

    assert answers == {"b"}


def test_every_process_allows_the_same_pages(served: Served) -> None:
    for _ in range(8):  # each on a new connection, which the kernel gives to any process
        url = f"http://127.0.0.1:{served.port}/endpoints/chat/invocations"
        check_readable(requests.post(url, data=b"{}", headers={"Origin": APP}, timeout=60))
        assert requests.post(url, data=b"{}", headers={"Origin": "null"}, timeout=60).status_code == 403


def test_killed_process_takes_only_its_own_with_it_and_comes_back(served: Served, holding: Holding) -> None:
    """A killed process's gauges disappear and no counter decreases; the others continue, and it is replaced."""
    holding.hold()
    connections = [served.send() for _ in range(12)]
    wait_until(lambda: holding.num_held == 12, "the instances have them")
    wait_until(lambda: served.outstanding() == 12, "the admin plane shows them")
    before = served.count("Invocations")
    children = served.children()

    os.kill(children[0], signal.SIGKILL)
    wait_until(lambda: children[0] not in served.children(), "it is gone")
    num_broken = 0
    holding.release()
    for connection in connections:
        try:
            assert read(connection) in "ab"
        except (ConnectionError, http.client.RemoteDisconnected):
            num_broken += 1

    assert num_broken < 12
    wait_until(lambda: served.outstanding() == 0, "its leases are gone with it")
    wait_until(lambda: len(served.children()) == PROCESSES, "another is started in its place")
    assert served.count("Invocations") >= before
    holding.hold()
    connections = [served.send() for _ in range(12)]
    wait_until(lambda: holding.num_held == 12, "all take requests")
    wait_until(lambda: served.outstanding() == 12, "and all count them")
    holding.release()
    for connection in connections:
        read(connection)


@pytest.mark.slow
def test_requests_under_load_survive_the_death_of_another_process(served: Served) -> None:
    """Only connections to the process that dies break; a client that connects again is served at once."""
    victim = served.children()[-1]
    connections = [served.connect() for _ in range(10)]
    num_broken = 0
    for round_number in range(10):
        if round_number == 3:
            os.kill(victim, signal.SIGKILL)
        for number, connection in enumerate(connections):
            try:
                connection.request("POST", "/endpoints/chat/invocations", body=b"{}")
                answer = connection.getresponse()
                assert (answer.status, answer.read()) in ((200, b"a"), (200, b"b"))
            except (ConnectionError, http.client.RemoteDisconnected):
                num_broken += 1
                connections[number] = served.connect()
    served.hang_up()

    # One break per connection; two if the next one reached the dying process's listener before the kernel removed it.
    assert num_broken <= 20
    wait_until(lambda: victim not in served.children() and len(served.children()) == PROCESSES, "it comes back")


@pytest.mark.slow
def test_term_lets_running_requests_end(config: Path, holding: Holding) -> None:
    """On SIGTERM the parent finishes running requests, accepts no new ones, and exits with 0."""
    with serving(config, 2) as served:
        holding.hold()
        connections = [served.send() for _ in range(6)]
        wait_until(lambda: holding.num_held == 6, "the instances have them")

        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not takes_connections(served.port), "no process listens")
        holding.release()

        assert [read(connection) in "ab" for connection in connections] == [True] * 6
        assert served.process.wait(TIMEOUT_S) == 0


@pytest.mark.slow
def test_nothing_outlives_a_killed_parent(config: Path) -> None:
    """After kill -9 of the parent its processes end by themselves, and the port is free."""
    with serving(config, 2) as served:
        children = served.children()
        assert len(children) == 2

        served.process.kill()

        wait_until(lambda: not any(map(is_running, children)), "its processes have ended")
        assert not takes_connections(served.port)


@pytest.mark.usefixtures("own_signals")
def test_late_binding_is_refused(holding: Holding, tmp_path: Path) -> None:
    """Each process would have its own queue. The error names both remedies."""
    path = write_config(tmp_path / "torchmoor.yaml", {"late": [holding.fakes["a"]]})

    result = CliRunner().invoke(main, ["serve", "--config", str(path), "--processes", "2"])

    assert (result.exit_code, result.stdout) == (1, "")
    assert re.search(r"set listen\.processes .* to 1, or turn late binding off for late", result.stderr)


def test_taken_port_is_refused_even_if_it_could_be_shared(config: Path, shared: Served, tmp_path: Path) -> None:
    """A taken port is refused even if it could be shared, because two proxies would take each other's clients."""
    path = tmp_path / "torchmoor.yaml"
    path.write_text(config.read_text().replace("  port: 0\n", f"  port: {shared.port}\n"))

    result = serve_in_vain(path)

    assert (result.returncode, result.stdout) == (1, "")
    assert f"cannot listen on http://127.0.0.1:{shared.port}: the port is in use" in result.stderr
    assert "Traceback" not in result.stderr


def takes_connections(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S):
        return True
    return False


def test_decisions_are_those_of_all_processes(served: Served) -> None:
    """Decisions of all processes are listed, the newest first; a second query returns the same."""
    for _ in range(12):
        served.ask()

    def find() -> list[dict[str, Any]]:
        return served.look("decisions?endpoint=chat&limit=50")["decisions"]

    wait_until(lambda: len(find()) >= 12, "every process has reported its decisions")
    found = find()
    assert len({row["request_id"][:23] for row in found}) > 1, "the ids begin with the process's own"
    assert [row["time"] for row in found] == sorted((row["time"] for row in found), reverse=True)
    assert find() == found
