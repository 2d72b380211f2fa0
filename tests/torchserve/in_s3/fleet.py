"""Run a fleet whose checkpoint, journal and asynchronous results are in S3, and whose adapters are in a directory."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.make_adapters import make_adapters
from tests.servers import BUCKET, S3Server
from tests.torchserve.conftest import ROOT, Fleet, run_fleet
from tests.torchserve.journals import JOURNAL_URL, MAX_SESSIONS

CHECKPOINT = ROOT / "models" / "tiny-llava"
CHECKPOINTS = "checkpoints"
NAMES = ("adapter-000", "adapter-001", "adapter-002")  # of the adapters that there are from the start


@dataclass(frozen=True)
class FleetInS3:
    """adapters: their source. made: the folders of NAMES in it."""

    fleet: Fleet
    adapters: Path
    made: list[Path]


@contextmanager
def run_in_s3(s3_server: S3Server, folder: Path) -> Iterator[FleetInS3]:
    """Run two instances of an archive without weights, with the environment of a TGI container on SageMaker."""
    client = s3_server.client()
    client.create_bucket(Bucket=CHECKPOINTS)
    for path in CHECKPOINT.iterdir():
        if path.is_file():
            client.upload_file(str(path), CHECKPOINTS, f"models/tiny/{path.name}")
    client.close()
    empty = folder / "models" / CHECKPOINT.name
    empty.mkdir(parents=True)
    (empty / "config.json").write_text("{}")
    store = ("--model-store", str(folder / "store"))
    build = [sys.executable, str(ROOT / "scripts" / "build_archives.py"), "--models-dir", str(empty.parent), *store]
    subprocess.run(build, check=True, timeout=60)
    made = make_adapters(CHECKPOINT, folder / "adapters", len(NAMES), strength=1.0)
    environment = {
        **s3_server.environment,
        JOURNAL_URL: f"s3://{BUCKET}/fleet",
        "HF_MODEL_ID": f"s3://{CHECKPOINTS}/models/tiny",
        "SM_NUM_GPUS": "0",
        "DTYPE": "float32",
        "MAX_INPUT_LENGTH": "150",
        "MAX_TOTAL_TOKENS": "200",
        "TORCHMOOR_HANDLER_MODEL_CACHE_DIR": str(folder / "cache"),
        "TORCHMOOR_HANDLER_SESSION_MAX_SESSIONS": str(MAX_SESSIONS),
        "TORCHMOOR_HANDLER_MANY_CACHE_DIR": str(folder / "adapter-cache"),
        "TORCHMOOR_HANDLER_MANY_REFRESH_S": "0.5",
    }
    with run_fleet(
        *(*store, "--endpoint", "llava", "--instances", "2", "--adapters", str(folder / "adapters")),
        *("--async-output", f"s3://{BUCKET}/results"),
        run_dir=folder / "run",
        log=folder / "up.log",
        environment=environment,
    ) as fleet:
        yield FleetInS3(fleet, folder / "adapters", made)
