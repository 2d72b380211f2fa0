"""Run `torchmoor serve` in several processes, and fake instances that hold their answers until a test releases them."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.processes import children_of, is_running
from tests.proxy.conftest import KEY
from tests.proxy.fake_instance import FakeInstance, Received, Wire
from tests.waiting import wait_until

TIMEOUT_S = 60.0


class Holding:
    """Instances in their own loop that answer with their names, at once or when released."""

    def __init__(self, names: Sequence[str]) -> None:
        self.fakes = {name: FakeInstance(name, behave=self._make_behaviour(name)) for name in names}
        self.running = dict.fromkeys(names, 0)
        self.most = dict.fromkeys(names, 0)
        self._loop = asyncio.new_event_loop()
        self._held: dict[str, list[asyncio.Event]] = {name: [] for name in names}
        self._is_holding = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="instances", daemon=True)

    def _make_behaviour(self, name: str) -> Any:
        async def behave(request: Received, wire: Wire) -> None:
            self.running[name] += 1
            self.most[name] = max(self.most[name], self.running[name])
            try:
                if self._is_holding:
                    event = asyncio.Event()
                    self._held[name].append(event)
                    await event.wait()
            finally:
                self.running[name] -= 1
            await wire.answer(body=name.encode())

        return behave

    def run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    def hold(self) -> None:
        """Make all later answers wait."""
        self._is_holding = True

    def release(self, name: str | None = None) -> None:
        """Release the request that an instance has held longest; without a name, release all and stop holding."""

        async def let_go() -> None:
            if name is not None:
                self._held[name].pop(0).set()
                return
            self._is_holding = False
            for events in self._held.values():
                for event in events:
                    event.set()
                events.clear()

        self.run(let_go())

    @property
    def num_held(self) -> int:
        return sum(self.running.values())

    def __enter__(self) -> Holding:
        self._thread.start()
        for fake in self.fakes.values():
            self.run(fake.start())
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
        for fake in self.fakes.values():
            self.run(fake.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()


class Served:
    """A running `torchmoor serve`."""

    def __init__(self, process: subprocess.Popen[str], where: dict[str, Any]) -> None:
        self.process = process
        self.port = int(where["runtime"].rpartition(":")[2])
        self.admin: str = where["admin"]
        self._connections: list[http.client.HTTPConnection] = []

    def children(self) -> list[int]:
        """Return the proxy processes."""
        return children_of(self.process.pid)

    def connect(self) -> http.client.HTTPConnection:
        """Open a new connection, closed with the others; the kernel chooses which process accepts it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        self._connections.append(connection)
        return connection

    def hang_up(self) -> None:
        """Close the connections that a failed test or a killed process left open."""
        while self._connections:
            self._connections.pop().close()

    def send(self, endpoint: str = "chat", **headers: str) -> http.client.HTTPConnection:
        """Send a request on a new connection without reading its answer."""
        connection = self.connect()
        connection.request("POST", f"/endpoints/{endpoint}/invocations", body=b"{}", headers=headers)
        return connection

    def ask(self, endpoint: str = "chat", **headers: str) -> str:
        """Return the name of the instance that answers; assert that one does."""
        return read(self.send(endpoint, **headers))

    def instances(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in self.look("instances")["instances"]}

    def look(self, path: str) -> Any:
        """Return the admin plane's answer at this path."""
        with urllib.request.urlopen(f"{self.admin}/{path}", timeout=TIMEOUT_S) as answer:
            return json.load(answer)

    def outstanding(self) -> int:
        return sum(row["outstanding"] for row in self.instances().values())

    def move(self, name: str, verb: str) -> None:
        self.post(f"instances/{name}/{verb}")

    def post(self, path: str) -> None:
        """Post an order to the admin plane; assert that it succeeds."""
        url = f"{self.admin}/{path}"
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=TIMEOUT_S):
            pass

    def count(self, metric: str) -> float:
        """Return a counter's sum over all endpoints."""
        with urllib.request.urlopen(f"{self.admin}/metrics", timeout=TIMEOUT_S) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            return sum(s.value for family in families for s in family.samples if s.name in (metric, f"{metric}_total"))

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.admin}/healthz", timeout=TIMEOUT_S):
                return True
        except urllib.error.HTTPError as error:
            error.close()
            return False


def read(connection: http.client.HTTPConnection) -> str:
    """Return the answer's body; assert that the status is 200."""
    status, body = read_any(connection)
    assert status == 200, body
    return body


def read_any(connection: http.client.HTTPConnection) -> tuple[int, str]:
    """Return the answer's status and body; close its connection even if no answer comes."""
    with closing(connection), connection.getresponse() as answer:
        return answer.status, answer.read().decode()


@contextmanager
def serving(path: Path, processes: int, *, keys: str = f"k1:{KEY.hex()}") -> Iterator[Served]:
    """Start `torchmoor serve`; assert at exit that it and all its processes end when asked to."""
    command = [sys.executable, "-m", "torchmoor", "serve", "--config", str(path), "--processes", str(processes)]
    environment = {**os.environ, "TORCHMOOR_SESSION_KEYS": keys}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        served: Served | None = None
        children: list[int] = []
        try:
            served = Served(process, json.loads(process.stdout.readline()))
            wait_until(served.is_healthy, "every endpoint has a ready instance")
            yield served
        finally:
            if served is not None:
                children = served.children()
                served.hang_up()
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            process.wait(TIMEOUT_S)
            wait_until(lambda: not any(map(is_running, children)), "all processes are gone")


def serve_in_vain(path: Path) -> subprocess.CompletedProcess[str]:
    """Run a `torchmoor serve` of two processes that must refuse to start."""
    return subprocess.run(
        [sys.executable, "-m", "torchmoor", "serve", "--config", str(path), "--processes", "2"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def write_config(path: Path, endpoints: dict[str, Sequence[FakeInstance]], **changes: Any) -> Path:
    """Write a configuration with these endpoints' instances.

    The endpoint `late` uses late binding with one request at a time; `many` has many models.
    """
    content = {
        "Endpoints": [
            {
                "EndpointConfig": {
                    "EndpointConfigName": name,
                    "ProductionVariants": [
                        {
                            "VariantName": "v",
                            "ModelName": name,
                            "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
                        }
                    ],
                },
                **({"late_binding": {"max_wait_s": 60.0}} if name == "late" else {}),
                **({"MultiModelConfig": {"ModelCacheSetting": "Enabled"}} if name == "many" else {}),
            }
            for name in endpoints
        ],
        "Instances": [
            {"name": fake.name, "endpoint": name, "port": fake.port, "capacity": 1 if name == "late" else 64}
            for name, fakes in endpoints.items()
            for fake in fakes
        ],
        "listen": {"port": 0, "admin_port": 0},
        "health": {"starting_interval_s": 0.05},
        **changes,
    }
    path.write_text(yaml.safe_dump(content))
    return path
