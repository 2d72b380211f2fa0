"""Fleets for this folder, run with `torchmoor up` as a user does: `fleet`, and others that tests kill."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import boto3
import pytest
import requests
from botocore.config import Config

from tests.http_servers import QuietHandler, serve_http
from tests.torchserve.drawings import draw
from tests.torchserve.scripted.scripted_model import NO_THOUGHT
from torchmoor.fleet.archives import with_model, write_archive

ROOT = Path(__file__).resolve().parents[2]
SMALL_KV_BYTES = 4_000_000  # 244 blocks of the demo model: twelve turns at once, or the caches of some sixty sessions
SMALL_IN_FLIGHT = 24
# Fetches of images end when a test ends them, however busy the machine is.
PATIENT_INTAKE = {f"TORCHMOOR_HANDLER_INTAKE_{name}_TIMEOUT_S": "300" for name in ("READ", "TOTAL", "FETCHING")}
SCRIPTED_NAME = "scripted-gpt-5"  # llm-comply asks only models of such names to reason


@dataclass(frozen=True)
class Fleet:
    """The addresses of a running fleet."""

    runtime: str
    admin: str
    process: "subprocess.Popen[str]"  # a with block ends it
    run_dir: Path

    def client(self, config: Config | None = None) -> Any:
        """Return boto3's own client, configured with the address only."""
        return boto3.client(
            "sagemaker-runtime",
            endpoint_url=self.runtime,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
            config=config or Config(retries={"mode": "standard", "max_attempts": 1}, read_timeout=90),
        )

    def instances(self) -> list[dict[str, Any]]:
        """Return the instances as the admin plane lists them."""
        return requests.get(f"{self.admin}/instances", timeout=60).json()["instances"]

    def settled(self) -> set[str]:
        """Return the instances that get all turns of their sessions, without those that have just returned."""
        return {i["name"] for i in self.instances() if i["state"] == "ready" and i["share"] == 1.0}

    def status(self, name: str) -> dict[str, Any]:
        """Return an instance's own status, requested without the proxy."""
        (instance,) = [i for i in self.instances() if i["name"] == name]
        return requests.post(
            f"http://{instance['host']}:{instance['port']}/predictions/llava",
            headers={"X-Torchmoor-Operation": "status"},
            data=b"{}",
            timeout=60,
        ).json()

    def count(self, group: str, name: str) -> int:
        """Return the sum of a count of all instances."""
        return sum(self.status(each["name"])[group][name] for each in self.instances())

    def holders(self, session_id: str) -> list[str]:
        """Return the instances that report a session as theirs."""
        return [i["name"] for i in self.instances() if session_id in self.status(i["name"])["session_ids"]]


def processes_below(folder: Path) -> list[int]:
    """Return every process whose command line or environment names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in text:
                found.append(int(entry.name))
    return found


TORCHMOOR = Path(sys.executable).with_name("torchmoor")


@contextmanager
def run_fleet(
    *arguments: str,
    run_dir: Path,
    log: Path,
    environment: Mapping[str, str] | None = None,
    program: Path = TORCHMOOR,
    folder: Path = ROOT,
) -> Iterator[Fleet]:
    """Run `torchmoor up` on free ports until the context ends, which stops it as Ctrl-C does.

    environment: variables besides this process's own, which are passed without those that configure AWS clients.
    program: the command. folder: the working directory.

    Fails with its standard error if it does not start or does not end well.
    """
    command = [str(program), "up", "--port", "0", "--admin-port", "0"]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, "--run-dir", str(run_dir), *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**{k: v for k, v in os.environ.items() if not k.startswith("AWS_")}, **(environment or {})},
        )
    with process.stdout:
        line = process.stdout.readline()
        if not line:
            process.wait(timeout=30)
            pytest.fail(f"torchmoor up ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        ready = json.loads(line)
        assert ready["ready"] is True
        try:
            yield Fleet(ready["runtime"], ready["admin"], process, run_dir)
        finally:
            was_running = process.poll() is None
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=60)
            finally:
                process.kill()
                process.wait(timeout=60)
        if was_running:
            assert process.returncode == 0, log.read_text()[-4000:]


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Fleet], Any]:
    """Return a function that makes boto3's clients, which know a fleet by AWS_ENDPOINT_URL only."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)

    def make(service: str, fleet: Fleet) -> Any:
        monkeypatch.setenv("AWS_ENDPOINT_URL", fleet.runtime)
        return boto3.client(service, config=Config(retries={"total_max_attempts": 1}, read_timeout=90))

    return make


