"""The parent of several proxy processes: its messages to them, and the use of their reports."""

import asyncio
import http.client
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import uvloop

from tests.proxy.fake_instance import dying
from tests.proxy.fake_many import FakeMany
from tests.proxy.processes import Holding, read, read_any, serve_in_vain, serving, write_config
from tests.unit.torchmoor.movable_loop import MovableLoop, pass_time
from tests.waiting import wait_until
from torchmoor.config.health import HealthSettings
from torchmoor.config.listen import ListenSettings
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.config.settings import ProxySettings
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry
from torchmoor.run.app import Proxy
from torchmoor.run.processes import child_process
from torchmoor.run.processes.child_process import ChildProcess

pytestmark = pytest.mark.slow

SETTINGS = ProxySettings(
    endpoints=(EndpointSettings(name="chat", variants=(VariantSettings(model="chat"),)),),
    listen=ListenSettings(port=0, admin_port=0, processes=2),
    health=HealthSettings(starting_interval_s=0.05),
)


@pytest.fixture
def holding() -> Iterator[Holding]:
    with Holding(("a", "b")) as instances:
        yield instances


def add(registry: Registry, port: int) -> None:
    """Register the one instance, as the launcher does at each start."""
    registry.add(Instance(name="chat-0", endpoint="chat", model="chat", port=port, state=InstanceState.READY))


def children_of(proxy: Proxy) -> list[ChildProcess]:
    return proxy.data.children


def run_with_processes(registry: Registry, work: Callable[[Proxy, asyncio.AbstractEventLoop], None]) -> None:
    """Run the parent in this process's own loop; `work` runs in a thread and may block."""

    async def run() -> None:
        async with Proxy(SETTINGS, registry) as proxy:
            await asyncio.to_thread(work, proxy, asyncio.get_running_loop())

    uvloop.run(run())


def ask(port: int) -> str:
    """Return the name of the instance that answers, or "" if its stop makes the request fail."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with closing(connection):
        connection.request("POST", "/endpoints/chat/invocations", body=b"{}")
        status, body = read_any(connection)
    return body if status == 200 else ""


def test_every_process_learns_of_an_instance_that_is_started_again_elsewhere(holding: Holding) -> None:
    """Every process gets an instance's new ports, which a launcher changes if the old ones are taken."""
    registry = Registry(SETTINGS.endpoints)
    add(registry, holding.fakes["a"].port)

    def work(proxy: Proxy, loop: asyncio.AbstractEventLoop) -> None:
        assert {ask(proxy.port) for _ in range(8)} == {"a"}
        loop.call_soon_threadsafe(add, registry, holding.fakes["b"].port)
        wait_until(lambda: {ask(proxy.port) for _ in range(8)} == {"b"}, "both processes know the new port")

    run_with_processes(registry, work)


