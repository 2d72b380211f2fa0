"""Asynchronous requests while proxies are killed and instances fail in every way: each request has one result."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.proxy.fake_instance import FakeInstance, Received, Wire
from tests.proxy.processes import Served, serving
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

NUM_REQUESTS = 200
NUM_KILLS = 5
LARGE = 300_000  # too large for the queue, so it is stored beside the results


def answer_to(body: bytes) -> bytes:
    """Return the expected answer to a request; every tenth is large."""
    digest = hashlib.sha256(body).digest()
    return digest * (LARGE // 32) if body.endswith(b"0") else digest


class Unreliable:
    """Runs an instance in its own loop that delays, truncates or omits some of its answers."""

    def __init__(self) -> None:
        self.fake = FakeInstance("a", behave=self._behave)
        self.num_failed = 0
        self._rng = random.Random(11)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    async def _behave(self, request: Received, wire: Wire) -> None:
        dice = self._rng.random()
        await asyncio.sleep(0.05 * self._rng.random())
        if dice > 0.15:
            await wire.answer(body=answer_to(request.body))
            return
        self.num_failed += 1
        if dice > 0.1:
            await wire.answer(503, body=b'{"code": 503, "message": "no worker"}')
        elif dice > 0.05:
            await wire.head(200, {"Content-Length": str(LARGE)})
            await wire.send(b"x" * 1000)
        wire.reset()

    def __enter__(self) -> Unreliable:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.fake.start(), self._loop).result(60)
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self.fake.stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()


@pytest.fixture
def instance() -> Iterator[Unreliable]:
    with Unreliable() as running:
        yield running


def write_config(folder: Path, instance: FakeInstance) -> Path:
    """Configure an asynchronous endpoint with short leases, because lease holders are killed often."""
    content: dict[str, Any] = {
        "Endpoints": [
            {
                "EndpointConfig": {
                    "EndpointConfigName": "chat",
                    "ProductionVariants": [{"VariantName": "v", "ModelName": "m"}],
                    "AsyncInferenceConfig": {
                        "OutputConfig": {},
                        "ClientConfig": {"MaxConcurrentInvocationsPerInstance": 8},
                    },
                }
            }
        ],
        "Instances": [{"name": "a", "port": instance.port}],
        "listen": {"port": 0, "admin_port": 0},
        "recovery": {"max_failures": 1000},
        "async_inference": {
            "queue": f"sqlite://{folder}/queue.db",
            "output_root": (folder / "results").as_uri(),
            "lease_s": 1.0,
            "poll_interval_s": 0.05,
            "min_backoff_s": 0.05,
            "max_attempts": 50,
        },
        "objects": {"output_directories": [str(folder / "results")]},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def submit_all(ports: list[int], accepted: dict[str, bytes]) -> None:
    """Submit as boto3 does: repeat unanswered requests with the same invocation id. The last port is the proxy's."""
    for number in range(NUM_REQUESTS):
        body = b"request %d" % number
        while body not in accepted.values():
            connection = http.client.HTTPConnection("127.0.0.1", ports[-1], timeout=60)
            try:
                headers = {"amz-sdk-invocation-id": f"invocation-{number}"}
                connection.request("POST", "/endpoints/chat/async-invocations", body=body, headers=headers)
                answer = connection.getresponse()
                content = json.loads(answer.read())
                if answer.status == 202:
                    accepted[content["InferenceId"]] = body
            except (OSError, http.client.HTTPException):  # no process listens there, or it has just been killed
                time.sleep(0.02)
            finally:
                connection.close()


@pytest.mark.parametrize("processes", [1, 2])
def test_every_request_has_its_one_result(instance: Unreliable, tmp_path: Path, processes: int) -> None:
    """Every accepted request of hundreds has its own answer despite kills and failures.

    Proxies are killed during submits, attempts, decisions and publications, and an instance fails one attempt of
    seven. No request has a failure object, and all staged files are removed.
    """
    rng = random.Random(processes)
    outputs = tmp_path / "results/async-endpoint-outputs/chat"
    accepted: dict[str, bytes] = {}

    def num_results() -> int:
        return len(list(outputs.glob("*.out")))

    def kill_at(served: Served, count: int) -> None:
        wait_until(lambda: num_results() >= count, f"{count} results are there")
        victims = [served.process.pid]
        if processes > 1:
            victims = []
            wait_until(lambda: victims.extend(served.children()) or victims, "a process runs")
        with suppress(ProcessLookupError):
            os.kill(rng.choice(victims), signal.SIGKILL)

    path, ports = write_config(tmp_path, instance.fake), [0]
    submitting = threading.Thread(target=submit_all, args=(ports, accepted), daemon=True)
    submitting.start()
    kills = iter(sorted(rng.sample(range(1, NUM_REQUESTS * 3 // 4), NUM_KILLS)))
    if processes > 1:
        with serving(path, processes) as served:
            ports.append(served.port)
            for count in kills:
                kill_at(served, count)
            submitting.join()
            wait_until(lambda: num_results() >= NUM_REQUESTS, "all results are there")
            wait_until(lambda: served.look("async-requests")["decided"] == 0, "all is finished")
    else:
        for count in kills:
            with serving(path, 1) as served:
                ports.append(served.port)
                kill_at(served, count)
        with serving(path, 1) as served:
            ports.append(served.port)
            submitting.join()
            wait_until(lambda: num_results() >= NUM_REQUESTS, "all results are there")
            wait_until(lambda: served.look("async-requests")["decided"] == 0, "all is finished")

    assert instance.num_failed > 0
    assert len(accepted) == NUM_REQUESTS
    found = {path.name.removesuffix(".out"): path for path in outputs.glob("*.out")}
    assert found.keys() == accepted.keys()
    assert all(found[each].read_bytes() == answer_to(body) for each, body in accepted.items())
    everything = {path for path in (tmp_path / "results").rglob("*") if path.is_file()}
    # A file that a killed process was writing remains, but never under a name that is read.
    assert [path for path in everything - set(found.values()) if path.suffix != ".part"] == []
