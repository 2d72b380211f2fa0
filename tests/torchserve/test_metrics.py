"""The metrics of real workers, as Prometheus reads them."""

import os
import re
import signal
import subprocess
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.torchserve.conftest import ROOT, Fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_sessions import open_session
from tests.waiting import wait_until
from torchmoor.fleet.ports import find_free_ports
from torchmoor.fleet.torchserve import InstanceSpec, TorchServeSettings, environment, prepare

with warnings.catch_warnings():
    warnings.simplefilter("ignore", ResourceWarning)  # TorchServe leaves its version file open
    from handlers.chat.metrics import CHAT_METRICS
    from handlers.torchserve.metrics_publisher import PREFIX
    from handlers.worker.counters import COUNTER, GAUGE

pytestmark = pytest.mark.torchserve


def scrape(address: str) -> dict[str, list[Any]]:
    """Return the samples of a page by name."""
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(requests.get(f"{address}/metrics", timeout=60).text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def total(address: str, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples that have these labels."""
    samples = scrape(address).get(PREFIX + name, [])
    return float(sum(s.value for s in samples if labels.items() <= s.labels.items()))


def test_workers_numbers_reach_prometheus(fleet: Fleet) -> None:
    """TorchServe's metrics port has every metric of the table; the proxy's admin port has them for each instance."""
    chat = open_session(fleet.client(), image=data_url(draw("circle", "red")))
    for _ in range(3):
        chat.ask("What color is the circle?")
    home = fleet.holders(chat.id)[0]
    (instance,) = [i for i in fleet.instances() if i["name"] == home]
    own = f"http://{instance['host']}:{instance['metrics_port']}"

    def agrees(address: str, name: str, group: str, entry: str, **labels: str) -> None:
        """Wait for a metric: a worker's lines reach its page one by one, and the proxy's after that."""
        wait_until(
            lambda: total(address, name, **labels) == fleet.status(home)[group][entry],
            f"{name} at {address} is what the status says",
        )

    assert fleet.status(home)["turns"]["finished"] >= 3
    agrees(own, "turns_total", "turns", "finished", Outcome="finished")
    for metric in CHAT_METRICS:
        name = PREFIX + metric.name + ("" if metric.kind in (COUNTER, GAUGE) else "_count")
        for address in (own, fleet.admin):
            wait_until(lambda at=address, name=name: scrape(at).get(name), f"{address} shows {name}")
    agrees(own, "sessions_open", "sessions", "open")
    agrees(fleet.admin, "kv_bytes", "memory", "kv_bytes", instance=home)
    agrees(fleet.admin, "tokens_total", "tokens", "reused", instance=home, Kind="reused")
    assert total(fleet.admin, "kv_bytes", instance=home) > 0
    assert total(fleet.admin, "tokens_total", instance=home, Kind="reused") > 0
    wait_until(
        lambda: total(own, "queue_seconds_count") >= total(own, "time_to_first_token_seconds_count") >= 3, "the times"
    )
    assert total(own, "time_to_first_token_seconds_sum") > 0
    assert total(fleet.admin, "engine_steps_total", instance=home, ModelName="llava", endpoint="llava") > 0
    assert total(fleet.admin, "pump_rounds_total", instance=home, ModelName="llava", endpoint="llava") > 0
    assert {s.labels["instance"] for s in scrape(fleet.admin)["InstanceScraped"]} == {"llava-0", "llava-1"}
    assert scrape(fleet.admin)["Invocations_total"]
    chat.close()


def test_metrics_follow_a_worker_at_rest(fleet: Fleet) -> None:
    """The last request's changes are published even if TorchServe does not call the worker again."""
    chat = open_session(fleet.client(), image=data_url(draw("square", "blue")))
    home = fleet.holders(chat.id)[0]
    chat.close()
    num_closed = fleet.status(home)["sessions"]["closed"]

    wait_until(
        lambda: total(fleet.admin, "sessions_total", instance=home, Event="closed") == num_closed, "the closed session"
    )


@pytest.mark.slow
def test_bare_torchserve_shows_them_too(archives: Path, tmp_path: Path) -> None:
    """The repository's configuration gives a bare TorchServe the same metrics; only the ports differ here."""
    ports = find_free_ports(5)
    spec = InstanceSpec(
        name="bare", endpoint="", archive="llava.mar", folder=tmp_path, ports=tuple(ports), environment={}
    )
    settings = TorchServeSettings(model_store=archives)
    command = prepare(spec, settings)
    config = (ROOT / "config.properties").read_text()
    for usual, port in zip((8080, 8081, 8082), ports, strict=False):
        config, count = re.subn(rf"^(\w+_address=.*):{usual}$", rf"\1:{port}", config, flags=re.MULTILINE)
        assert count == 1
    config += f"\ngrpc_inference_port={ports[3]}\ngrpc_management_port={ports[4]}\n"
    (tmp_path / "config.properties").write_text(config)
    own = f"http://127.0.0.1:{ports[2]}"

    with (tmp_path / "console.log").open("w") as console:
        process = subprocess.Popen(
            command,
            cwd=tmp_path / "work",
            env=environment(spec, settings),
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(lambda: _has_sessions(own, process), "the worker's metrics")
        # A worker's lines reach the page one by one.
        wait_until(lambda: scrape(own).get(PREFIX + "turns_total"), "the turns", interval_s=0.1)
        assert {s.labels["ModelName"] for s in scrape(own)[PREFIX + "turns_total"]} == {"llava"}
    finally:
        os.kill(int(spec.pid_file.read_text()), signal.SIGTERM)  # the JVM; the process that we started waits for it
        try:
            process.wait(timeout=30)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _has_sessions(address: str, process: "subprocess.Popen[bytes]") -> bool:
    assert process.poll() is None, "TorchServe ended"
    try:
        return total(address, "sessions_max") == 1024
    except requests.ConnectionError:
        return False
