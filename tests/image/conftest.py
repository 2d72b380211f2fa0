"""Build the image once for the whole run; see tests/podman.py."""

import os

import pytest

from tests.podman import Podman


@pytest.fixture(scope="session")
def podman() -> Podman:
    return Podman()


@pytest.fixture(scope="session")
def image(podman: Podman) -> str:
    """Return the image with the demo model's archive, or an existing image, of any base, by its name."""
    return os.environ.get("TORCHMOOR_TEST_IMAGE") or podman.build(arguments={"DEMO_MODELS": "llava"})
