"""Models in the container: many that the platform loads, and errors for models that cannot be loaded."""

import json
from pathlib import Path

import pytest
import requests

from scripts.make_minilm import TARGET
from tests.archives import unpack_tar
from tests.podman import Podman
from tests.tools import missing
from torchmoor.cli.model_archive import package
from torchmoor.fleet.ports import find_free_ports

pytestmark = [pytest.mark.image, pytest.mark.slow, pytest.mark.timeout(1800)]
NAMES = ("8d2f0a1c9be94b0f", "51d0c34e77aa41d2")  # in the platform's form


def test_a_platform_loads_and_unloads_many_models(podman: Podman, image: str, tmp_path: Path) -> None:
    """The platform loads and unloads real MiniLM archives, unpacked where SageMaker unpacks them."""
    if not (TARGET / "config.json").is_file():
        missing(f"there is no {TARGET}: make archives downloads it")
    archive = package(TARGET, tmp_path / "minilm.tar.gz").path
    models = tmp_path / "models"
    for name in NAMES:
        unpack_tar(archive, models / name / "model")
    port, admin_port = find_free_ports(2)
    with podman.start(
        image,
        "serve",
        log=tmp_path / "many.log",
        environment={
            "SAGEMAKER_MULTI_MODEL": "true",
            "SAGEMAKER_BIND_TO_PORT": str(port),
            "TORCHMOOR_ADMIN_PORT": str(admin_port),
        },
        mounts={models: "/opt/ml/models"},
    ) as container:
        at = f"http://127.0.0.1:{port}"
        container.wait_until_ok(f"{at}/ping")
        rows = [{"modelName": name, "modelUrl": f"/opt/ml/models/{name}/model"} for name in NAMES]
        for row in rows:
            order = {"model_name": row["modelName"], "url": row["modelUrl"]}
            assert requests.post(f"{at}/models", json=order, timeout=240).status_code == 200, container.log[-4000:]
            assert requests.post(f"{at}/models", json=order, timeout=240).status_code == 409
        assert requests.get(f"{at}/models", timeout=60).json() == {"models": sorted(rows, key=lambda r: r["modelName"])}

        invoke = f"{at}/models/{NAMES[0]}/invoke"
        headers = {"X-Amzn-SageMaker-Target-Model": "minilm.tar.gz"}
        answer = requests.post(invoke, json={"inputs": "a red circle"}, headers=headers, timeout=240)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["embeddings"]) == 384

        assert requests.delete(f"{at}/models/{NAMES[0]}", timeout=240).status_code == 200
        assert requests.post(invoke, json={"inputs": "x"}, headers=headers, timeout=60).status_code == 404
        assert requests.get(f"{at}/models/{NAMES[0]}", timeout=60).status_code == 404
        assert requests.get(f"{at}/models/{NAMES[1]}", timeout=60).json() == rows[1]


def test_a_folder_without_a_model_ends_at_once_and_says_what_to_do(podman: Podman, image: str, tmp_path: Path) -> None:
    """A folder without a model ends the container at once with advice in its log, which SageMaker shows."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.onnx").touch()
    with podman.start(image, "serve", log=tmp_path / "none.log", mounts={model: "/opt/ml/model"}) as container:
        assert container.wait(120) == 1
        last = container.log.splitlines()[-1]
    assert last.startswith("torchmoor: error: /opt/ml/model has no model that can be served, but model.onnx: put there")


def test_a_checkpoint_that_cannot_be_loaded_ends_with_the_handlers_reason(
    podman: Podman, image: str, tmp_path: Path
) -> None:
    """A broken checkpoint ends the container with the handler's reason; TorchServe alone would retry forever."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "gpt_unheard_of", "architectures": ["Unheard"]}))
    port, admin_port = find_free_ports(2)
    with podman.start(
        image,
        "serve",
        log=tmp_path / "wrong.log",
        environment={"SAGEMAKER_BIND_TO_PORT": str(port), "TORCHMOOR_ADMIN_PORT": str(admin_port)},
        mounts={model: "/opt/ml/model"},
    ) as container:
        assert container.wait(600) == 1, container.log[-4000:]
        errors = [line for line in container.log.splitlines() if line.startswith("torchmoor: error: ")]
    assert len(errors) == 1
    assert "chat-0 cannot load its model: " in errors[0]
    assert "gpt_unheard_of" in errors[0]
