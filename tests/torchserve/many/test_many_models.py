"""One worker serves models of every kind; requests go to it directly, as with curl."""

import base64

import pytest
import requests
from PIL import Image

from tests.torchserve.drawings import encoded
from tests.torchserve.many.fleet import TARGET_MODEL, ManyFleet, error_of
from tests.torchserve.many.reference import TEXTS
from tests.waiting import wait_until

pytestmark = [pytest.mark.torchserve, pytest.mark.slow]


def test_each_task_is_served_from_archives(many: ManyFleet) -> None:
    """Every task is served from archives in the form that SageMaker's users create."""
    data = encoded(Image.new("RGB", (40, 30), "red"))
    picture = base64.b64encode(data).decode()
    tensor = {"name": "INPUT__0", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3.5]}

    classified = many.ask("classifier-0.tar.gz", {"inputs": ["the cat", "a dog"], "parameters": {"top_k": 2}}).json()
    assert [len(labels) for labels in classified] == [2, 2]
    assert isinstance(many.ask("entities.tar.gz", {"inputs": "anna works at acme"}).json(), list)
    assert len(many.ask("gaps.tar.gz", {"inputs": "the [MASK] sat"}).json()) == 5
    asked = {"question": "who sat", "context": "the cat sat on the mat"}
    assert many.ask("answers.tar.gz", {"inputs": asked}).json()["answer"] in asked["context"]
    assert many.ask("pictures.tar.gz", {"inputs": picture}).json()[0].keys() == {"label", "score"}
    headers = {TARGET_MODEL: "pictures.tar.gz", "Content-Type": "image/png"}
    as_body = requests.post(many.address(), data=data, headers=headers, timeout=60)
    assert as_body.json() == many.ask("pictures.tar.gz", {"inputs": picture}).json()
    assert many.ask("triton.tar.gz", {"inputs": [tensor]}).json()["outputs"][0]["data"] == [2, 4, 7]


def test_text_is_streamed_as_it_is_generated(many: ManyFleet) -> None:
    """The chat engine streams text, with the model's receipts in the head."""
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
        ("../models/classifier-0.tar.gz", 404, ""),
        ("corrupt.tar.gz", 424, "damaged"),
        ("pickled.tar.gz", 424, "handler.many.allow_pickle"),
        (None, 400, TARGET_MODEL),
    ],
)
def test_what_is_wrong_with_a_model_is_its_own_affair(
    model: str | None, status: int, reason: str, many: ManyFleet
) -> None:
    """A broken model's requests fail with the reason, and other models answer as before."""
    answer = many.ask(model, {"inputs": "a"})

    assert answer.status_code == status
    assert reason in error_of(answer)
    assert many.is_right(many.variant("minilm-003"), 0, many.ask("minilm-003", {"inputs": TEXTS[0]}))


def test_operators_load_pin_and_unload(many: ManyFleet) -> None:
    """The models operation, which the proxy and the container's API use, loads, pins and unloads models."""
    name = "minilm-005"
    assert many.operate("models", {"action": "pin", "model": name}).json()["model"] == name
    wait_until(lambda: many.tier_of(name) == "device", "the pinned model is loaded")
    assert many.operate("models", {"action": "load", "model": name}).status_code == 409
    for number in range(6, 30):
        assert many.ask(f"minilm-{number:03}", {"inputs": TEXTS[1]}).status_code == 200
    assert many.tier_of(name) == "device"
    assert many.operate("models", {"action": "unpin", "model": name}).status_code == 200

    assert many.operate("models", {"action": "unload", "model": name}).json() == {"model": name, "tier": "source"}

    assert many.tier_of(name) is None
    assert many.operate("models", {"action": "unload", "model": name}).status_code == 404
    assert many.operate("models", {"action": "load", "model": name}).json() == {"model": name, "tier": "device"}
    assert many.operate("models", {"action": "juggle", "model": name}).status_code == 400


def test_the_metrics_tell_what_models_do(many: ManyFleet) -> None:
    """The metrics are on TorchServe's own metrics port."""
    port = many.instance()["metrics_port"]
    many.ask("minilm-000", {"inputs": TEXTS[0]})
    many.ask("minilm-000", {"inputs": TEXTS[0]})

    def page() -> str:
        return requests.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text

    for part in (
        'torchmoor_model_events_total{ModelName="many",Event="hits"',
        'torchmoor_models{ModelName="many",Tier="device"',
        "torchmoor_model_wait_seconds",
        'torchmoor_model_requests_total{ModelName="many",Outcome="answered"',
    ):
        wait_until(lambda part=part: part in page(), f"the metrics have {part}", interval_s=0.5)
