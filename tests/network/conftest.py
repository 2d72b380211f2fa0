"""A network with a DNS server, a proxy, clients and instances on hosts of their own."""

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.network.hosts import Network, make_network, stop
from tests.network.instance import KEY
from tests.network.zone import PORT, SERVICE, Zone
from tests.waiting import DEADLINE_S, wait_until

USERS = 14
ENDPOINT = {
    "EndpointConfig": {
        "EndpointConfigName": "llava",
        "ProductionVariants": [
            {
                "VariantName": "v",
                "ModelName": "llava",
                "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
            }
        ],
    }
}


class Proxy:
    """`torchmoor serve` on a host."""

    def __init__(self, network: Network, host: str, folder: Path, *arguments: str, **changes: Any) -> None:
        self._network = network
        self._host = host
        self._path = folder / f"{host}.yaml"
        self.log = folder / f"{host}.log"
        self.write(**changes)
        self.process = network.start_python(
            host,
            *("-m", "torchmoor", "serve", "--config", str(self._path), "--no-auth", *arguments),
            log=self.log,
            env={"TORCHMOOR_SESSION_KEYS": f"k1:{KEY.hex()}"},
            stdout=subprocess.PIPE,
        )
        line = self.process.stdout.readline()
        assert line, self.log.read_text()[-3000:]
        where = json.loads(line)
        self.port = int(where["runtime"].rpartition(":")[2])
        self._admin = where["admin"]

    def write(self, **changes: Any) -> None:
        """Write the configuration file. The resolver is the host's own, unless a change replaces it."""
        content = {
            "Endpoints": [ENDPOINT],
            "Discovery": [{"dns_name": SERVICE, "interval_s": 0.5, "min_interval_s": 0.2, "timeout_s": 0.5}],
            "listen": {"host": "0.0.0.0", "port": 0, "admin_port": 0},
            # Ten late answers in a row, not three, because packet loss and busy hosts are random.
            "health": {
                "starting_interval_s": 0.1,
                "ready_interval_s": 0.2,
                "probe_timeout_s": 0.3,
                "unanswered_before_down": 10,
            },
            "recovery": {"slow_start_s": 1.0},
            "sessions": {"are_journaled": True},
            **changes,
        }
        self._path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))

    def look(self, path: str = "instances") -> Any:
        """Return what the admin plane shows."""
        return json.loads(self._network.get(self._host, f"{self._admin}/{path}"))

    def metric(self, name: str) -> float:
        """Return a metric of the only DNS name."""
        text = self._network.get(self._host, f"{self._admin}/metrics").decode()
        (line,) = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
        return float(line.rpartition(" ")[2])

    def states(self) -> dict[str, str]:
        """Return the state of each instance by name."""
        return {row["name"]: row["state"] for row in self.look()["instances"]}

    def hosts(self) -> dict[str, str]:
        """Return the host of each ready instance."""
        return {row["name"]: row["host"] for row in self.look()["instances"] if row["state"] == "ready"}

    def wait_for(self, *ready: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait until exactly these instances are known and ready."""
        seen: dict[str, str] = {}

        def are_ready() -> bool:
            nonlocal seen
            seen = self.states()
            return seen == dict.fromkeys(ready, "ready")

        try:
            wait_until(are_ready, f"{ready} alone are ready", deadline_s=deadline_s, interval_s=0.1)
        except AssertionError as error:
            error.add_note(f"{seen}\n{self.log.read_text()[-3000:]}")
            raise


class Load:
    """Users on a host; see tests.network.load."""

    def __init__(self, network: Network, host: str, url: str, folder: Path, users: int = USERS) -> None:
        self._before: Counter[str] = Counter()
        self.process = network.start_python(
            host,
            *("-m", "tests.network.load", url, str(users)),
            log=folder / "load.log",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def report(self) -> dict[str, Any]:
        """Return the report so far."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.last = self.process.stdout.readline()
        assert self.last, "the clients have ended; see load.log"
        return json.loads(self.last)

    def _wait(self, condition: Callable[[dict[str, Any]], bool], what: str) -> None:
        try:
            wait_until(lambda: condition(self.report()), what, interval_s=0.1)
        except AssertionError as error:
            error.add_note(self.last)
            raise

    def wait_served(self, *names: str, turns: int = 20) -> None:
        """Wait until each of these has answered `turns` more turns."""
        before = self.report()["by"]
        self._wait(
            lambda report: all(report["by"].get(name, 0) >= before.get(name, 0) + turns for name in names),
            f"{names} have answered {turns} turns more",
        )

    def wait_answered(self, number: int = 150) -> None:
        """Wait for `number` more answers, from any instance."""
        before = self.report()["answered"]
        self._wait(lambda report: report["answered"] >= before + number, f"{number} more answers have come")

    def forgive(self) -> None:
        """Ignore earlier failures, which belong to another test."""
        report = self.report()
        self._before = Counter({kind: len(report[kind]) for kind in ("lost", "failed", "broken")})

    def wrong(self, kind: str) -> list[str]:
        """Return the failures since then: sessions `lost`, requests `failed`, streams `broken`."""
        return self.report()[kind][self._before[kind] :]

    def check(self, *, may_break: bool = False) -> None:
        """Check that no request failed and no session was lost.

        may_break: streams of a lost instance have ended early.
        """
        assert self.wrong("lost") == []
        assert self.wrong("failed") == []
        assert may_break or self.wrong("broken") == []


class Stage:
    """The hosts `dns`, `proxy`, `clients` and three instances, which are not in DNS yet."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.folder = folder
        self.journal = folder / "journal"
        self.journal.mkdir()
        self.zone = Zone(network, "dns", folder)
        nameserver = network.add("dns", 53)
        network.add("proxy", 2, nameserver=nameserver)
        network.add("clients", 3)
        self.addresses = {f"llava-{number}": network.add(f"llava-{number}", 10 + number) for number in range(3)}
        starting = [self.start_instance(name, name) for name in self.addresses]
        for process in starting:
            assert process.stdout.readline() == "ready\n"

    def start_instance(self, host: str, name: str) -> subprocess.Popen[str]:
        """Start an instance of this name on a host."""
        return self.network.start_python(
            host,
            *("-m", "tests.network.instance", name, str(PORT), str(self.journal)),
            log=self.folder / f"{host}.log",
            stdout=subprocess.PIPE,
        )

    def name(self, *names: str, **moved: str) -> None:
        """Publish these names in DNS. moved: other addresses than their own, with _ for -."""
        changed = {name.replace("_", "-"): address for name, address in moved.items()}
        self.zone.name({name: changed.get(name, self.addresses[name]) for name in names})


@pytest.fixture(scope="package")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with make_network() as network:
        yield Stage(network, tmp_path_factory.mktemp("network"))


@pytest.fixture(scope="module")
def proxy(stage: Stage, request: pytest.FixtureRequest) -> Iterator[Proxy]:
    """Share one proxy in a module, whose tests leave it with three ready instances."""
    stage.name(*stage.addresses)
    running = Proxy(stage.network, "proxy", stage.folder)
    yield running
    stop(running.process)


@pytest.fixture(scope="module")
def clients(stage: Stage, proxy: Proxy) -> Iterator[Load]:
    running = Load(stage.network, "clients", f"http://10.77.0.2:{proxy.port}", stage.folder)
    yield running
    stop(running.process)


@pytest.fixture
def load(stage: Stage, proxy: Proxy, clients: Load) -> Iterator[Load]:
    """Run users of three ready instances while the test changes the network; repair it afterwards."""
    stage.name(*stage.addresses)
    # Wait by address, because the test before may have moved one, and it stays ready there until DNS's next answer.
    wait_until(lambda: proxy.hosts() == stage.addresses, "all are ready at their own addresses", interval_s=0.1)
    proxy.wait_for(*stage.addresses)
    clients.wait_served(*stage.addresses, turns=1)
    clients.forgive()
    yield clients
    for host in ("proxy", *stage.addresses):
        stage.network.heal(host)
