"""LoRA adapters as models of one endpoint, on real TorchServe: boto3's TargetModel, OpenAI's model names, sessions."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
import torch
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.torchserve.conftest import TORCHMOOR, Fleet
from tests.torchserve.in_s3.fleet import CHECKPOINT, NAMES, FleetInS3
from tests.torchserve.test_faults import worker_pids
from tests.unit.handlers.conftest import Reference
from tests.unit.handlers.merged import add_adapter
from tests.waiting import wait_until

pytestmark = [pytest.mark.torchserve, pytest.mark.s3]
QUESTION = "What is it?"
NUM_TOKENS = 8
RETRYING = Config(retries={"mode": "standard", "max_attempts": 10}, read_timeout=90)


@dataclass(frozen=True)
class Adapted:
    """A fleet of two instances with adapters. expected: each one's answer by transformers; the base model's is ""."""

    fleet: Fleet
    run_dir: Path
    source: Path
    expected: dict[str, str]

    def openai(self, path: str = "/endpoints/llava/openai/v1") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.fleet.runtime + path, api_key="any", max_retries=0, timeout=90)

    def complete(self, model: str, path: str = "/endpoints/llava/openai/v1") -> str:
        with self.openai(path) as gpt:
            answer = gpt.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": QUESTION}],
                max_tokens=NUM_TOKENS,
                temperature=0,
            )
        return answer.choices[0].message.content or ""

    def invoke(self, body: dict[str, Any], **members: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the answer and the headers of InvokeEndpoint."""
        answer = self.fleet.client(RETRYING).invoke_endpoint(
            EndpointName="llava", Body=json.dumps(body), ContentType="application/json", **members
        )
        return json.loads(answer["Body"].read()), answer["ResponseMetadata"]["HTTPHeaders"]

    def ask(self, session_id: str, **members: str) -> tuple[str, str]:
        """Return the answer of a session's turn, and the instance that gave it."""
        body = {"prompt_text": QUESTION, "type": "send_text_prompt", "parameters": {"max_new_tokens": NUM_TOKENS}}
        answer, headers = self.invoke(body, SessionId=session_id, **members)
        return str(answer["response_text"]), headers["x-torchmoor-instance"]

    def open(self, **members: str) -> str:
        client = self.fleet.client(RETRYING)
        body = json.dumps({"requestType": "NEW_SESSION"})
        opened = client.invoke_endpoint(
            EndpointName="llava", Body=body, ContentType="application/json", SessionId="NEW_SESSION", **members
        )
        return str(opened["NewSessionId"]).partition(";")[0]

    def tiers(self) -> dict[str, set[str]]:
        """Return the instances that have each adapter in memory."""
        rows = requests.get(f"{self.fleet.admin}/models", timeout=60).json()["models"]
        found: dict[str, set[str]] = {}
        for row in rows:
            if row["tier"] == "device":
                found.setdefault(row["name"], set()).add(row["instance"])
        return found


def find_expected(adapters: Sequence[Path]) -> dict[str, str]:
    """Return transformers' answers: of the demo model under an empty name, and of it with each adapter."""
    torch.set_num_threads(1)
    reference = Reference(CHECKPOINT)
    messages = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    expected = {"": reference(messages, [], NUM_TOKENS)}
    for each in adapters:
        add_adapter(reference.model, each)
        expected[each.name] = reference(messages, [], NUM_TOKENS)
        add_adapter(reference.model, each, sign=-1)
    assert len(set(expected.values())) == len(expected)
    return expected


@pytest.fixture(scope="module")
def adapted(in_s3: FleetInS3) -> Adapted:
    return Adapted(in_s3.fleet, in_s3.fleet.run_dir, in_s3.adapters, find_expected(in_s3.made))


def test_openai_model_names_select_the_adapter_and_the_endpoints_name_its_model(adapted: Adapted) -> None:
    names = ["llava", *(f"llava/{name}" for name in NAMES), *NAMES]
    with ThreadPoolExecutor(len(names)) as threads:
        answers = list(threads.map(adapted.complete, names))
    assert answers == [adapted.expected[name.removeprefix("llava").removeprefix("/")] for name in names]
    assert adapted.complete(f"llava/{NAMES[1]}", "/v1") == adapted.expected[NAMES[1]]


def test_torchmoor_ask_opens_a_session_for_an_adapter(adapted: Adapted) -> None:
    def ask(*options: str) -> subprocess.CompletedProcess[str]:
        command = [str(TORCHMOOR), "ask", QUESTION, "--url", adapted.fleet.runtime, "--max-new-tokens", str(NUM_TOKENS)]
        return subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, check=False)

    assert ask("--adapter", NAMES[0]).stdout.strip() == adapted.expected[NAMES[0]].strip()
    assert ask().stdout.strip() == adapted.expected[""].strip()
    unknown = ask("--adapter", "nope")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "nope" in unknown.stderr
    refused = ask("--adapter", NAMES[0], "--session", "ts-seq-any")
    assert (refused.returncode, "--adapter is for a new session" in refused.stderr) == (2, True)


