"""Many models behind one endpoint, end to end: boto3, the proxy, two TorchServe instances, real checkpoints."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from botocore.exceptions import ClientError
from playwright.sync_api import expect

from tests.browser import open_tab, run_chromium
from tests.torchserve.conftest import Fleet, run_fleet
from tests.unit.handlers.many.tiny import save_checkpoint
from tests.waiting import wait_until

pytestmark = pytest.mark.torchserve

NAMES = [f"classifier-{number}.tar.gz" for number in range(4)]
BODY = json.dumps({"inputs": "the cat sat on the mat"}).encode()


def pack(folder: Path, archive: Path) -> None:
    """A model.tar.gz as users have them: the checkpoint's files at its top."""
    with tarfile.open(archive, "w:gz") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Classifiers that differ, one that generates text, and what is none."""
    folder = tmp_path_factory.mktemp("models")
    made = tmp_path_factory.mktemp("made")
    for number, name in enumerate(NAMES):
        pack(save_checkpoint(made / name, "BertForSequenceClassification", seed=number), folder / name)
    pack(save_checkpoint(made / "writer", "LlamaForCausalLM"), folder / "writer.tar.gz")
    (folder / "broken.tar.gz").write_bytes(b"this is no archive")
    shutil.copytree(made / NAMES[0], folder / "platform" / "8d2f0a1c" / "model")
    return folder


@pytest.fixture(scope="module")
def many(archives: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two instances that serve those models, as the front of a container too."""
    folder = tmp_path_factory.mktemp("many")
    environment = {
        "SAGEMAKER_MULTI_MODEL": "true",
        "TORCHMOOR_HANDLER_MANY_URL_ROOTS": str(models / "platform"),
        "TORCHMOOR_HANDLER_MANY_CACHE_DIR": str(folder / "cache"),
    }
    arguments = ("--endpoint", "many", "--models", str(models), "--instances", "2")
    with run_fleet(*arguments, run_dir=folder / "run", log=folder / "up.log", environment=environment) as running:
        yield running


def ask(client: Any, model: str) -> tuple[Any, dict[str, str]]:
    """One whole answer, and its header fields."""
    answer = client.invoke_endpoint(EndpointName="many", TargetModel=model, ContentType="application/json", Body=BODY)
    return json.loads(answer["Body"].read()), answer["ResponseMetadata"]["HTTPHeaders"]


def refusal(client: Any, model: str) -> tuple[str, str]:
    """The kind of error, and its message."""
    with pytest.raises(ClientError) as caught:
        ask(client, model)
    error = caught.value.response["Error"]
    return error["Code"], error["Message"]


def test_each_model_answers_and_stays_where_it_was_loaded(many: Fleet) -> None:
    """TargetModel through boto3: different models, different answers, one load each."""
    client = many.client()
    first = {name: ask(client, name) for name in NAMES}
    again = {name: ask(client, name) for name in NAMES}

    assert len({json.dumps(answer) for answer, _ in first.values()}) == len(NAMES)
    for name in NAMES:
        assert again[name][0] == first[name][0]
        assert again[name][1]["x-torchmoor-instance"] == first[name][1]["x-torchmoor-instance"]
        assert again[name][1]["x-amzn-sagemaker-invoked-routing-reason"] == "model-resident"
        assert again[name][1]["x-torchmoor-model-cache"] == "hit"


def test_model_that_generates_streams_to_its_target(many: Fleet) -> None:
    """The stream operation with the header; its pieces are the model's tokens."""
    client = many.client()
    client.meta.events.register(
        "before-call.sagemaker-runtime.InvokeEndpointWithResponseStream",
        lambda params, **_: params["headers"].update({"X-Amzn-SageMaker-Target-Model": "writer.tar.gz"}),
    )
    body = json.dumps({"inputs": "the cat", "parameters": {"max_new_tokens": 8}, "stream": True}).encode()

    answer = client.invoke_endpoint_with_response_stream(EndpointName="many", ContentType="application/json", Body=body)
    text = b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"]).decode()

    events = [json.loads(line.removeprefix("data:")) for line in text.splitlines() if line.startswith("data:")]
    assert events[-1]["generated_text"] is not None


