"""`torchmoor up` without a JVM: refusals, messages and its end."""

import asyncio
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.archives import write_small_archive
from tests.processes import is_running
from tests.unit.torchmoor.fleet import stub_torchserve
from tests.waiting import DEADLINE_S, wait_until
from torchmoor.config.launcher import LaunchSettings
from torchmoor.config.listen import ListenSettings
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.config.up import UpSettings
from torchmoor.errors import ConfigError
from torchmoor.fleet import instance_process
from torchmoor.fleet.health import HealthChecker
from torchmoor.fleet.instance_guard import LOCK_FILE
from torchmoor.fleet.torchserve import InstanceSpec, Launch, TorchServeSettings, prepare
from torchmoor.proxy.instances.instance import Instance
from torchmoor.run.checkpoints import Checkpoint
from torchmoor.run.gpus import find_gpus, share_gpus, usable_gpus
from torchmoor.run.launching import plan_instances
from torchmoor.run.run_directory import find_session_keys
from torchmoor.run.up import equip, run
from torchmoor.wire.handler_variables import ALLOWED_HOSTS, DEVICE_FRACTION, MODEL_PATH
from torchmoor.wire.session_ids import KEYS_VARIABLE


@pytest.fixture
def options(tmp_path: Path) -> UpSettings:
    """Return options for two instances on free ports, with an archive without handlers."""
    (tmp_path / "store").mkdir()
    write_small_archive(tmp_path / "store" / "llava.mar")
    return UpSettings(
        endpoints=("llava",),
        instances=2,
        listen=ListenSettings(port=0, admin_port=0),
        launch=LaunchSettings(model_store=str(tmp_path / "store"), run_dir=str(tmp_path / "run"), start_timeout_s=60),
        strategy="RANDOM",
    )


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """Run a stub in place of TorchServe; return the environment of each instance."""
    given: dict[str, dict[str, str]] = {}

    def stub(spec: InstanceSpec, settings: TorchServeSettings) -> list[str]:
        prepare(spec, settings)
        given[spec.name] = dict(spec.environment)
        report = tmp_path / f"{spec.name}.pids"
        return [sys.executable, stub_torchserve.__file__, "heed", str(spec.pid_file), str(report)]

    async def ask(self: HealthChecker, instance: Instance) -> bool | None:
        return (tmp_path / f"{instance.name}.pids").exists()

    monkeypatch.setattr(instance_process, "prepare", stub)
    monkeypatch.setattr(HealthChecker, "ask", ask)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    return given


def serve(options: UpSettings, number: signal.Signals = signal.SIGTERM) -> tuple[list[str], list[str]]:
    """Run until all is ready, then send this process the signal; return the announcement and the reports."""
    recorded: list[str] = []
    announced: list[str] = []
    reported: list[str] = []

    def announce(line: str) -> None:
        announced.append(line)
        os.kill(os.getpid(), number)

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await run(options, reported.append, recorded.append, announce)

    asyncio.run(bounded())
    assert recorded == announced
    return announced, reported


