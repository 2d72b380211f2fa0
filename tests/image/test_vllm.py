"""The image with vLLM: a base image that has it, and the same sessions in the container."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

from tests.podman import BUILD_TIMEOUT_S, Container, Podman
from tests.tools import require_vllm
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_vllm import HANDLER, START_S
from tests.vllm.rename_weights import copy_renamed
from tests.waiting import wait_until
from torchmoor.fleet.ports import find_free_ports

pytestmark = [pytest.mark.image, pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]
BASE, IMAGE = "localhost/torchmoor-test-vllm-base", "localhost/torchmoor-test-vllm"


@pytest.fixture(scope="module")
def image(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Build the image on Debian with the packages of .venv-vllm, as in an image of vLLM's own."""
    packages = require_vllm().parents[1] / "lib" / "python3.11" / "site-packages"
    recipe = tmp_path_factory.mktemp("vllm-base") / "Dockerfile"

    def make_base(debian: str) -> str:
        recipe.write_text(
            f"FROM {debian}\n"
            "RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 g++ python3-dev\n"
            "COPY . /usr/local/lib/python3.11/dist-packages\n"
        )
        words = ("buildah", "build", "--layers", "--isolation", "chroot", "--format", "docker", "--quiet")
        podman.run(*words, "--tag", BASE, "--file", recipe, packages, timeout_s=BUILD_TIMEOUT_S)
        return BASE

    return podman.build(IMAGE, {"TORCH": "vllm"}, make_base)


@contextmanager
def serving(podman: Podman, image: str, folder: Path, *options: str) -> Iterator[tuple[Container, str]]:
    """Run the container with the demo checkpoint until the context ends; the address is its own."""
    checkpoint = copy_renamed(ROOT / "models" / "tiny-llava", folder / "tiny-llava")
    port, admin_port = find_free_ports(2)
    with podman.start(
        image,
        "serve",
        log=folder / "vllm.log",
        options=options,
        environment={
            **{f"TORCHMOOR_HANDLER_{name}": value for name, value in HANDLER.items()},
            "TORCHMOOR_START_TIMEOUT_S": str(START_S),
            "SAGEMAKER_BIND_TO_PORT": str(port),
            "TORCHMOOR_ADMIN_PORT": str(admin_port),
        },
        mounts={checkpoint: "/opt/ml/model"},
    ) as container:
        yield container, f"http://127.0.0.1:{port}"


def test_the_image_serves_a_session_on_vllm(podman: Podman, image: str, tmp_path: Path) -> None:
    """An image opens a session, and vLLM answers a question and a follow-up about it."""
    with serving(podman, image, tmp_path, "--shm-size=1g") as (container, url):
        container.wait_until_ok(f"{url}/ping")
        header = "X-Amzn-SageMaker-Session-Id"
        picture = {"type": "start_session", "path": data_url(draw("circle", "red"))}
        opened = requests.post(f"{url}/invocations", json=picture, headers={header: "NEW_SESSION"}, timeout=240)
        session = {header: opened.json()["session_id"]}
        answers = [
            requests.post(
                f"{url}/invocations",
                json={"type": "send_text_prompt", "prompt_text": question},
                headers=session,
                timeout=240,
            ).json()
            for question in ("What color is the circle?", "What shape is it?")
        ]

    assert answers == [{"response_text": "The circle is red."}, {"response_text": "It is a circle."}]


def test_too_little_shared_memory_is_explained(podman: Podman, image: str, tmp_path: Path) -> None:
    """If the container's shared memory is too small for vLLM's processes, the error says how to increase it."""
    with serving(podman, image, tmp_path) as (container, _):
        wait_until(lambda: container.process.poll() is not None, "the container ends", deadline_s=START_S)

    assert "give a container --shm-size 1g" in container.log
