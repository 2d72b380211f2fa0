"""A fleet that is to run on this machine, with places of the test's own."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchmoor.config.listen import ListenSettings
from torchmoor.doctor.finding import FleetPlan

MakePlan = Callable[..., FleetPlan]


@pytest.fixture
def make_plan(tmp_path: Path) -> MakePlan:
    def make(**given: Any) -> FleetPlan:
        usual: dict[str, Any] = {
            "endpoints": ("llava",),
            "num_instances": 1,
            "model_store": tmp_path,
            "run_dir": Path(tempfile.gettempdir()) / "torchmoor-xxxxxxxx",
            "journal": "",
            "listen": ListenSettings(port=0, admin_port=0),
            "url": "http://127.0.0.1:9",
            "admin_url": "http://127.0.0.1:9",
        }
        return FleetPlan(**{**usual, **given})

    return make
