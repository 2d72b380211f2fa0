"""An archive without weights, and a checkpoint in S3 that nothing but the environment names."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from tests.servers import run_s3
from tests.torchserve.conftest import ROOT, Fleet, run_fleet
from tests.torchserve.drawings import draw

pytestmark = pytest.mark.torchserve

BUCKET = "checkpoints"


@pytest.fixture(scope="module")
def other_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One instance, told as a container of TGI on SageMaker would be."""
    folder = tmp_path_factory.mktemp("other-checkpoint")
    empty = folder / "models" / "tiny-llava"
    empty.mkdir(parents=True)
    (empty / "config.json").write_text("{}")
    store = ("--model-store", str(folder / "store"))
    build = [sys.executable, str(ROOT / "scripts" / "build_archives.py"), "--models-dir", str(empty.parent), *store]
    subprocess.run(build, check=True, timeout=60)
    (folder / "s3").mkdir()
    with run_s3(folder / "s3") as server:
        client = server.client()
        client.create_bucket(Bucket=BUCKET)
        for path in (ROOT / "models" / "tiny-llava").iterdir():
            if path.is_file():
                client.upload_file(str(path), BUCKET, f"models/tiny/{path.name}")
        client.close()
        environment = {
            **server.environment,
            "HF_MODEL_ID": f"s3://{BUCKET}/models/tiny",
            "SM_NUM_GPUS": "0",
            "DTYPE": "float32",
            "MAX_INPUT_LENGTH": "150",
            "MAX_TOTAL_TOKENS": "200",
            "TORCHMOOR_HANDLER_MODEL_CACHE_DIR": str(folder / "cache"),
        }
        with run_fleet(*store, run_dir=folder / "run", log=folder / "up.log", environment=environment) as running:
            yield running


def test_a_checkpoint_in_s3_serves_by_configuration_alone(other_fleet: Fleet) -> None:
    """It sees, and answers rightly."""
    client = other_fleet.client()
    opened = client.invoke_endpoint(
        EndpointName="llava", SessionId="NEW_SESSION", ContentType="image/png", Body=draw("circle", "red")
    )

    answer = client.invoke_endpoint(
        EndpointName="llava",
        SessionId=opened["NewSessionId"].partition(";")[0],
        ContentType="application/json",
        Body=json.dumps({"type": "send_text_prompt", "prompt_text": "What color is the circle?"}),
    )

    assert json.load(answer["Body"]) == {"response_text": "The circle is red."}


def test_its_limits_are_those_of_the_environment(other_fleet: Fleet) -> None:
    """A question over MAX_INPUT_LENGTH is refused with the number."""
    client = other_fleet.client()
    opened = client.invoke_endpoint(
        EndpointName="llava", SessionId="NEW_SESSION", ContentType="image/png", Body=draw("circle", "red")
    )

    with pytest.raises(ClientError, match="150"):
        client.invoke_endpoint(
            EndpointName="llava",
            SessionId=opened["NewSessionId"].partition(";")[0],
            ContentType="application/json",
            Body=json.dumps({"type": "send_text_prompt", "prompt_text": "What color is the circle? " * 40}),
        )


def test_a_configuration_that_cannot_be_served_ends_up_with_its_reason(archives: Path, tmp_path: Path) -> None:
    """`torchmoor up` says what the worker said, instead of trying for ever."""
    log = tmp_path / "up.log"

    with (
        pytest.raises(pytest.fail.Exception),
        run_fleet(run_dir=tmp_path / "run", log=log, environment={"SM_NUM_GPUS": "4"}),
    ):
        pass

    assert "one instance a GPU" in log.read_text()
