"""`torchmoor serve` as a process with instances that already run."""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore.config import Config
from click.testing import CliRunner

from tests.proxy.conftest import KEY, make_session_id
from tests.proxy.fake_instance import FakeInstance, Gate, Received, Wire, answering
from tests.waiting import DEADLINE_S, wait_until
from torchmoor.cli.main import main


@pytest.fixture
def fakes() -> Iterator[list[FakeInstance]]:
    """Yield two instances in their own loop."""
    instances = [FakeInstance("a"), FakeInstance("b")]
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="instances", daemon=True)
    thread.start()

    def run(work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(60)

    for instance in instances:
        run(instance.start())
    yield instances
    for instance in instances:
        run(instance.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.close()


def write_config(path: Path, fakes: list[FakeInstance], **changes: Any) -> Path:
    variants = [{"VariantName": f"v{fake.name}", "ModelName": f"model-{fake.name}"} for fake in fakes]
    content = {
        "Endpoints": [{"EndpointConfig": {"EndpointConfigName": "chat", "ProductionVariants": variants}}],
        "Instances": [{"name": fake.name, "variant": f"v{fake.name}", "port": fake.port} for fake in fakes],
        "listen": {"port": 0, "admin_port": 0},
        "health": {"starting_interval_s": 0.02},
        **changes,
    }
    path.write_text(yaml.safe_dump(content))
    return path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torchmoor", "serve", *arguments]


def wait_healthy(admin: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            with urllib.request.urlopen(f"{admin}/healthz", timeout=60):
                return
        except urllib.error.HTTPError as error:
            error.close()
            assert time.monotonic() < deadline, "the instances never became ready"
            time.sleep(0.02)


def test_serve_joins_running_instances_and_stops_at_a_signal(fakes: list[FakeInstance], tmp_path: Path) -> None:
    """Variants and session keys apply, one line of JSON is printed, the log can rotate, and the exit status is 0."""
    log = tmp_path / "access.jsonl"
    path = write_config(tmp_path / "torchmoor.yaml", fakes, observe={"access_log": str(log)})
    environment = {**os.environ, "TORCHMOOR_SESSION_KEYS": f"k1:{KEY.hex()}"}
    with subprocess.Popen(
        command("--config", str(path)), stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            where = json.loads(process.stdout.readline())
            assert (where["ready"], where["endpoints"]) == (True, ["chat"])
            wait_healthy(where["admin"])
            client = boto3.client(
                "sagemaker-runtime",
                endpoint_url=where["runtime"],
                region_name="us-east-1",
                aws_access_key_id="AKIAEXAMPLE",
                aws_secret_access_key="secret",
                config=Config(retries={"total_max_attempts": 1}, read_timeout=DEADLINE_S),
            )
            for variant, fake in zip(("va", "vb"), fakes, strict=True):
                answer = client.invoke_endpoint(EndpointName="chat", Body=b"{}", TargetVariant=variant)
                assert answer["InvokedProductionVariant"] == variant
                assert fake.received[-1].path == f"/predictions/model-{fake.name}"
            session = make_session_id("b", endpoint="chat")
            answer = client.invoke_endpoint(EndpointName="chat", Body=b"{}", SessionId=session)
            assert answer["InvokedProductionVariant"] == "vb"
            client.close()
            wait_until(lambda: log.read_bytes().count(b"\n") == 3, "three lines in the access log")
            log.rename(tmp_path / "access.jsonl.1")
            process.send_signal(signal.SIGHUP)
            wait_until(log.exists, "the new access log")
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limits": {"max_conections": 5}}, "limits: unknown key 'max_conections'"),
        ({"listen": {"host": "0.0.0.0"}}, "--no-auth"),
        ({"listen": {"admin_host": "0.0.0.0"}}, "TORCHMOOR_ADMIN_TOKEN"),
        ({"listen": {"port": 9080}}, "listen.admin_port and listen.port are both 9080"),
        ({"listen": {"port": 9080, "host": "0.0.0.0"}}, "listen.admin_port and listen.port are both 9080"),
        ({"access": {"keys_file": "/nowhere/keys"}}, "cannot read /nowhere/keys"),
        ({"access": {"allows_unsigned_payload": 1}}, "access.allows_unsigned_payload must be true or false"),
        ({"observe": {"access_log": "/nowhere/log"}}, "cannot append to /nowhere/log"),
        ({"listen": {"tls_certificate": "a.pem", "tls_key": "/nowhere/key"}}, "cannot read /nowhere/key"),
    ],
)
@pytest.mark.parametrize("is_check", [False, True])
def test_what_is_wrong_is_told_before_anything_listens(
    fakes: list[FakeInstance], tmp_path: Path, changes: dict[str, Any], message: str, is_check: bool
) -> None:
    """A wrong configuration gives exit status 1 and one line on standard error before listening.

    --check does the same.
    """
    path = write_config(tmp_path / "torchmoor.yaml", fakes, **changes)

    result = CliRunner().invoke(main, ["serve", "--config", str(path), *(["--check"] if is_check else [])])

    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_check_tells_what_would_be_served_and_what_is_probably_not_meant(
    fakes: list[FakeInstance], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check does not listen, because a running proxy may use the port."""
    monkeypatch.delenv("TORCHMOOR_SESSION_KEYS", raising=False)
    path = write_config(tmp_path / "torchmoor.yaml", fakes, listen={"port": fakes[0].port, "admin_port": 0})
    content = yaml.safe_load(path.read_text())
    del content["Instances"][1]
    content["limits"] = {"spool_folder": str(tmp_path / "gone")}
    incomplete = tmp_path / "incomplete.yaml"
    incomplete.write_text(yaml.safe_dump(content))

    warned = CliRunner().invoke(main, ["serve", "--config", str(incomplete), "--check"])
    monkeypatch.setenv("TORCHMOOR_SESSION_KEYS", f"k1:{KEY.hex()}")
    good = CliRunner().invoke(main, ["serve", "--config", str(path), "--check"])

    assert json.loads(warned.stdout) == {"ok": True, "endpoints": {"chat": {"va": ["a"], "vb": []}}}
    assert "TORCHMOOR_SESSION_KEYS is not set: a session will be known only to the process" in warned.stderr
    assert "variant vb of endpoint chat has no instance: see Instances and Discovery" in warned.stderr
    assert f"limits.spool_folder {tmp_path / 'gone'} is not a folder that can be written" in warned.stderr
    assert (good.exit_code, good.stderr) == (0, "")
    assert json.loads(good.stdout)["endpoints"] == {"chat": {"va": ["a"], "vb": ["b"]}}


@pytest.mark.usefixtures("own_signals")
def test_taken_port_is_an_error(fakes: list[FakeInstance], tmp_path: Path) -> None:
    path = write_config(tmp_path / "torchmoor.yaml", fakes, listen={"port": fakes[0].port, "admin_port": 0})

    result = CliRunner().invoke(main, ["serve", "--config", str(path)])

    assert (result.exit_code, result.stdout) == (1, "")
    assert f"cannot listen on http://127.0.0.1:{fakes[0].port}: the port is in use" in result.stderr
    assert "give another --port (in a configuration file: listen)" in result.stderr


@contextmanager
def serving(
    path: Path, log: Path, *, within: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run the process; yield it and its address. Its standard error goes to the log. within: a command that runs it."""
    environment = {**os.environ, "TORCHMOOR_SESSION_KEYS": f"k1:{KEY.hex()}"}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [*within, *command("--config", str(path))],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        ) as process,
    ):
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


def test_few_descriptors_serve_the_clients_that_fit(fakes: list[FakeInstance], tmp_path: Path) -> None:
    """The proxy raises its limit of open files, and reserves enough for connections to instances."""
    path = write_config(tmp_path / "serve.yaml", fakes, limits={"reserved_descriptors": 100})
    log = tmp_path / "log"
    within = ("sh", "-c", 'ulimit -S -n 128 && ulimit -H -n 300 && exec "$@"', "sh")

    with serving(path, log, within=within) as (_, where), ExitStack() as stack:
        wait_healthy(where["admin"])
        port = int(where["runtime"].rpartition(":")[2])
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        stack.callback(client.close)
        client.connect()
        for _ in range(500):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S))
        statuses = []
        for _ in range(8):
            client.request("POST", "/endpoints/chat/invocations", b"{}")
            with client.getresponse() as answer:
                answer.read()
                statuses.append(answer.status)
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as late, suppress(ConnectionResetError):
            assert late.recv(12) in (b"HTTP/1.1 503", b"")
        assert set(states(where).values()) == {"ready"}

    assert statuses == [200] * 8
    assert "client connections limited to 75, configured 10000; open files limited to 300" in log.read_text()
    assert "long bodies in files limited to 50" in log.read_text()