@pytest.fixture(scope="session")
def archives() -> Path:
    """Return model_store/ with archives of the current code."""
    subprocess.run([sys.executable, ROOT / "scripts" / "build_archives.py"], check=True, timeout=120)
    return ROOT / "model_store"


@pytest.fixture(scope="package")
def fleet(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run two instances that may fetch images from this machine."""
    folder = tmp_path_factory.mktemp("fleet")
    with run_fleet(
        *("--instances", "2", "--allow-image-host", "127.0.0.1"),
        run_dir=folder / "run",
        log=folder / "up.log",
        environment=PATIENT_INTAKE,
    ) as running:
        yield running


@pytest.fixture(scope="package")
def small(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run one instance with little memory and a small batch; test_killed_fleet.py kills it when others have used it."""
    with run_small(tmp_path_factory.mktemp("small"), "first.log") as running:
        yield running


@dataclass(frozen=True)
class Three:
    """A fleet of three instances, which tests of several files break and the launcher repairs."""

    fleet: Fleet
    run_dir: Path
    journal: Path


@pytest.fixture(scope="package")
def three(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    """Run the fleet; after Ctrl-C, no processes of it remain, and only the files of asynchronous requests."""
    folder = tmp_path_factory.mktemp("three")
    run_dir, journal = folder / "run", folder / "journal"
    arguments = ("--instances", "3", "--journal", journal.as_uri())
    with run_fleet(*arguments, run_dir=run_dir, log=folder / "up.log") as fleet:
        yield Three(fleet, run_dir, journal)
    assert processes_below(run_dir) == []
    assert not run_dir.exists() or {path.name for path in run_dir.iterdir()} <= {"async", "session-keys"}


@contextmanager
def run_small(folder: Path, log: str) -> Iterator[Fleet]:
    """Run the small fleet with a journal and keys that the next fleet in the same folder continues with."""
    handler = {
        "SESSION_KV_BYTES": SMALL_KV_BYTES,
        "SESSION_FEATURES_BYTES": 1 << 19,  # of 13 images
        "SESSION_MAX_SESSIONS": 2048,
        "PUMP_MAX_IN_FLIGHT": SMALL_IN_FLIGHT,
        "INTAKE_NUM_THREADS": 1,
        "JOURNAL_MAX_KV_BYTES": 1 << 30,
        "JOURNAL_KV_IDLE_S": 0,
    }
    environment = {f"TORCHMOOR_HANDLER_{name}": str(value) for name, value in handler.items()}
    arguments = ("--instances", "1", "--capacity", str(SMALL_IN_FLIGHT), "--allow-image-host", "127.0.0.1")
    with run_fleet(
        *(*arguments, "--journal", (folder / "journal").as_uri()),
        run_dir=folder / "run",
        log=folder / log,
        environment={**environment, **PATIENT_INTAKE, "TORCHMOOR_SESSION_KEYS": "k1:" + "5a" * 32},
    ) as running:
        yield running


@pytest.fixture(scope="package")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run one instance of the scripted model, whose template can switch its reasoning off, as that of Qwen 3."""
    folder, demo, own = (
        tmp_path_factory.mktemp("scripted"),
        ROOT / "models" / "tiny-llava",
        ROOT / "tests/torchserve/scripted",
    )
    template = folder / "chat_template.jinja"
    switch = f"{{% if enable_thinking is false %}}{{{{ {NO_THOUGHT!r} }}}}{{% endif %}}"
    template.write_text((demo / "chat_template.jinja").read_text() + switch)
    model = {path.name: path for path in demo.iterdir() if path.is_file()} | {template.name: template}
    contents = with_model(str(own / "handler.py"), "chat.yaml", model)
    contents = replace(contents, files={**contents.files, "scripted_model.py": own / "scripted_model.py"})
    (folder / "store").mkdir()
    write_archive(contents, SCRIPTED_NAME, folder / "store" / f"{SCRIPTED_NAME}.mar")
    arguments = ("--model-store", str(folder / "store"), "--endpoint", SCRIPTED_NAME)
    with run_fleet(*arguments, run_dir=folder / "run", log=folder / "up.log") as fleet:
        yield fleet


@pytest.fixture
def picture_server() -> Iterator[str]:
    """Serve an image and a text; other paths are 404."""
    files = {"/circle.png": draw("circle", "red"), "/text.png": b"no picture at all"}

    class Files(QuietHandler):
        def do_GET(self) -> None:
            body = files.get(self.path)
            self.reply(404 if body is None else 200, body or b"")

    with serve_http(Files) as url:
        yield url