def test_the_responses_api_takes_adapters_as_models_and_may_change_them(adapted: Adapted) -> None:
    with adapted.openai() as client:

        def respond(model: str, **options: Any) -> Any:
            return client.responses.create(model=model, input=QUESTION, max_output_tokens=16, temperature=0, **options)

        first = respond(f"llava/{NAMES[0]}")
        assert first.output_text.startswith(adapted.expected[NAMES[0]])
        base = respond("llava", previous_response_id=first.id)
        assert base.output_text == respond("llava", previous_response_id=first.id).output_text
        assert base.output_text != respond(f"llava/{NAMES[0]}", previous_response_id=first.id).output_text


def test_targetmodel_selects_the_adapter_and_the_answer_says_where_it_was(adapted: Adapted) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": NUM_TOKENS, "temperature": 0}
    for name in NAMES:
        answer, headers = adapted.invoke(body, TargetModel=name)
        assert answer["choices"][0]["message"]["content"] == adapted.expected[name]
        assert headers["x-torchmoor-model-cache"] in ("cold", "disk", "hit")
    answer, headers = adapted.invoke(body)
    assert answer["choices"][0]["message"]["content"] == adapted.expected[""]
    assert "x-torchmoor-model-cache" not in headers


def test_requests_for_an_adapter_go_to_an_instance_that_has_it(adapted: Adapted) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 1}
    _, headers = adapted.invoke(body, TargetModel=NAMES[2])
    holders = {headers["x-torchmoor-instance"]}
    wait_until(lambda: holders <= adapted.tiers().get(NAMES[2], set()), "the instance reports the adapter")
    holders = adapted.tiers()[NAMES[2]]
    for _ in range(6):
        _, headers = adapted.invoke(body, TargetModel=NAMES[2])
        assert headers["x-torchmoor-instance"] in holders
        assert headers["x-torchmoor-model-cache"] == "hit"
        assert headers["x-amzn-sagemaker-invoked-routing-reason"] == "model-resident"


def test_an_unknown_adapter_is_refused_as_an_unknown_targetmodel(adapted: Adapted) -> None:
    with pytest.raises(ClientError) as refused:
        adapted.invoke({"inputs": "Hello"}, TargetModel="none")
    assert refused.value.response["Error"]["Code"] == "ValidationError"
    assert "none" in refused.value.response["Error"]["Message"]
    with pytest.raises(ClientError):
        adapted.open(TargetModel="none")
    with pytest.raises(openai.NotFoundError):
        adapted.complete("llava/none")
    with pytest.raises(openai.NotFoundError):
        adapted.complete("none/none", "/v1")


def test_models_are_listed_with_the_adapters_that_instances_have(adapted: Adapted) -> None:
    adapted.complete(f"llava/{NAMES[0]}")
    with adapted.openai() as client:
        wait_until(lambda: f"llava/{NAMES[0]}" in [each.id for each in client.models.list()], "it is listed")
        assert client.models.retrieve(f"llava/{NAMES[0]}").id == f"llava/{NAMES[0]}"


def test_operators_pin_and_unload_adapters(adapted: Adapted) -> None:
    def act(action: str) -> int:
        return requests.post(f"{adapted.fleet.admin}/models/{NAMES[1]}/{action}", timeout=60).status_code

    assert act("pin") == 200
    wait_until(lambda: NAMES[1] in adapted.tiers(), "it is loaded")
    assert act("unpin") == 200
    assert act("unload") == 200
    wait_until(lambda: NAMES[1] not in adapted.tiers(), "it is gone")


def test_workers_report_their_adapters_bytes(adapted: Adapted) -> None:
    adapted.complete(f"llava/{NAMES[0]}")

    def shown() -> bool:
        text = requests.get(f"{adapted.fleet.admin}/metrics", timeout=60).text
        lines = [line for line in text.splitlines() if line.startswith("torchmoor_model_bytes{") and "device" in line]
        return any(float(line.rsplit(" ", 1)[1]) > 0 for line in lines)

    wait_until(shown, "the metrics have the adapters' bytes")


def test_an_adapter_that_is_added_while_the_fleet_runs_is_found(adapted: Adapted) -> None:
    shutil.copytree(adapted.source / NAMES[0], adapted.source / ".new")
    (adapted.source / ".new").rename(adapted.source / "added")
    assert adapted.complete("llava/added") == adapted.expected[NAMES[0]]


@pytest.mark.ends_fleet
def test_a_session_on_an_adapter_survives_the_loss_of_its_worker(adapted: Adapted) -> None:
    session_id = adapted.open(TargetModel=NAMES[1])
    answer, home = adapted.ask(session_id)
    assert answer == adapted.expected[NAMES[1]]
    for pid in worker_pids(adapted.run_dir, home):
        os.kill(pid, signal.SIGKILL)
    second, where = adapted.ask(session_id)
    assert where != home
    repeated = adapted.open(TargetModel=NAMES[1])
    assert adapted.ask(repeated)[0] == answer
    assert adapted.ask(repeated)[0] == second
