"""deploy/docker/Dockerfile, as a linter and as an engine reads it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.podman import DOCKERFILE, Podman


def test_dockerfile_passes_hadolint() -> None:
    """Without an exception but those that say why in the file."""
    hadolint = Path(sys.executable).with_name("hadolint")

    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.image
@pytest.mark.timeout(1800)
def test_image_has_what_platforms_look_for(podman: Podman, image: str) -> None:
    """SageMaker's labels, an exec-form entry point with an init, a health check, and root unless somebody says more."""
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
