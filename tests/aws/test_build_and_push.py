"""Run scripts/build_and_push.sh with buildah and a real registry, and with a recording engine and moto's ECR."""

import base64
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from scripts.ecr import main as ecr
from tests.aws.conftest import ACCOUNT, REGION, Aws
from tests.servers import free_ports
from tests.tools import require
from tests.waiting import PROGRAM_S, wait_until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "build_and_push.sh"
ECR = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com"
V2 = "application/vnd.docker.distribution.manifest.v2+json"
# Record the arguments, and the standard input of a login.
ENGINE = """#!/bin/sh
echo "$@" >> "$NOTES"
if [ "$1" = login ]; then cat >> "$NOTES"; fi
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, timeout=PROGRAM_S, env={**os.environ, **environment}
    )


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """Return the address of an empty registry without TLS."""
    require("docker-registry")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    config = tmp_path / "registry.yml"
    config.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {tmp_path}/images}}}}\nhttp: {{addr: '{address}'}}\n"
    )
    with (tmp_path / "registry.log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", config], stdout=log, stderr=log)

    def answers() -> bool:
        try:
            return requests.get(f"http://{address}/v2/", timeout=5).ok
        except requests.RequestException:
            return False

    try:
        wait_until(answers, "the registry")
        yield address
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_shell_scripts_are_sound() -> None:
    scripts = sorted((ROOT / "scripts").glob("*.sh"))
    shellcheck = Path(sys.executable).with_name("shellcheck")

    done = subprocess.run([shellcheck, *scripts], capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.needs("buildah")
def test_builds_and_pushes_what_sagemaker_can_pull(registry: str, tmp_path: Path) -> None:
    """The script pushes one image manifest in Docker's format; the URI is the only line on standard output."""
    (tmp_path / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/graph"\nrunroot = "{tmp_path}/run"\n'
    )
    (tmp_path / "Dockerfile").write_text("ARG BASE_IMAGE=none\nFROM ${BASE_IMAGE}\nARG TORCH\nLABEL torch=${TORCH}\n")

    done = run(
        *("--engine", "buildah", "--file", str(tmp_path / "Dockerfile"), "--base-image", "scratch", "--torch", "base"),
        *("--registry", registry, "--plain-http", "--repository", "team/torchmoor", "--tag", "v1"),
        CONTAINERS_STORAGE_CONF=str(tmp_path / "storage.conf"),
        BUILDAH_ISOLATION="chroot",
    )

    assert (done.returncode, done.stdout) == (0, f"{registry}/team/torchmoor:v1\n"), done.stderr
    api = f"http://{registry}/v2/team/torchmoor"
    manifest = requests.get(f"{api}/manifests/v1", headers={"Accept": V2}, timeout=60)
    assert manifest.headers["Content-Type"] == V2
    config = requests.get(f"{api}/blobs/{manifest.json()['config']['digest']}", timeout=60).json()
    assert config["config"]["Labels"]["torch"] == "base"


def test_pushes_to_the_accounts_ecr(aws: Aws, tmp_path: Path) -> None:
    """The script creates a missing repository and never passes the password as a process argument."""
    engine = tmp_path / "bin" / "podman"
    engine.parent.mkdir()
    engine.write_text(ENGINE)
    engine.chmod(0o755)
    here = {
        "PATH": f"{engine.parent}:{os.environ['PATH']}",
        "NOTES": str(tmp_path / "notes"),
        "AWS_ENDPOINT_URL": aws.url,
    }
    arguments = ("--engine", "podman", "--region", REGION, "--tag", "v1", "--file", str(ROOT / "README.md"))
    dlc = f"763104351884.dkr.ecr.{REGION}.amazonaws.com/pytorch-inference:2.6"

    done = run(*arguments, "--base-image", dlc, **here)

    uri = f"{ECR}/torchmoor:v1"
    assert (done.returncode, done.stdout) == (0, f"{uri}\n"), done.stderr
    assert ecr(["create", "torchmoor", "--endpoint-url", aws.url]) == 0, "an existing repository is kept"
    [repository] = aws.ask("ecr", "describe_repositories")["repositories"]
    assert (repository["repositoryName"], repository["imageScanningConfiguration"]) == (
        "torchmoor",
        {"scanOnPush": True},
    )
    [given] = aws.ask("ecr", "get_authorization_token", registryIds=[ACCOUNT])["authorizationData"]
    password = base64.b64decode(given["authorizationToken"]).decode().partition(":")[2]
    base_login, _, build, login, told, push = (tmp_path / "notes").read_text().splitlines()
    assert base_login == f"login --username AWS --password-stdin {dlc.partition('/')[0]}"
    assert build.startswith(f"build --format docker --build-arg BASE_IMAGE={dlc} --file ")
    assert login == f"login --username AWS --password-stdin {ECR}"
    assert told == password
    assert push == f"push --format v2s2 {uri}"


