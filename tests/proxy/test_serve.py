"""`torchmoor serve`, as a process, before instances that run already."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore.config import Config

from tests.proxy.conftest import KEY, make_session_id
from tests.proxy.fake_instance import FakeInstance
from tests.waiting import wait_until

DEADLINE_S = 20.0


@pytest.fixture
def fakes() -> Iterator[list[FakeInstance]]:
    """Two instances in a loop of their own."""
    instances = [FakeInstance("a"), FakeInstance("b")]
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="instances", daemon=True)
    thread.start()

    def run(work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(10)

    for instance in instances:
        run(instance.start())
    yield instances
    for instance in instances:
        run(instance.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
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
            with urllib.request.urlopen(f"{admin}/healthz", timeout=5):
                return
        except urllib.error.HTTPError as error:
            error.close()
            assert time.monotonic() < deadline, "the instances never became ready"
            time.sleep(0.02)


def test_serve_joins_running_instances_and_stops_at_a_signal(fakes: list[FakeInstance], tmp_path: Path) -> None:
    """Variants, session keys of the environment, one line of JSON, a log that is moved away, exit status 0."""
    log = tmp_path / "access.jsonl"
    path = write_config(tmp_path / "torchmoor.yaml", fakes, observe={"access_log": str(log)})
    environment = {**os.environ, "TORCHMOOR_SESSION_KEYS": f"k1:{KEY.hex()}"}
    with subprocess.Popen(
        command("--config", str(path)), stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            where = json.loads(process.stdout.readline())
            assert (where["ready"], where["endpoints"]) == (True, ["chat"])
            wait_healthy(where["admin"])
            client = boto3.client(
                "sagemaker-runtime",
                endpoint_url=where["runtime"],
                region_name="us-east-1",
                aws_access_key_id="AKIAEXAMPLE",
                aws_secret_access_key="secret",
                config=Config(retries={"total_max_attempts": 1}, read_timeout=15),
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limits": {"max_conections": 5}}, "limits: unknown key 'max_conections'"),
        ({"listen": {"host": "0.0.0.0"}}, "--no-auth"),
        ({"listen": {"admin_host": "0.0.0.0"}}, "TORCHMOOR_ADMIN_TOKEN"),
        ({"access": {"keys_file": "/nowhere/keys"}}, "cannot read /nowhere/keys"),
        ({"access": {"allows_unsigned_payload": 1}}, "access.allows_unsigned_payload must be true or false"),
        ({"observe": {"access_log": "/nowhere/log"}}, "cannot append to /nowhere/log"),
        ({"listen": {"tls_certificate": "a.pem", "tls_key": "/nowhere/key"}}, "cannot read /nowhere/key"),
    ],
)
def test_what_is_wrong_is_told_before_anything_listens(
    fakes: list[FakeInstance], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """Exit status 1, one line on standard error, nothing on standard output."""
    path = write_config(tmp_path / "torchmoor.yaml", fakes, **changes)

    result = subprocess.run(
        command("--config", str(path)), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )

    assert (result.returncode, result.stdout) == (1, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_taken_port_is_an_error(fakes: list[FakeInstance], tmp_path: Path) -> None:
    """In the system's words."""
    path = write_config(tmp_path / "torchmoor.yaml", fakes, listen={"port": fakes[0].port, "admin_port": 0})

    result = subprocess.run(
        command("--config", str(path)), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )

    assert (result.returncode, result.stdout) == (1, "")
    assert "cannot listen" in result.stderr
    assert "Traceback" not in result.stderr
