"""The image, built once for the whole run; see tests/podman.py for how."""

from __future__ import annotations

import os

import pytest

from tests.podman import Podman


@pytest.fixture(scope="session")
def podman() -> Podman:
    return Podman()


@pytest.fixture(scope="session")
def image(podman: Podman) -> str:
    """With the demo model's archive in it; or one that was built before, of whatever base, by its name."""
    return os.environ.get("TORCHMOOR_TEST_IMAGE") or podman.build(arguments={"DEMO_MODELS": "llava"})
