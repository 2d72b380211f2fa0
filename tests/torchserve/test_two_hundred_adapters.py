"""Two hundred adapters of SmolLM2 under Zipf traffic: each answer is that of the model with its adapter merged."""

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.make_adapters import CHECKPOINT, make_adapters
from tests.tools import missing
from tests.torchserve.conftest import Fleet, run_fleet
from tests.unit.handlers.merged import add_adapter
from tests.waiting import wait_until

pytestmark = [pytest.mark.torchserve, pytest.mark.slow]
NUM_ADAPTERS = 200
NUM_RESIDENT = 24
KIND: Any = {"rank": 2, "strength": 1.0, "projections": ("q_proj", "v_proj")}
NUM_REQUESTS = 300
NUM_CLIENTS = 12
NUM_TOKENS = 3
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    if not (CHECKPOINT / "config.json").is_file():
        missing(f"there is no {CHECKPOINT}: make archives downloads it")
    return make_adapters(CHECKPOINT, tmp_path_factory.mktemp("adapters"), NUM_ADAPTERS, **KIND)


@pytest.fixture(scope="module")
def fleet(adapters: Sequence[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run two instances, each with memory for some of the adapters."""
    folder = tmp_path_factory.mktemp("fleet")
    one = (adapters[0] / "adapter_model.safetensors").stat().st_size
    environment = {"TORCHMOOR_HANDLER_ADAPTERS_MAX_BYTES": str(NUM_RESIDENT * one)}
    arguments = (str(CHECKPOINT), "--name", "smol", "--instances", "2", "--adapters", str(adapters[0].parent))
    log = folder / "up.log"
    with run_fleet(*arguments, run_dir=folder / "run", log=log, environment=environment) as running:
        yield running


def test_each_adapter_answers_as_its_merged_model_under_zipf_traffic(fleet: Fleet, adapters: Sequence[Path]) -> None:
    names = [folder.name for folder in adapters]
    rng = random.Random(0)
    weights = [1 / (place + 1) for place in range(NUM_ADAPTERS)]
    asked = [*names, *rng.choices(names, weights, k=NUM_REQUESTS - NUM_ADAPTERS)]
    rng.shuffle(asked)
    client = fleet.client()
    body = {"inputs": PROMPT, "parameters": {"details": True, "max_new_tokens": NUM_TOKENS}}

    def ask(name: str) -> tuple[tuple[int, ...], str]:
        answer = client.invoke_endpoint(
            EndpointName="smol", TargetModel=name, Body=json.dumps(body), ContentType="application/json"
        )
        [content] = json.loads(answer["Body"].read())
        found = answer["ResponseMetadata"]["HTTPHeaders"]["x-torchmoor-model-cache"]
        return tuple(token["id"] for token in content["details"]["tokens"]), found

    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        answers = list(threads.map(ask, asked))
    said: dict[str, set[tuple[int, ...]]] = {name: set() for name in names}
    for name, (tokens, _) in zip(asked, answers, strict=True):
        said[name].add(tokens)
    assert find_wrong(adapters, said) == []
    assert len({tokens for each in said.values() for tokens in each}) > NUM_ADAPTERS // 2
    assert Counter(found for _, found in answers)["hit"] > NUM_REQUESTS // 10
    for instance in requests.get(f"{fleet.admin}/models", timeout=60).json()["instances"]:
        assert 0 < instance["budgets"]["device"]["used"] <= instance["budgets"]["device"]["max"]
    unload_all(fleet)


def find_wrong(adapters: Sequence[Path], said: Mapping[str, set[tuple[int, ...]]]) -> list[str]:
    """Return the adapters with a wrong answer: one with a token that transformers' merged model would not choose."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32, local_files_only=True).eval()
    prompt = AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)(PROMPT)["input_ids"]
    changed = [weight for name, weight in model.named_parameters() if any(part in name for part in KIND["projections"])]
    kept = [weight.clone() for weight in changed]
    wrong = []
    for folder in adapters:
        add_adapter(model, folder)
        for tokens in said[folder.name]:
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
            if tuple(logits.argmax(dim=-1).tolist()) != tokens:
                wrong.append(folder.name)
        for weight, before in zip(changed, kept, strict=True):
            weight.data.copy_(before)  # subtracting the adapter would leave its rounding
    return wrong


def unload_all(fleet: Fleet) -> None:
    """Unload the remaining adapters; check that none uses memory."""

    def rows() -> list[dict[str, Any]]:
        return requests.get(f"{fleet.admin}/models", timeout=60).json()["models"]

    for name in {row["name"] for row in rows() if row["tier"] == "device"}:
        requests.post(f"{fleet.admin}/models/{name}/unload", timeout=60)

    def is_empty() -> bool:
        instances = requests.get(f"{fleet.admin}/models", timeout=60).json()["instances"]
        return all(each["budgets"]["device"]["used"] == 0 for each in instances)

    wait_until(is_empty, "all memory is free")
