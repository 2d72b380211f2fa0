"""The alerts and the Grafana dashboard of deploy/observability, with a real Prometheus that scrapes a real fleet."""

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from tests.torchserve.conftest import ROOT, Fleet, run_fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_faults import find_jvm
from tests.torchserve.test_sessions import open_session
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.torchserve, pytest.mark.needs("prometheus", "promtool")]
FOLDER = ROOT / "deploy" / "observability"


@pytest.fixture(scope="module")
def fleet(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run an instance that chats and one of many models."""
    folder = tmp_path_factory.mktemp("observed")
    arguments = ("--endpoint", "llava", "--endpoint", "many", "--models", str(ROOT / "models"))
    with run_fleet(*arguments, run_dir=folder / "run", log=folder / "up.log") as running:
        yield running


class Prometheus:
    """A Prometheus of its own, with the deployed rules at a test's pace."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **query: str) -> dict[str, Any]:
        answer = requests.get(f"{self._url}/api/v1/{path}", params=query, timeout=30)
        found: dict[str, Any] = answer.json()
        assert found["status"] == "success", found
        return found["data"]

    def has(self, expression: str) -> bool:
        return bool(self.get("query", query=expression)["result"])

    def firing(self) -> set[str]:
        return {each["labels"]["alertname"] for each in self.get("alerts")["alerts"] if each["state"] == "firing"}


@pytest.fixture(scope="module")
def prometheus(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Run Prometheus with the deployed files, which differ only in address and pace: no alert waits minutes."""
    folder = tmp_path_factory.mktemp("prometheus")
    configuration = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    configuration["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    configuration["scrape_configs"][0]["static_configs"] = [{"targets": [fleet.admin.removeprefix("http://")]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    rules = (FOLDER / "alerts.yml").read_text()
    (folder / "alerts.yml").write_text(re.sub(r"^( +for:) \d+m$", r"\1 1s", rules, flags=re.MULTILINE))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            [
                *("prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"),
                f"--web.listen-address={address}",
            ],
            stderr=log,
        ) as process,
    ):
        running = Prometheus(f"http://{address}")
        try:
            wait_until(lambda: process.poll() is not None or is_ready(address), "Prometheus is ready", interval_s=0.1)
            assert process.poll() is None, (folder / "log").read_text()
            yield running
        finally:
            process.terminate()


def is_ready(address: str) -> bool:
    try:
        return requests.get(f"http://{address}/-/ready", timeout=5).status_code == 200
    except requests.RequestException:
        return False


def dashboard() -> dict[str, Any]:
    return json.loads((FOLDER / "grafana" / "dashboard.json").read_text())


def queries() -> list[str]:
    """Return the dashboard's queries as Grafana sends them, for all endpoints."""
    return [
        target["expr"].replace("$__rate_interval", "1m").replace("$endpoint", ".*")
        for panel in dashboard()["panels"]
        for target in panel.get("targets", [])
    ]


def use(fleet: Fleet) -> None:
    """Hold a conversation, ask one of many models, and make an asynchronous request."""
    client = fleet.client()
    chat = open_session(client, image=data_url(draw("circle", "red")))
    for _ in range(2):
        assert b"".join(chat.stream("What color is the circle?"))
    model = client.invoke_endpoint(
        EndpointName="many", TargetModel="minilm", ContentType="application/json", Body=json.dumps({"inputs": "hello"})
    )
    assert json.load(model["Body"])


def test_alerts_and_configuration_are_valid() -> None:
    """Prometheus' own checks pass, and so do the rules' tests with synthetic series."""
    for arguments in (("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")):
        done = subprocess.run(
            ["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_several_proxies_count_an_instance_and_the_queue_once(tmp_path: Path) -> None:
    """Two proxies, as in Kubernetes, report the same instances and the same queue, and each its own requests."""
    values = {
        'InstanceReady{endpoint="llava", instance="llava-0"}': 1,
        'InstanceReady{endpoint="llava", instance="llava-1"}': 1,
        'InstanceBreaker{endpoint="llava", instance="llava-0"}': 2,
        'ApproximateBacklogSize{endpoint="llava"}': 7,
        'ApproximateAgeOfOldestRequest{endpoint="llava"}': 60,
        'LoadedModelCount{endpoint="llava", instance="llava-0"}': 3,
        'OutstandingInvocations{endpoint="llava", instance="llava-0"}': 4,
    }
    expected = {
        "Ready": ('{endpoint="llava"}', 2),
        "Breakers": ('{instance="llava-0"}', 2),
        "Backlog": ('{endpoint="llava"}', 7),
        "Age of the oldest request": ('{endpoint="llava"}', 60),
        "Models in memory": ('{instance="llava-0"}', 3),
        "Outstanding and waiting requests": ('{instance="llava-0"}', 8),
    }
    series = [
        {"series": name.replace("}", f', pod="{pod}"}}'), "values": f"{value}x2"}
        for name, value in values.items()
        for pod in ("a", "b")
    ]
    tests = [
        {
            "expr": panel["targets"][0]["expr"].replace("$endpoint", ".*"),
            "eval_time": "1m",
            "exp_samples": [{"labels": expected[panel["title"]][0], "value": expected[panel["title"]][1]}],
        }
        for panel in dashboard()["panels"]
        if panel["title"] in expected
    ]
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": tests}]}))

    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, timeout=60, check=False)

    assert len(tests) == len(expected)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_query_of_the_dashboard_returns_data(fleet: Fleet, prometheus: Prometheus) -> None:
    """Each query returns data; a misspelt metric or label would show an empty graph."""
    wait_until(lambda: prometheus.has("Invocations_total"), "the fleet is scraped", interval_s=0.2)
    use(fleet)

    def without_data() -> list[str]:
        return [query for query in queries() if not prometheus.has(query)]

    wait_until(lambda: not without_data(), f"every query returns data; without: {without_data()}", interval_s=1)


def test_a_killed_instance_fires_its_alert(fleet: Fleet, prometheus: Prometheus) -> None:
    """No alert fires before; the alert of the only instance fires while it is down."""
    wait_until(lambda: prometheus.has("InstanceReady == 1"), "the fleet is scraped", interval_s=0.2)
    assert prometheus.firing() == set()

    os.kill(find_jvm(fleet.run_dir, "llava-0"), signal.SIGKILL)

    for name in ("TorchmoorInstanceDown", "TorchmoorNoInstanceReady"):
        # This also holds if the instance is already back.
        fired = f'max_over_time(ALERTS{{alertname="{name}",alertstate="firing"}}[10m])'
        wait_until(lambda fired=fired: prometheus.has(fired), f"{name} fires", interval_s=0.2)
    wait_until(lambda: not prometheus.firing(), "the instance is back, and the alerts have ended", interval_s=0.5)
