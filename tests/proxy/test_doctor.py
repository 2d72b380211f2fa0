"""`torchmoor doctor` with a running fleet: a real admin plane and fake instances."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import NoCredentialsError
from click.testing import CliRunner, Result

from tests.archives import write_small_archive
from tests.http_servers import QuietHandler, serve_http
from tests.proxy.conftest import MakeStage, Stage
from torchmoor.cli.main import main
from torchmoor.config.credentials import Credentials
from torchmoor.config.objects import ObjectSettings
from torchmoor.config.routing import VariantSettings
from torchmoor.config.scaling import ScalingSettings
from torchmoor.doctor.checks import CHECKS
from torchmoor.doctor.finding import Finding, FleetPlan, problem
from torchmoor.doctor.machine import check_archives


def examine(*arguments: str, **environment: str) -> tuple[Result, dict[str, list[dict[str, str]]]]:
    """Return the result of --json, and its findings by check."""
    command = ["doctor", "--json", "--port", "0", "--admin-port", "0", "--instances", "0", *arguments]
    result = CliRunner().invoke(main, command, env=environment)
    found: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(result.stdout)["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return result, found


def test_a_fleet_that_is_well(stage: Stage) -> None:
    """A running fleet has no problem: its ports are in use as expected, and the clocks agree."""
    where = ("--admin-url", stage.proxy.admin_url, "--url", stage.proxy.runtime_url)

    result, found = examine(*where, "--admin-port", stage.proxy.admin_url.rpartition(":")[2])

    assert result.exit_code == 0, result.stdout
    assert "2 of 2 instances ready" in found["fleet"][0]["found"]
    assert "in use by the fleet" in found["ports"][0]["found"]


class Foreign(QuietHandler):
    """Another program's server, which answers any path."""

    answer = b""

    def do_GET(self) -> None:
        self.reply(200 if self.answer else 404, self.answer)


