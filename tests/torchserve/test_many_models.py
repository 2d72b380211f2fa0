"""Thirty models on one real TorchServe worker, in memory for eight; asked as curl would, past the proxy."""

import base64
import io
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from PIL import Image

from tests.torchserve.many_models import TEXTS, ManyModels, error_of, run_many
from tests.waiting import wait_until

pytestmark = pytest.mark.torchserve

NUM_VARIANTS = 22
MINILM_BYTES = 91_000_000


@pytest.fixture(scope="module")
def many(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManyModels]:
    folder = tmp_path_factory.mktemp("many")
    settings = {"device_bytes": str(8 * MINILM_BYTES), "allow_torchscript": "true"}
    with run_many(folder, NUM_VARIANTS, **settings) as running:
        yield running


def test_every_model_answers_for_itself(many: ManyModels) -> None:
    """However often models leave memory and come back, no answer is another model's, and the budget is kept."""
    wanted = random.Random(1)
    visits = [*many.variants, *wanted.choices(many.variants, [1 / (i + 1) for i in range(NUM_VARIANTS)], k=60)]

    def visit(number: int) -> tuple[str, int, requests.Response]:
        text = number % len(TEXTS)
        return visits[number], text, many.ask(visits[number], {"inputs": TEXTS[text]})

    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(visit, range(len(visits))))

    assert [(name, answer.text[:300]) for name, _, answer in answers if answer.status_code != 200] == []
    assert [name for name, text, answer in answers if not many.is_right(name, text, answer)] == []
    assert {"hit"} < {answer.headers["X-Torchmoor-Model-Cache"] for _, _, answer in answers}
    status = many.status()
    assert status["counters"]["evictions"] >= NUM_VARIANTS - 8
    assert 0 < status["budgets"]["device"]["used"] <= status["budgets"]["device"]["max"]
    assert status["requests"]["failed"] == 0


def test_each_task_is_served_from_archives(many: ManyModels) -> None:
    """As SageMaker's users have packed them."""
    picture = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(picture, "PNG")
    encoded = base64.b64encode(picture.getvalue()).decode()
    tensor = {"name": "INPUT__0", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3.5]}

    classified = many.ask("classify.tar.gz", {"inputs": ["the cat", "a dog"], "parameters": {"top_k": 2}}).json()
    assert [len(labels) for labels in classified] == [2, 2]
    assert isinstance(many.ask("entities.tar.gz", {"inputs": "anna works at acme"}).json(), list)
    assert len(many.ask("gaps.tar.gz", {"inputs": "the [MASK] sat"}).json()) == 5
    asked = {"question": "who sat", "context": "the cat sat on the mat"}
    assert many.ask("answers.tar.gz", {"inputs": asked}).json()["answer"] in asked["context"]
    assert many.ask("pictures.tar.gz", {"inputs": encoded}).json()[0].keys() == {"label", "score"}
    headers = {"X-Amzn-SageMaker-Target-Model": "pictures.tar.gz", "Content-Type": "image/png"}
    as_body = requests.post(many.address, data=picture.getvalue(), headers=headers, timeout=60)
    assert as_body.json() == many.ask("pictures.tar.gz", {"inputs": encoded}).json()
    assert many.ask("triton.tar.gz", {"inputs": [tensor]}).json()["outputs"][0]["data"] == [2, 4, 7]


def test_text_is_streamed_as_it_is_generated(many: ManyModels) -> None:
    """The chat engine's streams, with the model's receipts in their head."""
    body = {"inputs": "the cat", "parameters": {"max_new_tokens": 5}, "stream": True}

    with many.ask("writes.tar.gz", body, stream=True) as answer:
        lines = [line for line in answer.iter_lines() if line]

    assert answer.headers["X-Torchmoor-Model-Cache"]
    assert all(line.startswith(b"data:") for line in lines)
    assert b"generated_text" in lines[-1]
    wait_until(
        lambda: all(model.get("leases", 0) == 0 for model in many.status()["models"]), "the stream's lease has ended"
    )


@pytest.mark.parametrize(
    ("model", "status", "reason"),
    [
        ("nobody.tar.gz", 404, "no model"),
        ("../models/classify.tar.gz", 404, ""),
        ("corrupt.tar.gz", 424, "damaged"),
        ("pickled.tar.gz", 424, "handler.many.allow_pickle"),
        (None, 400, "X-Amzn-SageMaker-Target-Model"),
    ],
)
def test_what_is_wrong_with_a_model_is_its_own_affair(
    model: str | None, status: int, reason: str, many: ManyModels
) -> None:
    """Its requests are told; others are answered as before."""
    answer = many.ask(model, {"inputs": "a"})

    assert answer.status_code == status
    assert reason in error_of(answer)
    assert many.is_right("minilm-003", 0, many.ask("minilm-003", {"inputs": TEXTS[0]}))


def test_operators_load_pin_and_unload(many: ManyModels) -> None:
    """The models operation, as the proxy and the container's API use it."""
    name = "minilm-005"
    assert many.operate("models", {"action": "pin", "model": name}).json()["model"] == name
    wait_until(lambda: tier_of(many, name) == "device", "the pinned model is loaded")
    assert many.operate("models", {"action": "load", "model": name}).status_code == 409
    for other in many.variants[6:18]:
        assert many.ask(other, {"inputs": TEXTS[1]}).status_code == 200
    assert tier_of(many, name) == "device"
    assert many.operate("models", {"action": "unpin", "model": name}).status_code == 200

    assert many.operate("models", {"action": "unload", "model": name}).json() == {"model": name, "tier": "source"}

    assert tier_of(many, name) is None
    assert many.operate("models", {"action": "unload", "model": name}).status_code == 404
    assert many.operate("models", {"action": "load", "model": name}).json() == {"model": name, "tier": "device"}
    assert many.operate("models", {"action": "juggle", "model": name}).status_code == 400


def tier_of(many: ManyModels, name: str) -> str | None:
    return next((model["tier"] for model in many.status()["models"] if model["name"] == name), None)


def test_a_model_that_is_replaced_answers_anew(many: ManyModels) -> None:
    """A new file in the source counts from then on; nobody restarts anything."""
    source = many.source / "minilm-004"
    assert many.is_right("minilm-004", 2, many.ask("minilm-004", {"inputs": TEXTS[2]}))
    other = many.source / "minilm-021"
    own = "model-00002-of-00002.safetensors"
    (source / "new").write_bytes((other / own).read_bytes())

    (source / "new").rename(source / own)

    wait_until(
        lambda: many.is_right("minilm-021", 2, many.ask("minilm-004", {"inputs": TEXTS[2]})),
        "the new version answers",
        interval_s=0.5,
    )


def test_the_metrics_tell_what_models_do(many: ManyModels) -> None:
    """On TorchServe's own metrics port."""
    (instance,) = many.fleet.instances()
    many.ask("minilm-000", {"inputs": TEXTS[0]})
    many.ask("minilm-000", {"inputs": TEXTS[0]})

    def page() -> str:
        return requests.get(f"http://127.0.0.1:{instance['metrics_port']}/metrics", timeout=10).text

    for part in (
        'torchmoor_model_events_total{ModelName="many",Event="hits"',
        'torchmoor_models{ModelName="many",Tier="device"',
        "torchmoor_model_wait_seconds",
        'torchmoor_model_requests_total{ModelName="many",Outcome="answered"',
    ):
        wait_until(lambda part=part: part in page(), f"the metrics have {part}", interval_s=0.5)
