"""The launcher with a stub in place of TorchServe: starts, restarts, and a complete cleanup."""

import asyncio
import dataclasses
import errno
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.archives import write_small_archive
from tests.processes import is_running
from tests.unit.torchmoor.fleet import stub_torchserve
from tests.waiting import DEADLINE_S, until, wait_until
from torchmoor.config.launcher import INSTANCE_LOG
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.errors import LaunchError
from torchmoor.fleet import instance_process
from torchmoor.fleet.archives import ArchiveContents
from torchmoor.fleet.folder_removal import remove_folder
from torchmoor.fleet.instance_guard import CONTROL_FOLDER, JOURNAL_FOLDER, MODELS_FOLDER
from torchmoor.fleet.instance_process import InstanceProcessSettings
from torchmoor.fleet.launcher import Launcher
from torchmoor.fleet.ports import find_free_ports
from torchmoor.fleet.torchserve import InstanceSpec, Launch, TorchServeSettings, prepare
from torchmoor.proxy.instances.instance import InstanceState
from torchmoor.proxy.instances.registry import Registry
from torchmoor.tasks import cancel_all

TAKEN_TRACE = """java.io.IOException: Failed to bind to address: http://127.0.0.1:1
Caused by: NativeIoException: bind(..) failed: Address already in use"""


@dataclass
class Host:
    """A launcher on this host, its reports, and the processes that it started."""

    tmp_path: Path
    crashes: bool = False  # the stub dies at once instead of running
    properties: Mapping[str, str] = field(default_factory=dict)  # lines of config.properties
    num_taken: int = 0  # number of starts whose port another program takes before TorchServe
    takers: list[socket.socket] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    ports: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.tmp_path / "run"

    def prepare(self, spec: InstanceSpec, settings: TorchServeSettings) -> list[str]:
        """Prepare an instance as the launcher does, with the stub as command."""
        prepare(spec, settings)
        self.ports[spec.name] = spec.ports
        report = self.report(spec.name)
        report.unlink(missing_ok=True)
        if self.num_taken:
            self.num_taken -= 1
            self.takers.append(socket.create_server(("127.0.0.1", spec.ports[0])))
            return [sys.executable, "-c", f"import sys; sys.exit({TAKEN_TRACE!r})"]
        if self.crashes:
            return [sys.executable, "-c", "import sys; sys.exit('Invalid maximum heap size')"]
        return [sys.executable, stub_torchserve.__file__, "heed", str(spec.pid_file), str(report)]

    def report(self, name: str) -> Path:
        return self.tmp_path / f"{name}.pids"

    def jvm(self, name: str) -> int:
        """Return the pid of the instance's JVM, from the stub's report."""
        pids = [int(pid) for pid in self.report(name).read_text().split()]
        self.pids += pids
        return pids[1]

    @asynccontextmanager
    async def launcher(self, **settings: Any) -> AsyncIterator[tuple[Launcher, Registry]]:
        registry = Registry([EndpointSettings(name="llava", variants=(VariantSettings(model="llava"),))])
        store = self.tmp_path / "store"
        store.mkdir(exist_ok=True)
        write_small_archive(store / "llava.mar")
        values = {"run_dir": self.run_dir, "kill_after_s": 2.0, "min_backoff_s": 0.05, **settings}
        torchserve = TorchServeSettings(model_store=store, properties=self.properties)
        health = asyncio.create_task(self._probe(registry))
        try:
            async with Launcher(
                InstanceProcessSettings(torchserve=torchserve, **values), registry, {}, self.reports.append
            ) as launcher:
                yield launcher, registry
        finally:
            await cancel_all([health])

    async def _probe(self, registry: Registry) -> None:
        """Act as the health checker: an instance whose stub runs is ready."""
        while True:
            for instance in registry.instances():
                if instance.state is InstanceState.STARTING and self.report(instance.name).exists():
                    self.jvm(instance.name)
                    registry.set_state(instance.name, InstanceState.READY)
            await asyncio.sleep(0.02)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """Yield a host; at the end, none of its processes may run."""
    made = Host(tmp_path)
    monkeypatch.setattr(instance_process, "prepare", made.prepare)
    yield made
    for taker in made.takers:
        taker.close()
    try:
        wait_until(lambda: not any(map(is_running, made.pids)), "nothing runs")
    finally:
        for pid in filter(is_running, made.pids):
            os.kill(pid, signal.SIGKILL)