async def test_it_is_recorded_and_can_be_stopped_before_its_instances_are_ready(
    options: UpSettings, environments: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torchmoor status`, `logs` and `stop` find a fleet that is starting, which may take minutes."""
    recorded: list[str] = []
    announced: list[str] = []

    def record(line: str) -> None:
        recorded.append(line)
        os.kill(os.getpid(), signal.SIGTERM)

    async def find_no_worker(self: HealthChecker, instance: Instance) -> bool | None:
        return False

    monkeypatch.setattr(HealthChecker, "ask", find_no_worker)
    await run(options, lambda line: None, record, announced.append)

    assert [json.loads(line)["endpoints"] for line in recorded] == [["llava"]]
    assert announced == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_announces_once_and_a_signal_ends_it_without_a_trace(
    options: UpSettings, environments: dict[str, dict[str, str]], tmp_path: Path, number: signal.Signals
) -> None:
    """One line of JSON has all addresses; after Ctrl-C no process and no folder is left."""
    announced, reported = serve(options, number)

    (line,) = announced
    said = json.loads(line)
    assert {"ready", "runtime", "admin", "endpoints", "run_dir"} == said.keys()
    assert said["ready"] is True
    assert said["endpoints"] == ["llava"]
    assert said["run_dir"] == str(tmp_path / "run")
    assert said["runtime"].startswith("http://127.0.0.1:")
    assert said["runtime"] != said["admin"]
    assert reported[-1] == "stopping"
    pids = [int(pid) for path in tmp_path.glob("*.pids") for pid in path.read_text().split()]
    assert len(pids) == 6
    wait_until(lambda: not any(map(is_running, pids)), "nothing runs")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_fleet_that_waits_for_an_earlier_one(tmp_path: Path, number: signal.Signals) -> None:
    """A signal also ends a fleet normally that still waits for an earlier one. SIGHUP does not: nothing is reloaded."""
    lock = tmp_path / LOCK_FILE
    with lock.open("wb") as earlier:
        fcntl.flock(earlier, fcntl.LOCK_EX)
        command = [
            sys.executable,
            "-m",
            "torchmoor",
            "up",
            "--port",
            "0",
            "--admin-port",
            "0",
            "--run-dir",
            str(tmp_path),
        ]
        waiting = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert "waiting for the earlier fleet" in waiting.stderr.readline()

        waiting.send_signal(signal.SIGHUP)
        waiting.send_signal(number)

        assert waiting.communicate(timeout=DEADLINE_S) == (None, "")
        assert waiting.returncode == 0
        assert list(tmp_path.iterdir()) == [lock]


def test_a_refused_fleet_leaves_no_directory(
    options: UpSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused fleet removes its temporary run directory if it is empty."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    everywhere = ListenSettings(host="0.0.0.0", port=0, admin_port=0)

    with pytest.raises(ConfigError):
        asyncio.run(run(options.replace(listen=everywhere, launch=LaunchSettings()), lambda line: None, print, print))

    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_several_proxy_processes_have_one_launcher(
    options: UpSettings, environments: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    """One process launches the instances and the other proxy processes know them; at the end no process is left."""
    serve(options.replace(listen=ListenSettings(port=0, admin_port=0, processes=2)))

    pids = [int(pid) for path in tmp_path.glob("*.pids") for pid in path.read_text().split()]
    assert len(pids) == 6
    wait_until(lambda: not any(map(is_running, pids)), "no instance runs")
    assert not (tmp_path / "run").exists()


def test_an_operators_own_journal_stays(
    options: UpSettings, environments: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    """Only the journal that `up` creates itself is deleted with the fleet, not one that an operator configures."""
    event = tmp_path / "run" / "journal" / "session" / "00000000"
    event.parent.mkdir(parents=True)
    event.touch()

    serve(options.replace(journal=(tmp_path / "run" / "journal").as_uri()))

    assert event.exists()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["journal", "session-keys"]


def test_keys_of_an_operators_own_journal_are_kept(
    options: UpSettings, environments: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    """The keys stay with an operator's journal, so that the next fleet continues its sessions.

    Only their owner can read them.
    """
    journaled = options.replace(journal=(tmp_path / "journal").as_uri())

    serve(journaled)
    first = environments["llava-0"][KEYS_VARIABLE]
    serve(journaled)

    assert environments["llava-0"][KEYS_VARIABLE] == first
    assert (tmp_path / "run" / "session-keys").stat().st_mode & 0o777 == 0o600
    (tmp_path / "run" / "session-keys").write_text("")
    with pytest.raises(ConfigError, match=r"session keys in .*session-keys cannot be used"):
        serve(journaled)
    _, reported = serve(journaled.replace(launch=options.launch.replace(run_dir="")))
    assert any("sessions end with this fleet" in line for line in reported)
    assert environments["llava-0"][KEYS_VARIABLE] != first


def test_a_journal_that_does_not_answer_is_reported_at_the_start(
    options: UpSettings, environments: dict[str, dict[str, str]]
) -> None:
    """A journal without an answer is reported, and the fleet starts, since the store may return in time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"redis://user:secret@127.0.0.1:{free.getsockname()[1]}/0"
        announced, reported = serve(options.replace(journal=url))

    assert len(announced) == 1
    assert reported[0].startswith("journal: redis://127.0.0.1:")
    assert "No session can be opened until it can be used" in reported[0]
    assert "secret" not in "".join(reported)


def test_all_instances_sign_with_one_secret_that_is_new_each_time(
    options: UpSettings, environments: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    """All instances and the proxy share a secret, which differs in each run."""
    keys = []
    for _ in range(2):
        serve(options)
        keys += [environment[KEYS_VARIABLE] for environment in environments.values()]
        for path in tmp_path.glob("*.pids"):
            path.unlink()

    assert keys[0] == keys[1]
    assert keys[2] == keys[3]
    assert keys[0] != keys[2]
    kid, _, digits = keys[0].partition(":")
    assert len(kid) == 2
    assert len(bytes.fromhex(digits)) >= 16


def test_keys_of_the_environment_are_used(
    options: UpSettings, environments: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several hosts behind one name need one secret."""
    monkeypatch.setenv(KEYS_VARIABLE, "k7:" + "ab" * 32)

    serve(options)

    assert {"k7:" + "ab" * 32} == {environment[KEYS_VARIABLE] for environment in environments.values()}


def test_allowed_image_hosts_reach_the_handlers(options: UpSettings, environments: dict[str, dict[str, str]]) -> None:
    serve(options.replace(allowed_image_hosts=("127.0.0.1", "10.0.0.0/8")))

    assert environments["llava-0"][ALLOWED_HOSTS] == "127.0.0.1,10.0.0.0/8"


def plan(endpoints: Sequence[str], num_instances: int, gpus: Sequence[str]) -> list[Launch]:
    """Plan this number of instances of each endpoint."""
    settings = [EndpointSettings(name=name, variants=(VariantSettings(model=name),)) for name in endpoints]
    return plan_instances(settings, gpus, num_fixed=num_instances)


def test_instances_are_spread_over_the_gpus() -> None:
    """Instances get one GPU each while there are enough, then in turn, or none without GPUs."""
    assert [launch.gpu for launch in plan(["llava"], 3, ["0", "1"])] == ["0", "1", "0"]
    assert [launch.gpu for launch in plan(["llava"], 2, [])] == [None, None]
    assert [launch.name for launch in plan(["llava"], 2, [])] == ["llava-0", "llava-1"]


def test_every_endpoint_has_its_own_instances() -> None:
    """Each endpoint has instances of its own archive, and all share the GPUs in turn."""
    launches = plan(["llava", "llm"], 2, ["0", "1", "2"])

    assert [launch.name for launch in launches] == ["llava-0", "llava-1", "llm-0", "llm-1"]
    assert [launch.archive for launch in launches] == ["llava.mar", "llava.mar", "llm.mar", "llm.mar"]
    assert [launch.endpoint for launch in launches] == ["llava", "llava", "llm", "llm"]
    assert [launch.gpu for launch in launches] == ["0", "1", "2", "0"]


def test_instances_that_share_a_gpu_share_its_memory() -> None:
    """Instances on one GPU divide its memory, unless an operator sets the share."""
    three_on_two = plan(["llava", "llm", "other"], 1, ["0", "1"])

    assert share_gpus(three_on_two, {}) == {DEVICE_FRACTION: "0.425"}
    assert share_gpus(three_on_two, {DEVICE_FRACTION: "0.3"}) == {}
    assert share_gpus(plan(["llava"], 2, ["0", "1"]), {}) == {}
    assert share_gpus(plan(["llava"], 2, []), {}) == {}


def test_it_serves_several_endpoints(
    options: UpSettings, environments: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    """The announcement lists all endpoints, and each has its instances."""
    write_small_archive(tmp_path / "store" / "llm.mar")

    announced, _ = serve(options.replace(endpoints=("llava", "llm"), instances=1))

    assert json.loads(announced[0])["endpoints"] == ["llava", "llm"]
    assert sorted(environments) == ["llava-0", "llm-0"]


def test_each_model_has_its_own_place(
    options: UpSettings, environments: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    """A model's variable reaches its own instances only, and their archive is written for them."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    checkpoints = (str(tmp_path / "mine"), "hf://org/name")

    announced, _ = serve(options.replace(checkpoints=checkpoints, names=("mine", "Other"), instances=1))

    assert json.loads(announced[0])["endpoints"] == ["llava", "mine", "Other"]
    assert {name: environment.get(MODEL_PATH) for name, environment in environments.items()} == {
        "llava-0": None,
        "mine-0": str(tmp_path / "mine"),
        "other-0": "hf://org/name",
    }


def test_a_model_needs_no_model_store(tmp_path: Path) -> None:
    """The archive of a model has its name and the chat handler, without weights, so a model store is not needed."""
    [launch] = equip(plan(["mine"], 1, []), LaunchSettings(), [Checkpoint("mine", "/models/mine")])

    assert "chat_entry.py" in launch.contents.names()
    assert not [name for name in launch.contents.names() if name.startswith("model/")]


def test_the_demo_model_and_many_models_are_built_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in archives are used only if no model store is given and the default one lacks them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_store").mkdir()

    def contents(settings: LaunchSettings) -> list[bool]:
        return [launch.contents is not None for launch in equip(plan(["llava", "many", "x"], 1, []), settings, [])]

    assert contents(LaunchSettings()) == [True, True, False]
    assert contents(LaunchSettings(model_store=str(tmp_path))) == [False, False, False]
    write_small_archive(tmp_path / "model_store" / "llava.mar")
    assert contents(LaunchSettings()) == [False, True, False]


def fake_nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_gpus_are_counted_as_nvidias_tool_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs are counted by nvidia-smi's lines; other lines, such as MIG slices, do not count."""
    lines = "GPU 0: H200 (UUID: GPU-a)\\n  MIG 1g.18gb Device 0: (UUID: MIG-b)\\nGPU 1: H200 (UUID: GPU-c)\\n"
    fake_nvidia_smi(tmp_path, f"printf '{lines}'", monkeypatch)

    assert find_gpus({}) == ["0", "1"]


@pytest.mark.parametrize(("build", "gpus"), [("2.13.0+cpu", []), ("2.13.0", ["0"]), ("2.13.0+cu126", ["0"])])
def test_a_build_of_torch_for_the_cpu_uses_no_gpu(
    build: str, gpus: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a CPU build of torch no GPU is assigned, because the worker would not start.

    The warning says what to install.
    """
    monkeypatch.setattr("torchmoor.run.gpus.version", lambda name: build)

    assert usable_gpus({"CUDA_VISIBLE_DEVICES": "0"}, LaunchSettings()) == gpus

    assert ("pip install --force-reinstall torch==2.13.0" in caplog.text) == (gpus == [])


def test_gpus_are_given_in_groups_to_a_python_of_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's own Python, with its own torch, gets GPUs in whole groups; remaining GPUs are not used."""
    monkeypatch.setattr("torchmoor.run.gpus.version", lambda name: "2.13.0+cpu")
    launch = LaunchSettings(python="/opt/vllm/bin/python", gpus_per_instance=2)

    assert usable_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4"}, launch) == ["0,1", "2,3"]


def test_a_tool_without_a_driver_means_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi without a driver, as in some images, means that there is no GPU."""
    fake_nvidia_smi(tmp_path, "echo 'NVIDIA-SMI has failed'; exit 9", monkeypatch)

    assert find_gpus({}) == []


def test_a_tool_that_hangs_means_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nvidia-smi hangs, as with a failed GPU, the command continues without GPUs."""

    def hang(*arguments: object, **options: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    monkeypatch.setattr("torchmoor.run.gpus.shutil.which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr("torchmoor.run.gpus.subprocess.run", hang)

    assert find_gpus({}) == []


def test_a_limit_on_the_visible_gpus_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES, also with no GPU, is respected."""
    fake_nvidia_smi(tmp_path, "printf 'GPU 0: a\\nGPU 1: b\\n'", monkeypatch)

    assert find_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "3"}) == ["3"]


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("-1", []),
        ("1,-1,0", ["1"]),
        ("NoDevFiles", []),
        ("GPU-3f, MIG-a/1/0,x", ["GPU-3f", "MIG-a/1/0"]),
        ("0,,1", ["0"]),
    ],
)
def test_visible_gpus_end_at_a_name_that_cuda_does_not_know(visible: str, gpus: list[str]) -> None:
    """CUDA ignores an invalid name and all after it; -1 is the usual way to hide all GPUs."""
    assert find_gpus({"CUDA_VISIBLE_DEVICES": visible}) == gpus


def test_fewer_gpus_than_an_instance_needs_are_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Instances that get no GPU because too many are demanded for each would run on the CPU unnoticed."""
    monkeypatch.setattr("torchmoor.run.gpus.version", lambda name: "2.13.0")

    assert usable_gpus({"CUDA_VISIBLE_DEVICES": "0"}, LaunchSettings(gpus_per_instance=2)) == []

    assert "gpus_per_instance is 2, and 1 GPU can be used: instances run without one" in caplog.text


def test_kept_keys_survive_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is on the disk before it gets its name, as no fleet starts with an empty one, and then the name."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)

    find_session_keys(tmp_path, is_kept=True)

    assert synced == [(tmp_path / "session-keys").stat().st_ino, tmp_path.stat().st_ino]
