"""An archive without weights, with a checkpoint and a journal in S3 that only the environment names."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from botocore.exceptions import ClientError

from tests.servers import BUCKET, S3Server
from tests.torchserve.conftest import ROOT, Fleet, run_fleet
from tests.torchserve.drawings import draw
from tests.torchserve.journals import JOURNAL_URL, check_fleet

pytestmark = [pytest.mark.torchserve, pytest.mark.s3]

CHECKPOINTS = "checkpoints"


@pytest.fixture(scope="module")
def from_s3(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run two instances with the environment of a TGI container on SageMaker and a journal in S3."""
    folder = tmp_path_factory.mktemp("from-s3")
    empty = folder / "models" / "tiny-llava"
    empty.mkdir(parents=True)
    (empty / "config.json").write_text("{}")
    store = ("--model-store", str(folder / "store"))
    build = [sys.executable, str(ROOT / "scripts" / "build_archives.py"), "--models-dir", str(empty.parent), *store]
    subprocess.run(build, check=True, timeout=60)
    client = s3_server.client()
    client.create_bucket(Bucket=CHECKPOINTS)
    for path in (ROOT / "models" / "tiny-llava").iterdir():
        if path.is_file():
            client.upload_file(str(path), CHECKPOINTS, f"models/tiny/{path.name}")
    client.close()
    environment = {
        **s3_server.environment,
        JOURNAL_URL: f"s3://{BUCKET}/fleet",
        "HF_MODEL_ID": f"s3://{CHECKPOINTS}/models/tiny",
        "SM_NUM_GPUS": "0",
        "DTYPE": "float32",
        "MAX_INPUT_LENGTH": "150",
        "MAX_TOTAL_TOKENS": "200",
        "TORCHMOOR_HANDLER_MODEL_CACHE_DIR": str(folder / "cache"),
    }
    run_dir, log = folder / "run", folder / "up.log"
    with run_fleet(
        *store, "--endpoint", "llava", "--instances", "2", run_dir=run_dir, log=log, environment=environment
    ) as fleet:
        yield fleet


def test_a_checkpoint_in_s3_serves_by_configuration_alone(from_s3: Fleet) -> None:
    """The model sees pictures and answers rightly."""
    client = from_s3.client()
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


def test_its_limits_are_those_of_the_environment(from_s3: Fleet) -> None:
    """A question beyond MAX_INPUT_LENGTH is refused with the limit."""
    client = from_s3.client()
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


def test_sessions_in_s3_survive_their_instance(from_s3: Fleet, s3_server: S3Server) -> None:
    """After kill -9 of a JVM, sessions continue elsewhere with the environment's credentials."""

    def kept(session_id: str) -> list[str]:
        found = s3_server.client().list_objects_v2(Bucket=BUCKET, Prefix="fleet/").get("Contents", [])
        return sorted({item["Key"].split("/")[4] for item in found if session_id in item["Key"]})

    check_fleet(from_s3, kept, ["events", "images"], ["events"])
