"""Check deploy/docker/Dockerfile with a linter and an engine."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import requests

from tests.podman import DOCKERFILE, IMAGE, ROOT, Podman
from torchmoor.fleet.ports import find_free_ports


def test_dockerfile_passes_hadolint() -> None:
    """The Dockerfile passes hadolint, besides exceptions that state their reason."""
    hadolint = Path(sys.executable).with_name("hadolint")

    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout) == (0, "")


def test_commands_that_are_called_by_their_path_are_installed_whatever_the_base_has() -> None:
    """Commands called by path are in our bin folder, even if the base image already has the same version elsewhere."""
    text = DOCKERFILE.read_text()
    [pattern] = re.findall(r"grep -E '(.+)' pins\.txt > commands\.txt", text)
    pins = (ROOT / "requirements.txt").read_text().splitlines()

    assert {pin.partition("==")[0] for pin in pins if re.match(pattern, pin)} == called_by_path() | {"dumb-init"}
    assert "pip install --ignore-installed --no-deps -r commands.txt" in text
    assert "/opt/torchmoor/bin/dumb-init" in text


def test_context_has_the_modules_that_the_build_runs(tmp_path: Path) -> None:
    """.dockerignore includes what the Dockerfile's scripts import, for each demo model."""
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        source, target = ROOT / line.removeprefix("!"), tmp_path / line.removeprefix("!")
        if line.startswith("!"):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)
    scripts = re.findall(r"scripts/(\w+)\.py", DOCKERFILE.read_text())
    assert scripts
    used = {
        match[1].replace(".", "/")
        for path in (tmp_path / "scripts").rglob("*.py")
        for match in re.finditer(r"^ *from (scripts\.[\w.]+) import", path.read_text(), re.MULTILINE)
    }

    assert {
        name for name in used | {f"scripts/{name}" for name in scripts} if not (tmp_path / f"{name}.py").exists()
    } == set()


def test_failing_demo_model_ends_the_build() -> None:
    """A failing demo model ends the build, although a shell loop's status is that of its last iteration."""
    loops = re.findall(r"^RUN (?:(?!^RUN ).)*?\bfor name in", DOCKERFILE.read_text(), re.MULTILINE | re.DOTALL)

    assert loops
    assert all(loop.startswith("RUN set -e;") for loop in loops)


def called_by_path() -> set[str]:
    """Return the programs that the image's code looks for beside a Python, besides our own command."""
    sources = (ROOT / "torchmoor").rglob("*.py")
    found = {name for path in sources for name in re.findall(r'\.with_name\("([\w-]+)"\)', path.read_text())}
    return found - {"torchmoor"}


@pytest.mark.image
@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_compiled_image_serves(podman: Podman, tmp_path: Path) -> None:
    """With COMPILED=1 the proxy runs compiled modules and answers as ever; the image has no compiler."""
    image = podman.build(f"{IMAGE}-compiled", arguments={"DEMO_MODELS": "llava", "COMPILED": "1"})
    [port] = find_free_ports(1)
    environment = {"SAGEMAKER_BIND_TO_PORT": str(port), "TORCHMOOR_MODEL": "llava"}

    where = podman.run(
        *("podman", "run", "--rm", "--no-healthcheck", "--network=host"),
        *("--entrypoint=/opt/torchmoor/bin/python", image),
        *("-P", "-c", "import shutil, torchmoor.proxy.http.exchange as it; print(it.__file__, shutil.which('gcc'))"),
    )
    with podman.start(image, "serve", log=tmp_path / "serve.log", environment=environment) as container:
        container.wait_until_ok(f"http://127.0.0.1:{port}/ping")
        answer = requests.post(f"http://127.0.0.1:{port}/invocations", json={"inputs": "hello"}, timeout=120)

    module, compiler = where.split()
    assert (module.endswith(".so"), compiler) == (True, "None")
    assert answer.status_code == 200, answer.text
    assert answer.json()[0]["generated_text"]


@pytest.mark.image
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_image_has_what_platforms_look_for(podman: Podman, image: str) -> None:
    """The image has SageMaker's labels, an exec-form entry point with an init, a health check, and runs as root."""
    config = json.loads(podman.run("podman", "inspect", image))[0]

    assert (
        config["Labels"].items()
        >= {
            "com.amazonaws.sagemaker.capabilities.multi-models": "true",
            "com.amazonaws.sagemaker.capabilities.accept-bind-to-port": "true",
        }.items()
    )
    assert config["Config"]["Entrypoint"][0] == "/opt/torchmoor/bin/dumb-init"
    assert config["Config"]["Cmd"] == ["serve"]
    assert config["HealthCheck" if "HealthCheck" in config else "Healthcheck"]["Test"][0] == "CMD"
    assert config["User"] == ""