def launches(count: int) -> list[Launch]:
    return [Launch(f"llava-{i}", "llava", "llava.mar") for i in range(count)]


async def test_a_fleet_starts_is_registered_and_leaves_nothing(host: Host) -> None:
    """All instances become ready under their names, on separate ports; a stop removes all processes and folders."""
    async with host.launcher() as (launcher, registry):
        await launcher.start(launches(2))

        assert [instance.name for instance in registry.get_endpoint("llava").instances] == ["llava-0", "llava-1"]
        assert all(instance.is_ready for instance in registry.instances())
        assert len({port for ports in host.ports.values() for port in ports}) == 10

    assert not host.run_dir.exists()


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["Ctrl-C", "refused"])
async def test_a_second_fleet_in_the_same_directory_changes_nothing(
    host: Host, monkeypatch: pytest.MonkeyPatch, *, is_cancelled: bool
) -> None:
    """A second fleet waits for the first one's end; its cancellation or time-out does not affect the first."""
    if not is_cancelled:
        monkeypatch.setattr("torchmoor.fleet.launcher.LOCK_GRACE_S", -1.9)

    async def start_second() -> None:
        async with host.launcher() as (launcher, _):
            await launcher.start(launches(1))

    async with host.launcher() as (launcher, _):
        await launcher.start(launches(1))
        (host.run_dir / JOURNAL_FOLDER).mkdir()
        before = sorted(host.run_dir.iterdir())
        second = asyncio.create_task(start_second())
        await until(lambda: any("waiting for the earlier fleet" in line for line in host.reports))
        if is_cancelled:
            second.cancel()

        with pytest.raises(asyncio.CancelledError if is_cancelled else LaunchError):
            await second

        assert sorted(host.run_dir.iterdir()) == before
        assert is_running(host.jvm("llava-0"))

    assert not host.run_dir.exists()


async def test_downloaded_models_end_with_the_fleet(host: Host) -> None:
    """The next fleet downloads them again; the control plane's resources stay."""
    resources = host.run_dir / CONTROL_FOLDER / "resources.json"
    async with host.launcher() as (launcher, _):
        await launcher.start(launches(1))
        (host.run_dir / MODELS_FOLDER / "chat-1").mkdir(parents=True)
        resources.touch()

    assert list(resources.parent.iterdir()) == [resources]


async def test_one_instance_ends_and_another_begins_under_its_name(host: Host) -> None:
    """Ending an instance removes its process, folder and drain and does not affect others.

    The last start's time is known.
    """
    async with host.launcher() as (launcher, registry):
        await launcher.start(launches(2))
        first = host.jvm("llava-0")
        registry.drain("llava-0")

        await launcher.end("llava-0")

        assert not is_running(first)
        assert not (host.run_dir / "llava-0").exists()
        assert [instance.name for instance in registry.instances()] == ["llava-1"]
        await launcher.begin(launches(1)[0])
        assert all(instance.is_ready for instance in registry.instances())
        last_start_s = registry.get_endpoint("llava").variants[0].last_start_s
        assert last_start_s is not None
        assert 0 < last_start_s < DEADLINE_S

    assert not host.run_dir.exists()


async def test_an_instance_can_be_ended_while_it_starts_or_after_it_failed(host: Host) -> None:
    """A caller that waits for it gets an error, and nothing of the instance is left."""
    async with host.launcher() as (launcher, registry):
        starting = launcher.begin(launches(1)[0])
        await until(lambda: bool(registry.instances()))
        await launcher.end("llava-0")
        assert starting.cancelled()

        host.crashes = True
        with pytest.raises(LaunchError):
            await launcher.begin(launches(1)[0])
        await launcher.end("llava-0")

        assert not registry.instances()
        assert not (host.run_dir / "llava-0").exists()