def hang_up(process: subprocess.Popen[str], log: Path, message: str) -> None:
    """Make the proxy read the file again; return when the log reports it."""
    num_lines = len(log.read_text().splitlines())
    process.send_signal(signal.SIGHUP)
    wait_until(
        lambda: any(message in line for line in log.read_text().splitlines()[num_lines:]),
        f"{message!r} is logged",
    )


def invoke(where: dict[str, Any], token: str) -> tuple[int, str]:
    """Return the status and the instance that answered."""
    request = urllib.request.Request(
        f"{where['runtime']}/endpoints/chat/invocations", b"{}", {"Authorization": f"Bearer {token}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers["X-Torchmoor-Instance"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""


def states(where: dict[str, Any]) -> dict[str, str]:
    with urllib.request.urlopen(f"{where['admin']}/instances", timeout=60) as answer:
        return {instance["name"]: instance["state"] for instance in json.load(answer)["instances"]}


def test_sighup_changes_instances_and_keys_and_harms_no_request(fakes: list[FakeInstance], tmp_path: Path) -> None:
    """A reload adds and removes instances and tokens without failing a request.

    A removed instance finishes its work first. A file that is wrong, or changes what is fixed at the start, is
    reported in the log and changes nothing.
    """
    a = fakes[0]
    keys, path, log = tmp_path / "keys", tmp_path / "torchmoor.yaml", tmp_path / "log"
    old, new = "old-token-of-alice", "new-token-of-alice"

    def write(names: str, token: str, **changes: Any) -> None:
        keys.write_text(f"token alice {token}\n")
        keys.chmod(0o600)
        variants = [{"VariantName": "v", "ModelName": "llava"}]
        endpoint = {"EndpointConfig": {"EndpointConfigName": "chat", "ProductionVariants": variants}}
        instances = [{"name": fake.name, "port": fake.port} for fake in fakes if fake.name in names]
        access = {"access": {"keys_file": str(keys)}}
        write_config(path, fakes, Endpoints=[endpoint], Instances=instances, **access, **changes)

    write("a", old)
    with serving(path, log) as (process, where):
        wait_until(lambda: states(where) == {"a": "ready"}, "a is ready")
        a.behave = hold = Held()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(invoke, where, old)
            hold.wait_reached()

            write("b", new)
            hang_up(process, log, "configuration read again")
            wait_until(lambda: states(where) == {"a": "draining", "b": "ready"}, "b comes, a goes")
            assert invoke(where, new) == (200, "b")
            assert invoke(where, old)[0] == 403
            hold.open()
            assert running.result(DEADLINE_S) == (200, "a")
        wait_until(lambda: states(where) == {"b": "ready"}, "a is gone")

        write("a", old, limits={"max_conections": 5})
        hang_up(process, log, "limits: unknown key 'max_conections'")
        write("a", old, limits={"max_connections": 5})
        hang_up(process, log, "a change of limits needs a restart")
        assert states(where) == {"b": "ready"}
        assert invoke(where, new) == (200, "b")

        a.behave = answering()
        write("ab", new)
        hang_up(process, log, "configuration read again")
        wait_until(lambda: states(where) == {"a": "ready", "b": "ready"}, "a is back")


class Held(Gate):
    """Answers when the test permits."""

    async def __call__(self, request: Received, wire: Wire) -> None:
        await self.pass_through()
        await wire.answer()
