"""Share one fleet in this folder: two TorchServe instances with memory for 20 of 220 models."""

import shutil
from collections.abc import Iterator

import pytest

from scripts.make_minilm import TARGET
from tests.tools import missing
from tests.torchserve.conftest import run_fleet
from tests.torchserve.many.fleet import ManyFleet
from tests.torchserve.many.population import populate

MINILM_BYTES = 91_000_000
NUM_RESIDENT = 20


@pytest.fixture(scope="package")
def many(archives: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManyFleet]:
    """Run the fleet, with the container's API; the models' source is checked every second."""
    if not (TARGET / "config.json").is_file():
        missing(f"there is no {TARGET}: make archives downloads it")
    folder = tmp_path_factory.mktemp("many")
    source = folder / "models"
    source.mkdir()
    population = populate(source, folder / "scratch")
    settings = {
        "cache_dir": str(folder / "cache"),
        "device_bytes": str(NUM_RESIDENT * MINILM_BYTES),
        "allow_torchscript": "true",
        "refresh_s": "1",
        "url_roots": str(source / "platform"),
    }
    environment = {f"TORCHMOOR_HANDLER_MANY_{name.upper()}": value for name, value in settings.items()}
    environment["SAGEMAKER_MULTI_MODEL"] = "true"
    arguments = ("--endpoint", "many", "--models", str(source), "--instances", "2")
    with run_fleet(*arguments, run_dir=folder / "run", log=folder / "up.log", environment=environment) as fleet:
        yield ManyFleet(fleet, population)
    for large in (source, folder / "scratch", folder / "cache"):
        shutil.rmtree(large, ignore_errors=True)
