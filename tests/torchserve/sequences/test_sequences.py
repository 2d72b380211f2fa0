"""Sessions of TorchServe's sequenceBatching behind two proxy processes, used as AWS's LLaVA notebook uses them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests
from botocore.config import Config

from tests.servers import free_ports
from tests.torchserve.conftest import ROOT, Fleet, run_fleet
from tests.waiting import wait_until

pytestmark = pytest.mark.torchserve
HERE = Path(__file__).parent
ARCHIVER = Path(sys.executable).with_name("torch-model-archiver")
NAME = "counters"
SESSION = "X-Amzn-SageMaker-Session-Id"


def make_archive(folder: Path, *arguments: str) -> None:
    made = ("--model-name", NAME, "--version", "1.0", "--handler", HERE / "handler.py", "--export-path", folder)
    subprocess.run([ARCHIVER, *made, "--config-file", HERE / "model-config.yaml", *arguments], check=True, timeout=60)


@pytest.fixture(scope="module")
def counters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run two instances of the archive, with two sequence slots each, behind two proxy processes."""
    folder = tmp_path_factory.mktemp("sequences")
    store = folder / "store"
    store.mkdir()
    make_archive(store)
    arguments = ("--model-store", str(store), "--endpoint", NAME, "--instances", "2", "--processes", "2")
    with run_fleet(*arguments, run_dir=folder / "run", log=folder / "up.log") as fleet:
        yield fleet


def invoke(fleet: Fleet, session_id: str, **body: Any) -> dict[str, Any]:
    """Send a request on a connection of its own, which either proxy process may accept."""
    client = fleet.client(Config(retries={"max_attempts": 0}))
    answer: dict[str, Any] = client.invoke_endpoint(
        EndpointName=NAME, SessionId=session_id, ContentType="application/json", Body=json.dumps(body)
    )
    client.close()
    return {**answer, "json": json.loads(answer["Body"].read())}


def test_sessions_stay_with_their_instances_across_proxies(counters: Fleet) -> None:
    """The body has the same id as the header, and every process sends turns to the instance that opened the session.

    Each instance has two slots, which only sessions occupy; a closed session frees its slot.
    """
    opened = [invoke(counters, "NEW_SESSION", type="start_session") for _ in range(4)]
    ids = [answer["json"]["session_id"] for answer in opened]
    totals: dict[str, list[int]] = {sid: [] for sid in ids}
    for number in range(4):
        for sid in ids:
            totals[sid].append(invoke(counters, sid, type="add", number=number)["json"]["total"])
    seen = [invoke(counters, sid, type="seen") for sid in ids]
    closed = [invoke(counters, sid, type="close_session") for sid in ids]
    again = invoke(counters, "NEW_SESSION", type="start_session")

    assert all(sid.startswith("ts-seq-") for sid in ids)
    for answer, sid in zip(opened, ids, strict=True):
        assert answer["NewSessionId"].startswith(f"{sid}; Expires=")
    assert list(totals.values()) == [[0, 1, 3, 6]] * 4
    assert "NewSessionId" not in seen[0]
    assert [answer["ClosedSessionId"] for answer in closed] == ids
    kinds = {kind for answer in seen for kind in answer["json"]["seen"]}
    assert kinds <= {"start_session", "add", "seen", "close_session"}
    assert invoke(counters, again["json"]["session_id"], type="close_session")["json"] == {"success": True}


def test_operators_views_do_not_reach_the_handler(counters: Fleet) -> None:
    """The dashboard, the list of sessions and a disconnecting client send no request to the handler."""
    sid = invoke(counters, "NEW_SESSION", type="start_session")["json"]["session_id"]
    before = len(invoke(counters, sid, type="seen")["json"]["seen"])

    for path in ("/dashboard.json", "/sessions", "/instances"):
        assert requests.get(f"{counters.admin}{path}", timeout=60).status_code == 200
    after = invoke(counters, sid, type="seen")["json"]["seen"]
    invoke(counters, sid, type="close_session")

    assert len(after) == before + 1


def test_a_closed_or_forged_session_is_an_error(counters: Fleet) -> None:
    """A closed one gets the handler's own message, an id that this fleet did not create is refused."""
    client = counters.client()
    sid = invoke(counters, "NEW_SESSION", type="start_session")["json"]["session_id"]
    invoke(counters, sid, type="close_session")

    def is_refused() -> bool:  # TorchServe forgets a closed sequence soon after its answer
        with pytest.raises(client.exceptions.ClientError) as caught:
            invoke(counters, sid, type="add", number=1)
        return "was started here" in str(caught.value)

    wait_until(is_refused, "the closed session is unknown to the handler")
    with pytest.raises(client.exceptions.ValidationError, match="not issued by this endpoint"):
        invoke(counters, f"{sid[:-1]}{'a' if sid[-1] != 'a' else 'b'}", type="add", number=1)


@pytest.mark.slow
def test_the_image_starts_with_the_samples_environment(tmp_path: Path) -> None:
    """The container's role for SageMaker serves the sample's model folder with its notebook's variables."""
    make_archive(tmp_path, "--archive-format", "no-archive")
    (port, admin_port) = free_ports(2)
    config = tmp_path / "config.properties"
    config.write_text("inference_address=http://0.0.0.0:8080\nload_models=ALL\ndefault_response_timeout=200\n")
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("AWS_")},
        "SAGEMAKER_BIND_TO_PORT": str(port),
        "TORCHMOOR_ADMIN_PORT": str(admin_port),
        "TORCHMOOR_MODEL_DIR": str(tmp_path / NAME),
        "TS_CONFIG_FILE": str(config),
        "TS_DISABLE_TOKEN_AUTHORIZATION": "true",
        "TS_HEADER_KEY_SEQUENCE_ID": "X-Amzn-SageMaker-Session-Id",
        "TS_REQUEST_SEQUENCE_ID": "X-Amzn-SageMaker-Session-Id",
        "TS_HEADER_KEY_SEQUENCE_END": "X-Amzn-SageMaker-Closed-Session-Id",
        "TS_REQUEST_SEQUENCE_END": "X-Amzn-SageMaker-Closed-Session-Id",
        "TS_DISABLE_SYSTEM_METRICS": "false",
    }
    url = f"http://127.0.0.1:{port}"
    session = requests.Session()

    def is_ready() -> bool:
        assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
        with suppress(requests.ConnectionError):
            return requests.get(f"{url}/ping", timeout=10).status_code == 200
        return False

    def send(session_id: str, **body: Any) -> requests.Response:
        answer = session.post(f"{url}/invocations", json=body, headers={SESSION: session_id}, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer

    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "torchmoor.container", "serve"], stdout=log, stderr=log, env=environment, cwd=ROOT
        )
    with process, session:
        try:
            wait_until(is_ready, "the container answers pings")
            opened = send("NEW_SESSION", type="start_session")
            sid = opened.json()["session_id"]
            assert opened.headers[SESSION].startswith(f"{sid}; Expires=")
            assert send(sid, type="add", number=2).json() == {"total": 2}
            assert send(sid, type="close_session").headers["X-Amzn-SageMaker-Closed-Session-Id"] == sid
        finally:
            process.terminate()
            process.wait(timeout=60)
    assert "load_models in" in (tmp_path / "log").read_text()
