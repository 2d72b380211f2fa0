#!/usr/bin/env python3
"""Make the Helm chart in build/helm/torchmoor from deploy/helm and the rendered overlays of deploy/kubernetes.

The templates, which adapt the rendered objects to the values, are in deploy/helm/templates; this script copies them.

The chart omits the overlays' Secrets; its values define them. Needs kubectl, which includes kustomize.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KUBERNETES = ROOT / "deploy" / "kubernetes"
SECRETS = "  - ../../components/secrets\n"
OVERLAYS = ("demo", "gpu", "gpu-hpa")


def find_kubectl() -> str:
    """Find kubectl beside this Python, where `make setup` installs it, or on the path."""
    beside = Path(sys.executable).with_name("kubectl")
    found = str(beside) if beside.exists() else shutil.which("kubectl")
    if found is None:
        sys.exit("kubectl is missing: install it, or run make setup")
    return found


def render(name: str, kubectl: str) -> str:
    """Render an overlay without its Secrets."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "kubernetes"
        shutil.copytree(KUBERNETES, copy, ignore=shutil.ignore_patterns("generated"))
        kustomization = copy / "overlays" / name / "kustomization.yaml"
        lines = kustomization.read_text().replace(SECRETS, "")
        kustomization.write_text(lines.replace("components:\nnamespace", "namespace"))  # a list that is now empty
        command = [kubectl, "kustomize", str(kustomization.parent)]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout


def main() -> None:
    """Write the chart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "build" / "helm" / "torchmoor",
        help="folder of the chart, which is replaced; default: build/helm/torchmoor",
    )
    folder = parser.parse_args().folder
    if folder.exists() and not (folder / "Chart.yaml").is_file():
        parser.error(f"{folder} is not a chart, so it is not replaced: name a new folder")
    kubectl = find_kubectl()
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "deploy" / "helm", folder)
    (folder / "manifests").mkdir()
    for name in OVERLAYS:
        (folder / "manifests" / f"{name}.yaml").write_text(render(name, kubectl))
    print(folder)


if __name__ == "__main__":
    main()