def test_process_that_hangs_is_replaced(holding: Holding, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hanging process is replaced, because it still accepts connections that would wait forever."""
    monkeypatch.setattr(child_process, "SILENT_S", 3.0)
    registry = Registry(SETTINGS.endpoints)
    add(registry, holding.fakes["a"].port)

    def work(proxy: Proxy, loop: asyncio.AbstractEventLoop) -> None:
        hanging = children_of(proxy)[0].pid
        assert hanging is not None
        os.kill(hanging, signal.SIGSTOP)
        wait_until(lambda: children_of(proxy)[0].pid not in (hanging, None), "it is killed, and another started")
        wait_until(lambda: children_of(proxy)[0].is_ready, "which takes requests")
        assert {ask(proxy.port) for _ in range(8)} == {"a"}

    run_with_processes(registry, work)


def test_a_parent_that_was_held_up_keeps_its_processes(holding: Holding) -> None:
    """The silence of that time is the parent's own, as after a pause of a virtual machine: no request is lost."""
    registry = Registry(SETTINGS.endpoints)
    add(registry, holding.fakes["a"].port)

    async def run() -> None:
        async with Proxy(SETTINGS, registry) as proxy:
            before = [child.pid for child in children_of(proxy)]
            await pass_time(child_process.SILENT_S + 1)
            assert {await asyncio.to_thread(ask, proxy.port) for _ in range(8)} == {"a"}
            assert [child.pid for child in children_of(proxy)] == before

    with asyncio.Runner(loop_factory=MovableLoop) as runner:
        runner.run(run())


def test_processes_import_nothing_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's own file may have a standard module's name."""
    (tmp_path / "secrets.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)

    run_with_processes(Registry(SETTINGS.endpoints), lambda proxy, loop: None)


def test_process_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the process's reason, and no process is left."""
    monkeypatch.setattr(child_process, "to_text", lambda settings: "nonsense")

    with pytest.raises(child_process.LaunchError, match="while starting"):
        run_with_processes(Registry(SETTINGS.endpoints), lambda proxy, loop: None)


def test_breaker_that_opens_in_one_process_cuts_the_instance_off_in_all(holding: Holding, tmp_path: Path) -> None:
    """A breaker that opens in one process opens in all, without as many failures in each."""
    holding.fakes["a"].behave = dying
    fakes = list(holding.fakes.values())
    changes = {"recovery": {"max_failures": 3, "min_open_s": 600.0, "max_open_s": 600.0}}
    path = write_config(tmp_path / "torchmoor.yaml", {"chat": fakes}, **changes)
    with serving(path, 3) as served:
        connection = served.connect()  # of a single process

        def is_open() -> bool:
            connection.request("POST", "/endpoints/chat/invocations", body=b"{}")
            assert connection.getresponse().read() == b"b"
            return bool(served.instances()["a"]["breaker"] == "open")

        wait_until(is_open, "the breaker opens")
        served.instances()  # each process has answered after that, so it has received it
        before = len(holding.fakes["a"].received)

        assert {served.ask() for _ in range(16)} == {"b"}

    assert len(holding.fakes["a"].received) == before


def test_file_read_again_reaches_every_process_and_breaks_nothing(holding: Holding, tmp_path: Path) -> None:
    """After a reload, a removed instance finishes the requests of all processes, and the new one gets the others."""
    path = tmp_path / "torchmoor.yaml"
    tokens = tmp_path / "keys"

    def write(token: str, name: str) -> None:
        tokens.write_text(f"token alice {token}\n")
        tokens.chmod(0o600)
        write_config(path, {"chat": [holding.fakes[name]]}, access={"keys_file": str(tokens)})

    def who_answers(token: str) -> str:
        status, body = read_any(served.send(Authorization=f"Bearer {token}"))
        return body if status == 200 else str(status)

    write("first-token-of-alice", "a")
    with serving(path, 3) as served:
        holding.hold()
        running = [served.send(Authorization="Bearer first-token-of-alice") for _ in range(6)]
        wait_until(lambda: holding.num_held == 6, "the instance has them")
        write("second-token-of-alice", "b")

        served.process.send_signal(signal.SIGHUP)
        wait_until(lambda: served.instances().get("b", {}).get("state") == "ready", "the new instance is known")
        holding.release()

        assert [read(connection) for connection in running] == ["a"] * 6
        wait_until(lambda: "a" not in served.instances(), "the old one has left")
        assert {who_answers("second-token-of-alice") for _ in range(12)} == {"b"}
        assert {who_answers("first-token-of-alice") for _ in range(12)} == {"403"}


def test_every_process_knows_which_instance_holds_which_model(holding: Holding, tmp_path: Path) -> None:
    """Processes learn of models from reports to the parent, operators' orders, and other processes' requests."""
    reported = {"a": [f"a{number}" for number in range(6)], "b": [f"b{number}" for number in range(6)]}
    source = {*reported["a"], *reported["b"], "ordered", *(f"cold{number}" for number in range(6))}
    many = {
        name: FakeMany(fake, source=source, tiers=dict.fromkeys(reported[name], "device"))
        for name, fake in holding.fakes.items()
    }
    health = {"starting_interval_s": 0.05, "status_interval_s": 600.0, "busy_status_interval_s": 600.0}
    path = write_config(tmp_path / "torchmoor.yaml", {"many": list(holding.fakes.values())}, health=health)
    with serving(path, 3) as served:

        def who_has(model: str) -> set[str]:
            """Return the instances that serve a model, as seen through all processes."""
            fields = {"X-Amzn-SageMaker-Target-Model": model}
            return {json.loads(served.ask("many", **fields))["instance"] for _ in range(6)}

        wait_until(lambda: served.count("LoadedModelCount") == 12, "both instances have been asked")
        served.instances()  # each process has answered after that, so it has received it
        assert [who_has(model) for model in reported["a"]] == [{"a"}] * 6
        assert [who_has(model) for model in reported["b"]] == [{"b"}] * 6
        assert sum(each.num_loads for each in many.values()) == 0

        busy = "a" if len(many["a"].tiers) > len(many["b"].tiers) else "b"
        served.post(f"models/ordered/prewarm?instance={busy}")
        served.instances()
        assert who_has("ordered") == {busy}
        assert [len(who_has(f"cold{number}")) for number in range(6)] == [1] * 6
        assert sum(each.num_loads for each in many.values()) == 7
        assert served.count("ModelInvocations") == 6 * 19


def test_dashboard_shows_all_processes_as_one(holding: Holding, tmp_path: Path) -> None:
    """A request of any process is counted once in totals and curves, with its instance."""
    path = write_config(tmp_path / "torchmoor.yaml", {"chat": list(holding.fakes.values())})
    with serving(path, 3) as served:
        for _ in range(10):
            served.ask()
        holding.hold()
        running = [served.send() for _ in range(6)]
        wait_until(lambda: holding.num_held == 6, "the instances have them")

        told = served.look("dashboard.json")
        (variant,) = told["variants"]
        assert (variant["invocations"], variant["in_flight"], variant["ready"]) == (16, 6, 2)
        assert {row["name"]: row["outstanding"] for row in told["instances"]} == holding.running

        def curve() -> list[int]:
            return served.look("dashboard.json")["variants"][0]["series"]["in_flight"]

        wait_until(lambda: curve()[-1:] == [6], "the next sample has them")
        assert served.look("dashboard.json")["variants"][0]["decisions"] == {"least-outstanding-requests": 16}
        holding.release()
        for connection in running:
            read(connection)


def test_processes_write_one_access_log(holding: Holding, tmp_path: Path) -> None:
    """Each request is one whole line of one file, also in the new file after a rotation."""
    log = tmp_path / "access.jsonl"
    observe = {"access_log": str(log)}
    path = write_config(tmp_path / "torchmoor.yaml", {"chat": list(holding.fakes.values())}, observe=observe)

    def request_ids(of: Path) -> list[str]:
        whole, _, _ = of.read_text().rpartition("\n")  # a line that is being written may be incomplete
        return [json.loads(line)["request_id"] for line in whole.splitlines()]

    with serving(path, 3) as served:
        for _ in range(30):
            served.ask()
        wait_until(lambda: len(request_ids(log)) == 30, "all lines are written")
        assert len(set(request_ids(log))) == 30
        assert (served.count("AccessLogLines"), served.count("AccessLogDropped")) == (30, 0)

        old = log.rename(tmp_path / "access.jsonl.1")
        served.process.send_signal(signal.SIGHUP)
        wait_until(lambda: open_files(served.children(), log) == 3, "every process has the new file")
        for _ in range(12):
            served.ask()
        wait_until(lambda: len(request_ids(log)) == 12, "the next lines are there")

    assert len(request_ids(old)) == 30


def open_files(processes: list[int], path: Path) -> int:
    """Return how often these processes have a file of this name open."""
    number = 0
    for descriptor in (each for process in processes for each in Path(f"/proc/{process}/fd").glob("*")):
        with suppress(FileNotFoundError):  # closed meanwhile
            number += os.readlink(descriptor) == str(path)
    return number


def test_access_log_that_cannot_be_written_is_refused_at_the_start(holding: Holding, tmp_path: Path) -> None:
    """The error has the reason of the process that could not open the file."""
    observe = {"access_log": str(tmp_path / "nowhere" / "access.jsonl")}
    path = write_config(tmp_path / "torchmoor.yaml", {"chat": list(holding.fakes.values())}, observe=observe)

    result = serve_in_vain(path)

    assert (result.returncode, result.stdout) == (1, "")
    assert "observe.access_log: cannot append to" in result.stderr
    assert "Traceback" not in result.stderr
