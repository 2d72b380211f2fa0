"""The role `instance`, as a kubelet and a proxy see it; its model is an unpacked archive."""

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import requests

from tests.podman import ROOT, Podman
from tests.waiting import wait_until
from torchmoor.fleet.ports import find_free_ports

pytestmark = [pytest.mark.image, pytest.mark.slow, pytest.mark.timeout(1800)]
ANSWER = {"max_new_tokens": 1200, "do_sample": True, "temperature": 1e6, "seed": 6}


def test_an_instance_is_ready_serves_and_drains(podman: Podman, image: str, tmp_path: Path) -> None:
    """The probe port answers probes; after SIGTERM the probe reports draining while running requests complete."""
    model = tmp_path / "model"
    build = [sys.executable, ROOT / "scripts" / "build_archives.py", "--only", "llava", "--model-store", tmp_path]
    subprocess.run(build, check=True, timeout=120)
    with zipfile.ZipFile(tmp_path / "llava.mar") as bundle:
        bundle.extractall(model)
    port, side = find_free_ports(2)
    with podman.start(
        image,
        "instance",
        log=tmp_path / "instance.log",
        environment={
            "TORCHMOOR_INSTANCE_NAME": "llava-0",
            "TORCHMOOR_INFERENCE_PORT": str(port),
            "TORCHMOOR_SIDE_PORT": str(side),
            "TORCHMOOR_DRAIN_S": "100",  # a busy machine computes the answer for longer than the usual 20 s
            "TORCHMOOR_SETTLE_S": "0.5",
            "TORCHMOOR_SESSION_KEYS": f"k0:{'ab' * 32}",
        },
        mounts={model: "/opt/ml/model"},
    ) as container:
        at = f"http://127.0.0.1:{side}"
        container.wait_until_ok(f"{at}/ready")
        assert requests.get(f"{at}/live", timeout=30).status_code == 200
        [description] = requests.get(f"{at}/models/llava", timeout=30).json()
        assert description["workers"][0]["status"] == "READY"
        assert "torchmoor_" in requests.get(f"{at}/metrics", timeout=30).text
        predictions = f"http://127.0.0.1:{port}/predictions/llava"
        opened = requests.post(predictions, json={"requestType": "NEW_SESSION"}, timeout=120)
        assert "-llava-0-" in opened.json()["session_id"], "ids carry the instance's name"

        body = {"inputs": "Once", "stream": True, "parameters": ANSWER}
        with requests.post(predictions, json=body, stream=True, timeout=120) as answer:
            pieces = answer.iter_content(None)
            told = next(pieces)
            os.kill(container.pid, signal.SIGTERM)
            wait_until(lambda: is_going(at), "the probe reports draining")
            told += b"".join(pieces)

        assert json.loads(told.decode().split("data:")[-1])["details"]["finish_reason"]
        assert container.wait(60) == 0, container.log[-4000:]
        assert "torchmoor: stopped" in container.log


@pytest.mark.long
def test_a_handler_that_lacks_a_module_ends_with_its_name(podman: Podman, image: str, tmp_path: Path) -> None:
    """A missing module ends the container with its name; TorchServe alone would restart the worker forever."""
    model = tmp_path / "model"
    (model / "MAR-INF").mkdir(parents=True)
    (model / "MAR-INF" / "MANIFEST.json").write_text(
        json.dumps({"runtime": "python", "model": {"modelName": "own", "handler": "own.py", "modelVersion": "1.0"}})
    )
    (model / "own.py").write_text("import nonesuch_module\n")
    port, side = find_free_ports(2)
    with podman.start(
        *(image, "instance"),
        log=tmp_path / "lacking.log",
        environment={"TORCHMOOR_INFERENCE_PORT": str(port), "TORCHMOOR_SIDE_PORT": str(side)},
        mounts={model: "/opt/ml/model"},
    ) as container:
        assert container.wait(600) == 1, container.log[-4000:]
        last = container.log.splitlines()[-1]
    assert last.startswith("torchmoor: error: ")
    assert last.endswith(" cannot load its model: ModuleNotFoundError: No module named 'nonesuch_module'")


def is_going(at: str) -> bool:
    """Return whether the container is not ready or has ended."""
    try:
        return requests.get(f"{at}/ready", timeout=30).status_code == 503
    except requests.ConnectionError:
        return True


def test_other_words_are_torchmoors_own_commands(podman: Podman, image: str, tmp_path: Path) -> None:
    """Other arguments are torchmoor's own commands; `proxy` is `torchmoor serve`. Invalid settings are reported."""
    config = tmp_path / "proxy" / "torchmoor.yaml"
    config.parent.mkdir()
    config.write_text("Endpoints: nonsense\n")
    with podman.start(
        *(image, "proxy", "--config", "/config/torchmoor.yaml", "--check"),
        log=tmp_path / "proxy.log",
        mounts={config.parent: "/config"},
    ) as container:
        assert container.wait(120) == 1
        assert container.log.splitlines()[-1].startswith("Error: /config/torchmoor.yaml: Endpoints must be a list")
