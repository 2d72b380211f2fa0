"""Real TorchServe on separate hosts, found by DNS: sessions outlive the host that opened them."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.config import Config

from tests.network.conftest import Proxy, Stage
from tests.network.hosts import ROOT, stop
from tests.network.instance import KEY
from tests.network.zone import PORT, SERVICE
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_sessions import open_session
from tests.waiting import wait_until
from torchmoor.fleet.torchserve import InstanceSpec, TorchServeSettings, environment, prepare

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.torchserve]

NAMES = ("real-0", "real-1")
MANAGEMENT = PORT + 1
START_S = 240  # two instances at once on a busy machine
QUESTION = "What color is the circle?"


@pytest.fixture
def addresses(stage: Stage) -> Iterator[dict[str, str]]:
    """Return two instances that share a journal, each with its ports on its own host's address."""
    subprocess.run([sys.executable, ROOT / "scripts" / "build_archives.py", "--only", "llava"], check=True, timeout=120)
    settings = TorchServeSettings(model_store=ROOT / "model_store", heap_mib=256)
    found: dict[str, str] = {}
    processes: list[subprocess.Popen[str]] = []
    for number, name in enumerate(NAMES):
        found[name] = stage.network.add(name, 20 + number)
        spec = InstanceSpec(
            name=name,
            endpoint="llava",
            archive="llava.mar",
            folder=stage.folder / name,
            ports=(PORT, MANAGEMENT, PORT + 2, PORT + 3, PORT + 4),
            environment={
                "TORCHMOOR_SESSION_KEYS": f"k1:{KEY.hex()}",
                "TORCHMOOR_HANDLER_JOURNAL_URL": (stage.folder / "real-journal").as_uri(),
            },
        )
        command = prepare(spec, settings)
        config = spec.folder / "config.properties"
        config.write_text(config.read_text().replace("http://127.0.0.1:", f"http://{found[name]}:"))
        log = stage.folder / f"{name}.log"
        with log.open("a") as output:
            processes.append(
                stage.network.start(
                    name, *command, log=log, env=environment(spec, settings), stdin=subprocess.DEVNULL, stdout=output
                )
            )
    yield found
    for process in processes:
        stop(process)


@pytest.fixture
def proxy(stage: Stage) -> Iterator[Proxy]:
    """Run a proxy; the model is loaded when the management port reports it."""
    entry = {"dns_name": SERVICE, "interval_s": 0.5, "min_interval_s": 0.2, "management_port": MANAGEMENT}
    running = Proxy(stage.network, "proxy", stage.folder, Discovery=[entry])
    yield running
    stop(running.process)


def test_a_session_goes_on_when_its_host_is_named_no_more_and_when_it_falls_silent(
    stage: Stage, addresses: dict[str, str], proxy: Proxy
) -> None:
    """A session's image and turns are in the journal, so the remaining instance continues it under the same id."""
    stage.zone.name(addresses)
    proxy.wait_for(*NAMES, deadline_s=START_S)

    def talk() -> None:
        chat = open_session(client_of(proxy), path=data_url(draw("circle", "red")))
        assert "red" in chat.ask(QUESTION)
        home = next(name for name in NAMES if f"-{name}-" in chat.id)
        (other,) = set(NAMES) - {home}

        stage.zone.name({other: addresses[other]})
        proxy.wait_for(other)
        assert "red" in chat.ask(QUESTION)

        stage.zone.name(addresses)
        proxy.wait_for(*NAMES)
        stage.network.cut_off(home)
        wait_until(lambda: proxy.states()[home] == "down", "the silent host is detected", interval_s=0.1)
        assert "red" in chat.ask(QUESTION)

    stage.network.inside("clients", talk)


def client_of(proxy: Proxy) -> Any:
    return boto3.client(
        "sagemaker-runtime",
        endpoint_url=f"http://10.77.0.2:{proxy.port}",
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
        config=Config(retries={"total_max_attempts": 1}, read_timeout=90),
    )
