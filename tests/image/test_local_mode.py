"""The image in the SageMaker Python SDK's local mode, which uses podman as if it were Docker."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.podman import ROOT, Podman
from tests.tools import missing
from tests.torchserve.drawings import data_url, draw
from tests.waiting import wait_until
from torchmoor.fleet.ports import find_free_ports

pytestmark = [pytest.mark.image, pytest.mark.long, pytest.mark.timeout(1800)]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
SCRIPT = Path(__file__).parent / "clients" / "local_mode.py"
NETWORK = "sagemaker-local"  # the SDK's
SILENT = "{SchemaVersion: '1.0', SageMaker: {PythonSDK: {Modules: {TelemetryOptOut: true}}}}"


@pytest.mark.needs("docker-compose")
def test_the_sdk_deploys_asks_and_deletes(podman: Podman, image: str, tmp_path: Path) -> None:
    """`Model.deploy(instance_type='local')` works with a model.tar.gz that contains an archive."""
    if not PYTHON.exists():
        missing("the clients are not installed; run make clients")
    build = [sys.executable, ROOT / "scripts" / "build_archives.py", "--only", "llava", "--model-store", tmp_path]
    subprocess.run(build, check=True, timeout=120)
    (tmp_path / "model").mkdir()
    with tarfile.open(tmp_path / "model" / "model.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "llava.mar", "llava.mar")
    (tmp_path / "picture").write_text(data_url(draw("circle", "red")))
    (tmp_path / "root").mkdir()
    (tmp_path / "sagemaker.yaml").write_text(SILENT)
    [port] = find_free_ports(1)
    socket = tmp_path / "podman.sock"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PYTHON", "SAGEMAKER"))},
        **{"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"},
        **{"DOCKER_HOST": f"unix://{socket}", "HOME": str(tmp_path)},
        "SAGEMAKER_USER_CONFIG_OVERRIDE": str(tmp_path / "sagemaker.yaml"),
    }
    service = subprocess.Popen(
        podman.command("podman", "system", "service", "--time", "0", f"unix://{socket}"),
        env=podman.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(socket.exists, "podman listens")
        done = subprocess.run(
            [
                *(PYTHON, SCRIPT, image, f"file://{tmp_path}/model/model.tar.gz", str(port)),
                *(tmp_path / "root", tmp_path / "picture"),
            ],
            capture_output=True,
            text=True,
            timeout=1000,
            env=environment,
        )
    finally:
        service.terminate()
        service.wait(timeout=60)
        podman.run("podman", "network", "rm", "--force", "--time", "0", NETWORK, is_checked=False)

    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["asked"] == {"response_text": "The circle is red."}
    assert told["closed"] == {"success": True}
