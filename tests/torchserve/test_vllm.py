"""vLLM behind the same sessions: its contract, and a fleet of two real TorchServe instances, one of which is killed."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from tests.torchserve.conftest import ROOT, Fleet, run_fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_failover import find_jvm
from tests.torchserve.test_faults import PATIENTLY, processes_below, ready_instances, worker_pids
from tests.torchserve.test_sessions import Chat, open_session
from tests.vllm.rename_weights import copy_renamed
from tests.waiting import wait_until

pytestmark = [pytest.mark.torchserve, pytest.mark.slow, pytest.mark.timeout(900)]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
TESTS = ROOT / "tests" / "vllm"
QUESTION = "What color is the circle?"
HANDLER = {
    "ENGINE_NAME": "vllm",
    "MODEL_DTYPE": "float32",
    "SESSION_KV_BYTES": str(256 << 20),
    "VLLM_ENFORCE_EAGER": "true",
    "VLLM_OPTIONS": json.dumps({"block_size": 32}),
}


@pytest.fixture(scope="module")
def vllm() -> Path:
    """Return the Python that has vLLM. CI does not install it."""
    if not PYTHON.exists():
        pytest.skip("vLLM is not installed; run make setup-vllm")
    return PYTHON


def test_vllm_keeps_the_contract_of_engines(vllm: Path) -> None:
    """Every test there passes, on vLLM itself."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST"))}

    done = subprocess.run(
        [vllm, "-m", "pytest", "-c", TESTS / "pytest.ini", TESTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env={**environment, "OMP_NUM_THREADS": "1"},
    )

    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert " passed" in done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def two(archives: Path, vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run two instances; at the end, no process of theirs or of vLLM is left."""
    folder = tmp_path_factory.mktemp("vllm")
    checkpoint = copy_renamed(ROOT / "models" / "tiny-llava", folder / "tiny-llava")
    with run_fleet(
        *(str(checkpoint), "--name", "llava", "--instances", "2"),
        *("--python", str(vllm), "--start-timeout", "600", "--journal", (folder / "journal").as_uri()),
        run_dir=folder / "run",
        log=folder / "up.log",
        environment={f"TORCHMOOR_HANDLER_{name}": value for name, value in HANDLER.items()},
    ) as fleet:
        yield fleet
    assert processes_below(folder / "run") == []


def home_of(chat: Chat) -> str:
    """Return the instance that a session's id names."""
    return next(name for name in ("llava-0", "llava-1") if name in chat.id)


def test_a_session_on_vllm_answers_and_streams(two: Fleet) -> None:
    """A picture is sent once; later questions reuse what vLLM has computed, and the receipts say so."""
    chat = open_session(two.client(), path=data_url(draw("circle", "red")))

    assert chat.ask(QUESTION) == "The circle is red."
    pieces = chat.stream(QUESTION)
    assert b"".join(pieces).decode().count("red") >= 1
    assert len(pieces) > 1
    later = chat.invoke({"type": "send_text_prompt", "session_id": chat.id, "prompt_text": QUESTION})
    headers = later["ResponseMetadata"]["HTTPHeaders"]
    assert int(headers["x-torchmoor-prefill-tokens"]) < int(headers["x-torchmoor-context-tokens"])
    status = two.status(home_of(chat))
    assert status["capabilities"]["engine"] == "vllm"
    assert (status["capabilities"]["can_pin"], status["capabilities"]["refused"]) == (False, ["typical_p"])
    assert status["tokens"]["reused"] > 0
    assert status["images"]["received"] == 1


def test_what_vllm_lacks_is_refused_by_name(two: Fleet) -> None:
    client = two.client()

    with pytest.raises(ClientError, match="typical_p"):
        client.invoke_endpoint(
            EndpointName="llava",
            ContentType="application/json",
            Body=json.dumps({"inputs": "Hello", "parameters": {"typical_p": 0.5, "do_sample": True}}),
        )


def test_another_instance_adopts_the_session_of_a_killed_one(two: Fleet) -> None:
    """kill -9 of TorchServe and its worker: vLLM ends with them, and the other instance knows the picture."""
    chat = open_session(two.client(), path=data_url(draw("circle", "red")))
    assert chat.ask(QUESTION) == "The circle is red."
    home = home_of(chat)
    mark = f"TORCHMOOR_INSTANCE={home}\0".encode()
    of_home = [pid for pid in processes_below(two.run_dir) if mark in Path(f"/proc/{pid}/environ").read_bytes() + b"\0"]
    victims = [find_jvm(two.run_dir, home), *worker_pids(two.run_dir, home)]
    assert len(of_home) > len(victims)

    for pid in victims:
        os.kill(pid, signal.SIGKILL)

    wait_until(lambda: home not in ready_instances(two), "the proxy notices", **PATIENTLY)
    assert chat.ask(QUESTION) == "The circle is red."
    (other,) = {"llava-0", "llava-1"} - {home}
    assert two.status(other)["sessions"]["adopted"] == 1
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in of_home), "vLLM has ended", **PATIENTLY)