def test_dry_run_prints_every_command_and_runs_none(tmp_path: Path) -> None:
    done = run(
        *("--dry-run", "--engine", "docker", "--region", "eu-west-1", "--profile", "work", "--tag", "v1"),
        *("--file", str(ROOT / "README.md"), "--build-arg", "A=b c"),
        AWS_ENDPOINT_URL="http://127.0.0.1:9",
    )

    registry = "ACCOUNT.dkr.ecr.eu-west-1.amazonaws.com"
    assert (done.returncode, done.stdout) == (0, f"{registry}/torchmoor:v1\n"), done.stderr
    build, create, login, push = done.stderr.splitlines()
    assert build == (
        "env BUILDX_NO_DEFAULT_ATTESTATIONS=1 docker build --build-arg A=b\\ c "
        f"--file {ROOT / 'README.md'} --tag {registry}/torchmoor:v1 {ROOT}"
    )
    assert create.endswith("scripts/ecr.py create torchmoor --region eu-west-1 --profile work")
    assert login.endswith(
        "scripts/ecr.py password ACCOUNT --region eu-west-1 --profile work | "
        f"docker login --username AWS --password-stdin {registry}"
    )
    assert push == f"docker push {registry}/torchmoor:v1"


def test_every_torch_of_the_dockerfile_can_be_built() -> None:
    dockerfile = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    [known] = re.findall(r"TORCH must be (.+), not", dockerfile)

    for torch in (*re.findall(r"\w+\d*", known.replace(" or ", " ")), "rocm"):
        done = run("--dry-run", "--no-push", "--engine", "podman", "--tag", "v1", "--torch", torch)

        assert (done.returncode == 0) is (torch != "rocm"), done.stderr
        assert f"--build-arg TORCH={torch}" in done.stderr or f"--torch must be {known}, not rocm" in done.stderr


def test_the_samples_five_arguments_mean_what_they_mean_there(aws: Aws) -> None:
    """AWS's LLaVA notebook calls its script with a repository, tag, base image, region and account."""
    base = f"763104351884.dkr.ecr.{REGION}.amazonaws.com/pytorch-inference:2.3.0"
    given = ("llava-stateful", "1.0", base, REGION)

    done = run("--dry-run", "--engine", "docker", "--file", str(ROOT / "README.md"), *given, ACCOUNT)
    other = run("--engine", "docker", *given, "111122223333", AWS_ENDPOINT_URL=aws.url)

    assert (done.returncode, done.stdout) == (0, f"{ECR}/llava-stateful:1.0\n"), done.stderr
    assert f"--build-arg BASE_IMAGE={base}" in done.stderr
    assert f"ecr.py create llava-stateful --region {REGION}" in done.stderr
    assert other.returncode == 1
    assert other.stderr.endswith(f"the credentials are those of account {ACCOUNT}, not 111122223333\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["llava", "v1"], "there are 2 arguments"),
        (["--tags", "v1"], "unknown option --tags"),
        (["--tag"], "--tag needs a value"),
        (["--engine", "kaniko"], "--engine must be docker, podman or buildah"),
        (["--engine", "podman", "--torch", "gpu"], "--torch must be cpu, cuda, cuda12, base or vllm"),
        (["--engine", "podman", "--file", "/nowhere"], "there is no /nowhere"),
    ],
)
def test_mistakes_are_told(arguments: list[str], told: str) -> None:
    """A mistake is reported in one line before anything is done."""
    done = run(*arguments)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {told}")


def test_help_names_every_option() -> None:
    """The help lists exactly the options that the script accepts."""
    done = run("--help")

    assert done.returncode == 0
    taken = re.findall(r"(--[a-z-]+)(?= \||\))", SCRIPT.read_text().partition("while [ $#")[2].partition("done")[0])
    assert set(taken) == set(re.findall(r"^  (--[a-z-]+)", done.stdout, re.MULTILINE))
