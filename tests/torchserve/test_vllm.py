"""vLLM behind the same sessions: its contract, and a fleet of two real TorchServe instances, one of which is killed."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from botocore.exceptions import ClientError

from scripts.make_adapters import make_adapters
from tests.tools import require_vllm
from tests.torchserve.conftest import ROOT, Fleet, processes_below, run_fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.in_s3.fleet import CHECKPOINT
from tests.torchserve.in_s3.test_adapters import Adapted, find_expected
from tests.torchserve.long_streams import num_continued
from tests.torchserve.test_faults import find_jvm, ready_instances, slowed_process, worker_pids
from tests.torchserve.test_lost_instance import open_at
from tests.torchserve.test_sessions import Chat, open_session
from tests.vllm.rename_weights import copy_renamed
from tests.vllm.tiny_families import ANSWERING
from tests.waiting import wait_until
from torchmoor.wire.headers import INSTANCE

pytestmark = [pytest.mark.torchserve, pytest.mark.slow, pytest.mark.timeout(900)]
TESTS = ROOT / "tests" / "vllm"
NUM_ADAPTERS = 2
START_S = 600  # for vLLM, on a busy machine
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
    return require_vllm()


def run_on_vllm(python: Path, tests: str, *options: str) -> None:
    """Run a file of tests/vllm with the Python that has vLLM; it must pass."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST"))}

    done = subprocess.run(
        [python, "-m", "pytest", "-c", TESTS / "pytest.ini", TESTS / tests, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env={**environment, "OMP_NUM_THREADS": "1"},
    )

    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert " passed" in done.stdout.splitlines()[-1]


def test_vllm_keeps_the_contract_of_engines(vllm: Path) -> None:
    """Every test of the contract passes on vLLM itself."""
    run_on_vllm(vllm, "test_contract.py")


def test_vllm_reads_prompts_of_vision_families_as_transformers_does(vllm: Path) -> None:
    """vLLM's processors give the same token ids, and families that it would compute wrongly are refused."""
    run_on_vllm(vllm, "test_family_prompts.py")


def test_vllm_does_not_log_requests(vllm: Path) -> None:
    """The handler's log configuration applies to vLLM's loggers."""
    run_on_vllm(vllm, "test_logging.py")


@pytest.mark.parametrize("family", ANSWERING)
def test_vision_families_on_vllm_answer_as_transformers_does(vllm: Path, family: str) -> None:
    """A tiny random checkpoint of each family gives transformers' answers, each in its own vLLM."""
    run_on_vllm(vllm, "test_model_families.py", "-k", family)


@pytest.fixture(scope="module")
def two(archives: Path, vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run two instances; at the end, none of their processes or vLLM's is left."""
    folder = tmp_path_factory.mktemp("vllm")
    checkpoint = copy_renamed(ROOT / "models" / "tiny-llava", folder / "tiny-llava")
    make_adapters(CHECKPOINT, folder / "adapters", NUM_ADAPTERS, strength=1.0)
    with run_fleet(
        *(str(checkpoint), "--name", "llava", "--instances", "2"),
        *("--adapters", str(folder / "adapters")),
        *("--python", str(vllm), "--start-timeout", str(START_S), "--journal", (folder / "journal").as_uri()),
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
    """An image is sent once; later questions reuse vLLM's cache, as their receipts state."""
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


def test_adapters_on_vllm_answer_as_merged_models(two: Fleet) -> None:
    """Adapters of one question run together, and a session keeps its adapter."""
    expected = find_expected(sorted((two.run_dir.parent / "adapters").iterdir()))
    adapted = Adapted(two, two.run_dir, two.run_dir.parent / "adapters", expected)
    names = [name for name in expected if name]

    with ThreadPoolExecutor(len(expected)) as threads:
        answers = list(threads.map(adapted.complete, ["llava", *(f"llava/{name}" for name in names)]))
    assert answers == [expected[""], *(expected[name] for name in names)]
    assert adapted.ask(adapted.open(TargetModel=names[1]))[0] == expected[names[1]]
    with pytest.raises(openai.NotFoundError):
        adapted.complete("llava/none")


def test_what_vllm_lacks_is_refused_by_name(two: Fleet) -> None:
    client = two.client()

    with pytest.raises(ClientError, match="typical_p"):
        client.invoke_endpoint(
            EndpointName="llava",
            ContentType="application/json",
            Body=json.dumps({"inputs": "Hello", "parameters": {"typical_p": 0.5, "do_sample": True}}),
        )


def find_vllm(fleet: Fleet, instance: str) -> psutil.Process:
    """Return the process of vLLM's scheduler and model."""
    [worker] = worker_pids(fleet.run_dir, instance)
    [core] = [each for each in psutil.Process(worker).children() if "EngineCore" in " ".join(each.cmdline())]
    return core


def wait_for_restart(fleet: Fleet, instance: str, worker: int) -> None:
    """Wait until the worker has ended and another one of the instance serves."""
    wait_until(lambda: not psutil.pid_exists(worker), "the worker has ended")
    wait_until(lambda: instance in fleet.settled(), "the worker is back", deadline_s=START_S, interval_s=0.5)


def test_vllm_that_dies_between_answers_is_started_again(two: Fleet) -> None:
    """The worker detects the end of vLLM without a request, and the session continues."""
    wait_until(lambda: len(two.settled()) == 2, "both instances at work")
    chat = open_at(two, "llava-1", "llava-0")
    assert chat.ask(QUESTION) == "The circle is red."
    worker = worker_pids(two.run_dir, "llava-1")[0]

    find_vllm(two, "llava-1").kill()

    wait_until(lambda: not psutil.pid_exists(worker), "the worker has ended")
    assert chat.ask(QUESTION) == "The circle is red."
    wait_for_restart(two, "llava-1", worker)
    assert chat.ask(QUESTION) == "The circle is red."


def test_a_greedy_stream_continues_when_vllm_dies(two: Fleet) -> None:
    """After kill -9 of vLLM in mid-answer, the client gets each character once."""
    wait_until(lambda: len(two.settled()) == 2, "both instances at work")
    asked: Any = {"model": "llava", "prompt": "a", "temperature": 0, "max_tokens": 100}
    with (
        openai.OpenAI(base_url=f"{two.runtime}/v1", api_key="any", timeout=240, max_retries=0) as gpt,
        ExitStack() as slow,
    ):
        whole = gpt.completions.create(**asked).choices[0].text
        before = num_continued(two)
        for name in ("llava-0", "llava-1"):
            slow.enter_context(slowed_process(find_vllm(two, name).pid))
        raw = gpt.completions.with_raw_response.create(**asked, stream=True)
        chunks = iter(raw.parse())
        text = next(chunks).choices[0].text
        home = raw.headers[INSTANCE]
        [worker] = worker_pids(two.run_dir, home)
        find_vllm(two, home).kill()
        text += "".join(chunk.choices[0].text for chunk in chunks)

    assert text == whole
    assert num_continued(two) == before + 1
    wait_for_restart(two, home, worker)


def test_another_instance_adopts_the_session_of_a_killed_one(two: Fleet) -> None:
    """After kill -9 of TorchServe and its worker vLLM ends, too, and the other instance has the image."""
    chat = open_session(two.client(), path=data_url(draw("circle", "red")))
    assert chat.ask(QUESTION) == "The circle is red."
    home = home_of(chat)
    mark = f"TORCHMOOR_INSTANCE={home}\0".encode()
    of_home = [pid for pid in processes_below(two.run_dir) if mark in Path(f"/proc/{pid}/environ").read_bytes() + b"\0"]
    victims = [find_jvm(two.run_dir, home), *worker_pids(two.run_dir, home)]
    assert len(of_home) > len(victims)
    (other,) = {"llava-0", "llava-1"} - {home}
    before = two.status(other)["sessions"]["adopted"]

    for pid in victims:
        os.kill(pid, signal.SIGKILL)

    wait_until(lambda: home not in ready_instances(two), "the proxy notices")
    assert chat.ask(QUESTION) == "The circle is red."
    assert two.status(other)["sessions"]["adopted"] == before + 1
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in of_home), "vLLM has ended")
