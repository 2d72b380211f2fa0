"""Render each overlay once with kustomize and new secrets."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.kubernetes.manifests import OVERLAYS, Overlay, copy_with_secrets, render


@pytest.fixture(scope="session")
def kubernetes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of deploy/kubernetes with secrets in it."""
    return copy_with_secrets(tmp_path_factory.mktemp("kubernetes") / "kubernetes")


@pytest.fixture(scope="session")
def rendered(kubernetes_folder: Path) -> Callable[[str], Overlay]:
    """Return an overlay by its name."""
    return cache(lambda name: render(name, kubernetes_folder))


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest, rendered: Callable[[str], Overlay]) -> Overlay:
    """Parametrize over all overlays."""
    return rendered(request.param)


@pytest.fixture
def demo(rendered: Callable[[str], Overlay]) -> Overlay:
    return rendered("demo")
