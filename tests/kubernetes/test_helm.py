"""The Helm chart gives the overlays' objects, and each value changes what it names."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes.manifests import NAMESPACE, OVERLAYS, Overlay, read_secret
from tests.tools import missing

ROOT = Path(__file__).resolve().parents[2]
SECRET_FILES = {
    "sessionKeys": "session-keys",
    "keys": "keys.txt",
    "adminToken": "admin-token",
    "valkeyUsers": "users.conf",
    "journal": "journal",
    "queue": "queue",
}
Chart = Callable[..., Overlay]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def chart_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the chart, made as the documentation says."""
    if shutil.which("helm") is None:
        missing("helm is missing; .ci/helm installs it")
    folder = tmp_path_factory.mktemp("helm") / "torchmoor"
    subprocess.run([sys.executable, ROOT / "scripts" / "make_helm_chart.py", "--folder", folder], check=True)
    return folder


@pytest.fixture
def chart(chart_folder: Path) -> Chart:
    """Return a function that renders the chart with values."""

    def render(*options: str, into: str = NAMESPACE, **values: Any) -> Overlay:
        done = helm("template", "torchmoor", chart_folder, "--namespace", into, *set_values(values), *options)
        assert done.returncode == 0, done.stderr
        return Overlay("chart", tuple(each for each in yaml.safe_load_all(done.stdout) if each))

    return render


def test_other_folder_is_not_replaced(tmp_path: Path) -> None:
    """The script deletes an earlier chart, and nothing else."""
    (tmp_path / "mine").touch()

    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_helm_chart.py", "--folder", tmp_path], capture_output=True, text=True
    )

    assert done.returncode == 2
    assert "is not a chart" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def helm(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["helm", *map(str, words)], capture_output=True, text=True, timeout=60)


def set_values(values: Mapping[str, Any]) -> list[str]:
    return [word for name, value in values.items() for word in ("--set-json", f"{name}={json.dumps(value)}")]


def in_order(objects: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(objects, key=lambda each: (each["kind"], each["metadata"]["name"]))


@pytest.mark.parametrize("name", OVERLAYS)
def test_chart_has_the_objects_of_the_overlay(
    name: str, chart: Chart, rendered: Callable[[str], Overlay], kubernetes_folder: Path
) -> None:
    """The chart has the overlay's objects, and with the files of make_secrets.sh also its Secrets."""
    generated = kubernetes_folder / "components" / "secrets" / "generated"
    files = ",".join(f"secrets.{value}={generated / file}" for value, file in SECRET_FILES.items())

    found = chart("--set-file", files, overlay=name, namespace={"create": True})

    wanted = rendered(name)
    assert in_order(each for each in found.objects if each["kind"] != "Secret") == in_order(
        each for each in wanted.objects if each["kind"] != "Secret"
    )
    for secret in wanted.of("Secret"):
        own = found.get("Secret", secret["metadata"]["name"])
        assert own["metadata"] == secret["metadata"]
        assert read_secret(own) == read_secret(secret)


@pytest.mark.parametrize("name", OVERLAYS)
def test_lint_finds_nothing(name: str, chart_folder: Path) -> None:
    done = helm("lint", "--strict", chart_folder, "--namespace", NAMESPACE, *set_values({"overlay": name}))

    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


def test_values_change_what_they_name(chart: Chart) -> None:
    """Values change images, numbers of pods, variables of instances, the configuration, the host and the namespace."""
    found = chart(
        into="elsewhere",
        overlay="gpu",
        image="registry.test/torchmoor:9",
        valkeyImage="registry.test/valkey:9",
        proxies={"replicas": 5},
        instances={"replicas": 0, "env": {"TORCHMOOR_SETTLE_S": "41", "TORCHMOOR_HANDLER_MODEL_PATH": "hf://a/b"}},
        config={"limits": {"max_body_bytes": 1000}},
        host="chat.test",
    )

    images = {each.name: {container["image"] for container in each.containers} for each in found.workloads()}
    ours, valkeys = {"registry.test/torchmoor:9"}, {"registry.test/valkey:9"}
    assert images == {"llava": ours, "torchmoor": ours, "valkey": valkeys}
    proxies, instances = found.workload("torchmoor"), found.workload("llava")
    assert (proxies.spec["replicas"], instances.spec["replicas"]) == (5, 0)
    variables = instances.environment()
    assert (variables["TORCHMOOR_SETTLE_S"], variables["TORCHMOOR_HANDLER_MODEL_PATH"]) == ("41", "hf://a/b")
    names = [each["name"] for each in instances.containers[0]["env"]]
    assert len(names) == len(set(names))
    configuration = found.find_generated("ConfigMap", "torchmoor")
    settings = yaml.safe_load(configuration["data"]["torchmoor.yaml"])
    assert settings["limits"] == {"max_body_bytes": 1000}
    assert settings["Discovery"][0]["dns_name"] == "_inference._tcp.llava.elsewhere.svc.cluster.local"
    assert configuration["metadata"]["name"] in str(proxies.pod["volumes"])
    unchanged = chart(overlay="gpu").find_generated("ConfigMap", "torchmoor")
    assert configuration["metadata"]["name"] != unchanged["metadata"]["name"]
    (ingress,) = found.of("Ingress")
    assert ingress["spec"]["rules"][0]["host"] == "chat.test"
    assert {each["metadata"]["namespace"] for each in found.objects} == {"elsewhere"}
    assert not found.of("Secret")
    assert not found.of("Namespace")


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_that_drain_for_longer_are_killed_later(name: str, chart: Chart) -> None:
    """Grace periods keep their distance from the times that values change, and stay unchanged otherwise."""
    usual = chart(overlay=name)
    found = chart(
        overlay=name,
        instances={"env": {"TORCHMOOR_DRAIN_S": "1200.5"}},
        config={"timeouts": {"stop_grace_s": 3600}},
    )

    def grace_s(overlay: Overlay, workload: str) -> int:
        return int(overlay.workload(workload).pod["terminationGracePeriodSeconds"])

    assert grace_s(found, "llava") == 1201 + grace_s(usual, "llava") - 300
    assert grace_s(found, "torchmoor") == 3600 + grace_s(usual, "torchmoor") - 490
    assert grace_s(found, "valkey") == grace_s(usual, "valkey")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"overlay": "none"}, "overlay"),
        ({"imagge": "a"}, "imagge"),
        ({"proxies": {"replicas": 0}}, "replicas"),
        ({"secrets": {"keys": "a"}}, "give all of secrets"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], said: str, chart_folder: Path) -> None:
    """The error names a misspelt or impossible value, and missing Secrets."""
    done = helm("template", "torchmoor", chart_folder, *set_values(values))

    assert done.returncode != 0
    assert said in done.stderr