async def test_an_instance_that_dies_comes_back_under_its_name_on_its_ports(host: Host) -> None:
    """A restarted instance keeps its name, which session ids contain, and its ports."""
    async with host.launcher() as (launcher, registry):
        await launcher.start(launches(1))
        first_jvm, ports = host.jvm("llava-0"), host.ports["llava-0"]

        os.kill(first_jvm, signal.SIGKILL)
        states = []
        while not (InstanceState.DOWN in states and registry.instances()[0].is_ready):
            states.append(registry.instances()[0].state)
            await asyncio.sleep(0.005)

        assert first_jvm != host.jvm("llava-0")
        assert ports == host.ports["llava-0"]
        assert len(registry.instances()) == 1

    assert not host.run_dir.exists()


async def test_a_restart_removes_what_the_start_before_has_unpacked(host: Host) -> None:
    """TorchServe unpacks the archive at each start; with a large model, crashes would fill the disk."""
    async with host.launcher() as (launcher, registry):
        await launcher.start(launches(1))
        temporary = host.run_dir / "llava-0" / "tmp"
        for unpacked in ("models/0a1b", "models123.download"):
            (temporary / unpacked).mkdir(parents=True)
            (temporary / unpacked / "model.safetensors").touch()
        linked = host.tmp_path / "store" / "unpacked.mar"  # TorchServe links an archive that is a folder
        linked.mkdir()
        (linked / "model.safetensors").touch()
        (temporary / "models" / "0a1b" / "unpacked.mar").symlink_to(linked)
        (temporary / "cache").touch()

        first_jvm = host.jvm("llava-0")
        os.kill(first_jvm, signal.SIGKILL)
        await until(lambda: registry.instances()[0].is_ready and host.jvm("llava-0") != first_jvm)

        assert [path.name for path in temporary.iterdir() if not path.name.startswith(".")] == ["cache"]
        assert [path.name for path in linked.iterdir()] == ["model.safetensors"]