@pytest.mark.parametrize("answer", [b"", b"<html>", b'{"status": "up"}'])
def test_another_programs_server_is_not_the_fleet(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port in use by another program is a problem, since `torchmoor up` would fail there."""
    monkeypatch.setattr(Foreign, "answer", answer)
    with serve_http(Foreign) as url:
        port = url.rpartition(":")[2]
        result, found = examine("--admin-port", port, "--admin-url", url)

    assert result.exit_code == 1
    assert f"127.0.0.1:{port} is in use" in [each["found"] for each in found["ports"]]
    assert f"--admin-port, or find who has it: ss -ltnp 'sport = :{port}'" in found["ports"][-1]["remedy"]


def test_an_instance_that_gets_no_work_is_a_warning(stage: Stage) -> None:
    """A drained instance is a warning with the command that resumes it; if none is left it is a problem."""
    stage.registry.drain("a")
    one, some = examine("--admin-url", stage.proxy.admin_url)
    stage.registry.drain("b")
    none, all_of_them = examine("--admin-url", stage.proxy.admin_url)

    assert (one.exit_code, none.exit_code) == (0, 1)
    assert some["fleet"][0]["remedy"] == "torchmoor undrain a"
    assert all_of_them["fleet"][-1]["level"] == "problem"


def test_a_fleet_that_has_scaled_to_zero_is_well(make_stage: MakeStage) -> None:
    """A fleet scaled to zero has no problem, because a request starts an instance."""
    variant = VariantSettings(model="llava", scaling=ScalingSettings(min_capacity=0, max_capacity=1))
    stage = make_stage(names=("a",), variants=(variant,))
    stage.run(remove(stage, "a"))

    result, found = examine("--admin-url", stage.proxy.admin_url)

    assert result.exit_code == 0, result.stdout
    assert found["fleet"][0]["found"].endswith("the next request starts one")


async def remove(stage: Stage, name: str) -> None:
    stage.registry.remove(name)


def test_a_fleet_that_wants_its_token_is_a_problem(make_stage: MakeStage) -> None:
    """A fleet that requires a token is a problem, because its state is unknown."""
    stage = make_stage(credentials=Credentials(admin_token="0123456789abcdef0123"))

    without, found = examine("--admin-url", stage.proxy.admin_url)
    given, _ = examine("--admin-url", stage.proxy.admin_url, TORCHMOOR_ADMIN_TOKEN="0123456789abcdef0123")

    assert (without.exit_code, given.exit_code) == (1, 0)
    assert "TORCHMOOR_ADMIN_TOKEN" in found["fleet"][0]["remedy"]


def test_no_fleet_is_a_problem_only_where_one_was_named() -> None:
    """A missing fleet is a problem only if it was named, because the doctor is often run before the start."""
    named, _ = examine("--admin-url", "http://127.0.0.1:9")

    assert named.exit_code == 1


@pytest.fixture
def silent() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def write_config(folder: Path, *, asynchronous: dict[str, Any] | None = None, **more: Any) -> Path:
    variants = [{"VariantName": "AllTraffic", "ModelName": "llava"}]
    endpoint: dict[str, Any] = {"EndpointConfigName": "chat", "ProductionVariants": variants}
    if asynchronous is not None:
        endpoint["AsyncInferenceConfig"] = asynchronous
    config = {
        "Endpoints": [{"EndpointName": "llava", "EndpointConfig": endpoint}],
        "Instances": [{"name": "a", "port": 9}],
        "listen": {"port": 0, "admin_port": 0},
        **more,
    }
    path = folder / "torchmoor.yaml"
    path.write_text(json.dumps(config))
    return path


def test_instances_of_the_file_are_tried(tmp_path: Path, silent: int) -> None:
    """A host name in the file that does not resolve is a problem; an instance that does not listen yet is a warning."""
    places = {"up": ("127.0.0.1", silent), "down": ("127.0.0.1", 9), "lost": ("no.such.host.invalid", 8085)}
    instances = [{"name": name, "host": host, "port": port} for name, (host, port) in places.items()]

    result, found = examine("--config", str(write_config(tmp_path, Instances=instances)))

    assert result.exit_code == 1
    assert {each["found"].split()[0]: each["level"] for each in found["instances"]} == {
        "up": "ok",
        "down": "warning",
        "lost": "problem",
    }


@pytest.mark.parametrize(
    ("listen", "url"),
    [
        ({"admin_host": "::1"}, "http://[::1]:9"),
        ({"admin_tls_certificate": "/etc/hostname", "admin_tls_key": "/etc/hostname"}, "https://127.0.0.1:9"),
    ],
)
def test_fleet_of_the_file_is_asked_at_its_address(tmp_path: Path, listen: dict[str, str], url: str) -> None:
    """The fleet is contacted at the file's address, also by IPv6 and TLS."""
    path = write_config(tmp_path, listen={"port": 0, "admin_port": 9, **listen})

    _, found = examine("--config", str(path))

    assert found["fleet"][0]["found"] == f"none runs at {url}"


def test_queue_and_results_of_the_file_are_tried(tmp_path: Path) -> None:
    """An unreachable server and an unwritable directory are problems; the queue's password is in no finding."""
    path = write_config(
        tmp_path,
        asynchronous={"OutputConfig": {}},
        async_inference={"queue": "redis://me:secret@127.0.0.1:9/0", "output_root": "file:///proc/results"},
        objects={"output_directories": ["/proc/results"]},
    )

    result, found = examine("--config", str(path))

    assert result.exit_code == 1
    assert "127.0.0.1:9/0 does not answer" in found["queue"][0]["found"]
    assert "/proc cannot be written" in found["results"][0]["found"]
    assert "secret" not in result.stdout


def test_stores_in_s3_are_tried_with_the_settings_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and failures may be in S3, whose address and region are settings of the proxy."""
    used: list[tuple[str, str]] = []

    def make_client(settings: ObjectSettings) -> Any:
        used.append((settings.s3_endpoint_url, settings.s3_region))
        raise NoCredentialsError

    monkeypatch.setattr("torchmoor.async_inference.objects.s3_client.make_client", make_client)
    places = {"S3OutputPath": "s3://results/out", "S3FailurePath": "s3://failures/out"}
    path = write_config(
        tmp_path,
        asynchronous={"OutputConfig": places},
        async_inference={"queue": f"sqlite://{tmp_path}/queue.db"},
        objects={"s3_endpoint_url": "http://127.0.0.1:9", "s3_region": "eu-west-1"},
    )

    _, found = examine("--config", str(path))

    assert used == [("http://127.0.0.1:9", "eu-west-1")] * 2
    assert [each["found"].split()[0] for each in found["results"]] == ["s3://results/out", "s3://failures/out"]


def test_archives_of_the_file_have_the_names_of_its_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances of `serve` load the archive of their variant's model, whatever the endpoint's name."""
    monkeypatch.setattr("torchmoor.doctor.checks.CHECKS", (check_archives,))
    write_small_archive(tmp_path / "llava.mar")
    variants = [{"VariantName": "AllTraffic", "ModelName": "llava"}]
    endpoint = {"EndpointConfigName": "chat", "ProductionVariants": variants}
    path = write_config(tmp_path, Endpoints=[{"EndpointName": "chat", "EndpointConfig": endpoint}])

    _, found = examine("--config", str(path), "--instances", "1", "--model-store", str(tmp_path))

    [archive] = found["archives"]
    assert (archive["level"], "llava.mar" in archive["found"]) == ("ok", True)


def test_a_file_that_is_wrong_is_told_as_serve_tells_it(tmp_path: Path) -> None:
    """An invalid file gives the error of `serve` before any check."""
    path = tmp_path / "torchmoor.yaml"
    path.write_text("Endpoints: 3")

    result = CliRunner().invoke(main, ["doctor", "--config", str(path)])

    assert result.exit_code == 1
    assert "Endpoints" in result.stderr


def test_a_check_that_fails_itself_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that itself fails is one more problem, and the other checks run."""

    def check_moon(plan: FleetPlan) -> Iterator[Finding]:
        raise ZeroDivisionError("no moon")
        yield

    monkeypatch.setattr("torchmoor.doctor.checks.CHECKS", (check_moon, *CHECKS))

    result, found = examine("--admin-url", "http://127.0.0.1:9")

    assert result.exit_code == 1
    assert "no moon" in found["moon"][0]["found"]
    assert found["disk"]


def test_findings_are_readable(stage: Stage) -> None:
    """Each finding has one line with advice below it, and the end has a sum."""
    stage.registry.drain("a")
    command = ["doctor", "--port", "0", "--admin-port", "0", "--instances", "0"]

    result = CliRunner().invoke(main, [*command, "--admin-url", stage.proxy.admin_url])

    lines = result.stdout.splitlines()
    assert "warning  fleet: instance a is draining" in lines
    assert "         -> torchmoor undrain a" in lines
    assert lines[-1].startswith("0 problems, ")


def test_one_problem_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_moon(plan: FleetPlan) -> Iterator[Finding]:
        yield problem("moon", "there is none", "")

    monkeypatch.setattr("torchmoor.doctor.checks.CHECKS", (check_moon,))

    result = CliRunner().invoke(main, ["doctor"])

    assert result.stdout.splitlines()[-1] == "1 problem, 0 warnings, 0 ok"
