"""The image, built once for the whole run; see tests/podman.py for how."""

from __future__ import annotations

import pytest

from tests.podman import Podman


@pytest.fixture(scope="session")
def podman() -> Podman:
    return Podman()


@pytest.fixture(scope="session")
def image(podman: Podman) -> str:
    """With the demo model's archive in it."""
    return podman.build(arguments={"DEMO_MODELS": "llava"})