async def test_a_restart_that_fails_with_an_unexpected_error_is_repeated(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The instance would otherwise stay down without a message."""
    num_prepared = 0

    def prepare_but_once(spec: InstanceSpec, settings: TorchServeSettings) -> list[str]:
        nonlocal num_prepared
        num_prepared += 1
        if num_prepared == 2:
            raise ValueError("unexpected")
        return host.prepare(spec, settings)

    monkeypatch.setattr(instance_process, "prepare", prepare_but_once)

    async with host.launcher() as (launcher, registry):
        await launcher.start(launches(1))
        os.kill(host.jvm("llava-0"), signal.SIGKILL)
        await until(lambda: num_prepared == 3 and registry.instances()[0].is_ready)

    [record] = [each for each in caplog.records if "instance failed" in each.getMessage()]
    assert record.getMessage() == "instance failed instance=llava-0 error=unexpected"
    assert record.exc_info is not None
    assert sum("llava-0 unexpected; starting it again" in report for report in host.reports) == 1


async def test_a_long_log_of_a_start_does_not_hold_up_the_loop(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log of 10 MB takes 0.4 s to search, in which the proxy would serve no request of other instances."""
    threads: set[int] = set()

    def search(spec: InstanceSpec) -> None:
        threads.add(threading.get_ident())

    monkeypatch.setattr(instance_process, "find_load_failure", search)

    async with host.launcher() as (launcher, _):
        await launcher.start(launches(1))

    assert threads
    assert threading.get_ident() not in threads


async def test_a_first_start_that_fails_with_an_unexpected_error_leaves_no_process(host: Host) -> None:
    """A failed first start is a LaunchError, and the process that it has started is stopped."""

    class Unwritable(list[str]):
        def append(self, text: str) -> None:
            if "ready after" in text:
                raise ValueError("unexpected")

    host.reports = Unwritable()

    async with host.launcher() as (launcher, _):
        with pytest.raises(LaunchError, match="llava-0 could not be started: unexpected"):
            await launcher.begin(launches(1)[0])
        assert not launcher.is_running("llava-0")


async def test_a_full_disk_is_named(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's error of a write does not say where it was."""

    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(instance_process, "write_archive", fill)
    launch = dataclasses.replace(launches(1)[0], contents=ArchiveContents(Path("entry.py"), Path("config.yaml"), {}))

    async with host.launcher() as (launcher, _):
        expected = f"llava-0 could not be started: No space left on device: {host.run_dir / 'llava-0'}"
        with pytest.raises(LaunchError, match=f"^{re.escape(expected)}$"):
            await launcher.start([launch])


async def test_end_of_an_instance_is_reported_with_its_reason_and_log(host: Host) -> None:
    """The report has the reason and the log's last lines, and stays while the next process runs."""
    async with host.launcher() as (launcher, registry):
        await launcher.start(launches(1))
        assert registry.instances()[0].last_end is None
        jvm = host.jvm("llava-0")
        with (host.run_dir / "llava-0" / "console.log").open("a") as log:
            log.write("".join(f"line {number}\n" for number in range(5000)) + "the last words\n")

        os.kill(jvm, signal.SIGKILL)
        await until(lambda: registry.instances()[0].last_end is not None)
        await until(lambda: registry.instances()[0].is_ready)

        end = registry.instances()[0].last_end
        assert end.reason.startswith("has ended")
        assert end.log[-2:] == ("line 4999", "the last words")
        assert len(end.log) == 15

    [report] = [text for text in host.reports if "starting it again" in text]
    assert report.startswith("llava-0 has ended")
    assert report.endswith(
        "the end of its log:\n" + "\n".join(f"line {n}" for n in range(4986, 5000)) + "\nthe last words"
    )


async def test_reason_says_that_an_instance_did_not_answer(host: Host) -> None:
    """The reason says that the instance did not answer, not the exit status, since the launcher has killed it."""
    async with host.launcher(down_timeout_s=0.2) as (launcher, registry):
        await launcher.start(launches(1))
        registry.set_state("llava-0", InstanceState.DOWN)
        await until(lambda: registry.instances()[0].last_end is not None)

        end = registry.instances()[0].last_end
        assert re.fullmatch(r"did not answer for \d+ s and was stopped", end.reason)


async def test_an_instance_that_stays_down_is_replaced(host: Host) -> None:
    """An instance whose worker stays down while its JVM runs is replaced."""
    async with host.launcher(down_timeout_s=0.2) as (launcher, registry):
        await launcher.start(launches(1))
        first_jvm = host.jvm("llava-0")

        registry.set_state("llava-0", InstanceState.DOWN)
        await until(lambda: host.report("llava-0").exists() and host.jvm("llava-0") != first_jvm)

        assert not is_running(first_jvm)


@pytest.mark.parametrize("num_turns", range(4))
async def test_an_instance_that_is_ended_in_the_moment_in_which_its_process_ends_is_not_started_again(
    host: Host, monkeypatch: pytest.MonkeyPatch, num_turns: int
) -> None:
    """Whatever turns of the event loop lie between the two: the end of the process does not hide that of the task."""
    has_ended, may_tell = asyncio.Event(), asyncio.Event()
    wait = asyncio.subprocess.Process.wait

    async def wait_and_tell_late(process: asyncio.subprocess.Process) -> int:
        status = await wait(process)
        has_ended.set()
        await may_tell.wait()
        return status

    monkeypatch.setattr(asyncio.subprocess.Process, "wait", wait_and_tell_late)

    async with host.launcher(down_timeout_s=0.0) as (launcher, registry):
        await launcher.start(launches(1))
        registry.set_state("llava-0", InstanceState.DOWN)
        await has_ended.wait()
        may_tell.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await launcher.end("llava-0")

        assert host.reports.count("llava-0 starting") == 1


async def test_a_missing_archive_says_how_to_build_it(host: Host) -> None:
    """A missing archive is an error that says how to build it, and nothing is started."""
    async with host.launcher() as (launcher, _):
        with pytest.raises(LaunchError, match=r"other\.mar .*make archives"):
            await launcher.start([Launch("other-0", "llava", "other.mar")])

    assert not host.run_dir.exists()


async def test_an_instance_that_dies_while_starting_shows_the_end_of_its_log(host: Host) -> None:
    """`torchmoor up` fails at once with the end of the JVM's log."""
    host.crashes = True

    async with host.launcher() as (launcher, _):
        with pytest.raises(LaunchError, match=r"(?s)llava-0 ended while starting.*Invalid maximum heap size"):
            await launcher.start(launches(1))


async def test_an_instance_whose_port_is_taken_starts_with_others(host: Host) -> None:
    """If another program takes a port between search and start, the instance starts on other ports."""
    host.num_taken = 2

    async with host.launcher() as (launcher, registry):
        await launcher.start(launches(1))
        taken = {taker.getsockname()[1] for taker in host.takers}
        [instance] = registry.instances()
        assert len(taken) == 2
        assert not taken & set(host.ports["llava-0"])
        assert instance.port == host.ports["llava-0"][0]

    assert sum("found one of its ports taken" in report for report in host.reports) == 2


@pytest.mark.parametrize("is_fixed", [False, True])
async def test_a_port_that_stays_taken_is_an_error(host: Host, is_fixed: bool) -> None:
    """A port in use is an error, at once if it was configured, else after some starts."""
    host.num_taken = 10
    launch = dataclasses.replace(launches(1)[0], port=find_free_ports(1)[0] if is_fixed else None)

    async with host.launcher() as (launcher, _):
        with pytest.raises(LaunchError, match=r"(?s)llava-0 ended while starting.*Address already in use"):
            await launcher.start([launch])

    assert len(host.takers) == (1 if is_fixed else 4)


async def test_a_failed_start_leaves_nothing_or_says_where_the_log_is(host: Host) -> None:
    """A failed start removes its folder under /tmp or names it in the error."""
    host.crashes = True
    messages = []

    async with host.launcher() as (launcher, _):
        try:
            await launcher.start(launches(1))
        except LaunchError as error:
            messages.append(str(error))

    assert not host.run_dir.exists() or str(host.run_dir) in messages[0]


async def test_an_instance_that_is_never_ready_is_given_up(host: Host) -> None:
    """A start past its deadline is stopped and reported."""
    async with host.launcher(start_timeout_s=0.5) as (launcher, registry):
        registry.set_state = lambda name, state: None
        with pytest.raises(LaunchError, match=r"llava-0 was not ready after"):
            await launcher.start(launches(1))

    assert not host.run_dir.exists()


async def test_an_instance_that_loads_for_long_does_not_hold_up_others(host: Host) -> None:
    """One model is being downloaded, which may take an hour, and another endpoint's instance has died."""
    async with host.launcher(max_starting=1, slot_s=0.1) as (launcher, registry):
        set_state = registry.set_state
        registry.set_state = lambda name, state: name == "llava-0" or set_state(name, state)
        slow, other = map(launcher.begin, launches(2))
        await other
        assert not slow.done()
        slow.cancel()

    assert not host.run_dir.exists()


@pytest.mark.parametrize(
    ("requirements", "installs", "remedy"),
    [
        ("needs.txt", "false", f"; install the archive's needs.txt into the environment of {sys.executable}"),
        ("needs.txt", "true", ""),
        ("", "false", ""),
    ],
)
async def test_a_missing_module_names_requirements_that_are_not_installed(
    host: Host, requirements: str, installs: str, remedy: str
) -> None:
    """The error for a missing module says that TorchServe installs an archive's requirements only if configured."""
    failure = "".join(
        f"2026-11-28T19:53:10,263 [INFO ] W-9000-needs_1.0-stdout MODEL_LOG - {line}\n"
        for line in ("Backend worker process died.", "ModuleNotFoundError: No module named 'nonesuch'")
    )
    host.properties = {"install_py_dep_per_model": installs}
    log = host.run_dir / "needs-0" / INSTANCE_LOG
    messages = []

    async with host.launcher() as (launcher, registry):
        registry.set_state = lambda name, state: log.write_text(failure)  # once all processes run
        write_small_archive(host.tmp_path / "store" / "needs.mar", requirementsFile=requirements)
        try:
            await launcher.start([Launch("needs-0", "llava", "needs.mar")])
        except LaunchError as error:
            messages.append(str(error))

    assert messages == [f"needs-0 cannot load its model: ModuleNotFoundError: No module named 'nonesuch'{remedy}"]


async def test_a_stop_in_the_middle_of_a_start_leaves_nothing(host: Host) -> None:
    """Stopping during a start, for example by Ctrl-C, leaves no process or folder."""
    async with host.launcher(max_starting=1) as (launcher, registry):
        starting = asyncio.create_task(launcher.start(launches(2)))
        await until(lambda: bool(registry.instances()))
        starting.cancel()

    assert not host.run_dir.exists()


async def test_a_stop_in_the_middle_of_a_restart_leaves_nothing(host: Host) -> None:
    """Stopping during a restart, when the instance is down, removes its folder, too."""
    async with host.launcher(min_backoff_s=60.0) as (launcher, registry):
        await launcher.start(launches(1))
        os.kill(host.jvm("llava-0"), signal.SIGKILL)
        await until(lambda: registry.instances()[0].state is InstanceState.DOWN)

    assert not host.run_dir.exists()


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_an_instance_ends_although_no_thread_can_be_started(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes end and its folder is removed, so that its name can be used again."""
    async with host.launcher() as (launcher, _):
        await launcher.start(launches(1))
        with monkeypatch.context() as changed:
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())  # without idle threads
            changed.setattr(threading.Thread, "start", refuse)
            await launcher.end("llava-0")
        assert not (host.run_dir / "llava-0").exists()

        await launcher.start(launches(1))


async def test_a_folder_is_not_removed_again_when_a_thread_is_free(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then, the next instance of that name has it. An executor keeps calls that it has refused."""
    loop, may_end = asyncio.get_running_loop(), threading.Event()
    async with host.launcher() as (launcher, _):
        await launcher.start(launches(1))
        loop.set_default_executor(ThreadPoolExecutor(2))
        long = loop.run_in_executor(None, may_end.wait)
        with monkeypatch.context() as changed:
            changed.setattr(threading.Thread, "start", refuse)
            await launcher.end("llava-0")
        kept = host.run_dir / "llava-0" / "of-the-next"
        kept.mkdir(parents=True)

        may_end.set()
        await long
        await asyncio.gather(*(loop.run_in_executor(None, threading.Event().wait, 0.01) for _ in range(2)))

        assert kept.exists()


async def test_an_instance_that_dies_comes_back_although_no_thread_can_be_started(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is noted without a thread, and its start is repeated until there is one."""
    async with host.launcher() as (launcher, registry):
        await launcher.start(launches(1))
        first_jvm = host.jvm("llava-0")
        with monkeypatch.context() as changed:
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())  # without idle threads
            changed.setattr(threading.Thread, "start", refuse)
            os.kill(first_jvm, signal.SIGKILL)
            await until(lambda: sum("starting it again" in line for line in host.reports) > 1)

        await until(lambda: registry.instances()[0].is_ready and host.jvm("llava-0") != first_jvm)


async def test_a_second_interrupt_leaves_nothing_either(host: Host) -> None:
    """A second interrupt ends at once and leaves no process or folder."""
    async with host.launcher(min_backoff_s=60.0) as (launcher, _):
        await launcher.start(launches(1))
        launcher.kill()

    assert not host.run_dir.exists()


async def test_a_run_directory_that_cannot_be_made_is_an_error(host: Host) -> None:
    """`torchmoor up --run-dir FILE` ends with an error instead of waiting forever."""
    (host.tmp_path / "run").touch()

    async with host.launcher() as (launcher, _):
        with pytest.raises(LaunchError, match="cannot write to the directory"):
            await launcher.start(launches(1))


async def test_a_guard_that_is_killed_takes_its_instance_along(host: Host) -> None:
    """If an instance's guard is killed, its processes end, so that a restart does not meet their memory and ports."""
    async with host.launcher() as (launcher, _registry):
        await launcher.start([Launch("llava-0", "llava", "llava.mar")])
        first = host.jvm("llava-0")

        os.kill(os.getpgid(first), signal.SIGKILL)  # the guard leads the group

        await until(lambda: not is_running(first))
        await until(lambda: host.report("llava-0").exists() and host.jvm("llava-0") != first)


def test_all_that_lies_in_a_folder_is_removed(tmp_path: Path) -> None:
    """Session folders and everything beside them are removed; a missing folder is not an error."""
    folder = tmp_path / "journal"
    for name in ("one", "two"):
        (folder / name).mkdir(parents=True)
        (folder / name / "00000000").write_text("{}")
    (folder / "loose").write_text("")

    remove_folder(folder)
    remove_folder(folder)

    assert not folder.exists()