def test_missing_and_broken_models_fail_alone(many: Fleet) -> None:
    """Each with its own error; the others go on answering."""
    client = many.client()

    assert refusal(client, "nothing.tar.gz")[0] == "ValidationError"
    code, message = refusal(client, "broken.tar.gz")
    assert code == "ModelError"
    assert "(424)" in message
    assert ask(client, NAMES[0])[1]["content-type"] == "application/json"


def test_platform_loads_invokes_and_unloads_by_its_own_names(many: Fleet, models: Path) -> None:
    """The container's operations, from a folder that no TargetModel names."""
    name, url = "8d2f0a1c", str(models / "platform" / "8d2f0a1c" / "model")
    load = {"model_name": name, "url": url}

    assert requests.post(f"{many.runtime}/models", json=load, timeout=60).status_code == 200
    assert requests.post(f"{many.runtime}/models", json=load, timeout=60).status_code == 409
    assert requests.get(f"{many.runtime}/models/{name}", timeout=10).json() == {"modelName": name, "modelUrl": url}
    headers = {"Content-Type": "application/json", "X-Amzn-SageMaker-Target-Model": "customers/7.tar.gz"}
    invoked = requests.post(f"{many.runtime}/models/{name}/invoke", data=BODY, headers=headers, timeout=60)
    assert invoked.json() == ask(many.client(), NAMES[0])[0]
    assert requests.delete(f"{many.runtime}/models/{name}", timeout=60).status_code == 200
    assert requests.get(f"{many.runtime}/models/{name}", timeout=10).status_code == 404
    held = {row["name"] for row in requests.get(f"{many.admin}/models", timeout=10).json()["models"]}
    assert name not in held


def test_operator_sees_pins_and_unloads(many: Fleet) -> None:
    """On the admin plane, by the instances' own word."""
    instance = ask(many.client(), NAMES[1])[1]["x-torchmoor-instance"]

    assert requests.post(f"{many.admin}/models/{NAMES[1]}/pin", timeout=30).status_code == 200

    def rows() -> list[dict[str, Any]]:
        told = requests.get(f"{many.admin}/models", timeout=10).json()["models"]
        return [row for row in told if row["name"] == NAMES[1] and row["instance"] == instance]

    wait_until(lambda: rows()[0]["pinned"], "it is pinned")
    assert (rows()[0]["tier"], rows()[0]["bytes"] + rows()[0]["mapped_bytes"] > 0) == ("device", True)
    assert requests.post(f"{many.admin}/models/{NAMES[1]}/unpin", timeout=30).status_code == 200
    assert requests.post(f"{many.admin}/models/{NAMES[1]}/unload?instance={instance}", timeout=30).status_code == 200
    assert [row for row in rows() if row["tier"] != "disk"] == []


@pytest.mark.browser
def test_dashboard_shows_where_a_model_is_and_unloads_it(many: Fleet) -> None:
    """What a real instance says of its models, and what it does when a button is pressed."""
    instance = ask(many.client(), NAMES[2])[1]["x-torchmoor-instance"]
    with run_chromium() as browser, open_tab(browser, many.admin) as tab:
        page = tab.page
        page.get_by_label("Name contains").fill(NAMES[2])
        unload = page.get_by_role("button", name=f"Unload {NAMES[2]} at {instance}")
        row = page.locator("#models tr", has=unload)
        expect(row).to_contain_text("device")
        expect(row).to_contain_text(re.compile(r"\d [KM]?i?B"))
        card = page.locator(".card", has=page.get_by_role("heading", name=instance, exact=True))
        expect(card).to_contain_text("Models (disk)")

        unload.click()
        page.get_by_role("dialog").get_by_role("button", name="Unload", exact=True).click()

        expect(page.locator("#done")).to_have_text(f"{NAMES[2]} is unloaded.")
        expect(unload).to_have_count(0)
    held = requests.get(f"{many.admin}/models", timeout=10).json()["models"]
    assert [row for row in held if row["name"] == NAMES[2] and row["tier"] in ("device", "host")] == []


def test_metrics_count_models_and_hits(many: Fleet) -> None:
    """LoadedModelCount by the instances' reports, ModelCacheHit by their receipts."""
    client = many.client()
    for name in NAMES[:2] * 2:
        ask(client, name)

    def value(start: str) -> float:
        lines = requests.get(f"{many.admin}/metrics", timeout=10).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(start))

    assert value("ModelCacheHit_total") >= 2
    wait_until(lambda: value("LoadedModelCount") >= 2, "the instances have reported their models")
