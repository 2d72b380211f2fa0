"""Many models behind one endpoint, end to end: boto3, the proxy, two TorchServe instances, real checkpoints."""

import json
import re
from typing import Any

import pytest
import requests
from botocore.exceptions import ClientError
from playwright.sync_api import expect

from tests.browser import open_tab, run_chromium
from tests.torchserve.many.fleet import TARGET_MODEL, ManyFleet
from tests.torchserve.many.population import CLASSIFIERS, PLATFORM_NAME
from tests.waiting import wait_until

pytestmark = pytest.mark.torchserve

BODY = json.dumps({"inputs": "the cat sat on the mat"}).encode()


def ask(client: Any, model: str) -> tuple[Any, dict[str, str]]:
    """Return a whole answer and its header fields."""
    answer = client.invoke_endpoint(EndpointName="many", TargetModel=model, ContentType="application/json", Body=BODY)
    return json.loads(answer["Body"].read()), answer["ResponseMetadata"]["HTTPHeaders"]


def refusal(client: Any, model: str) -> tuple[str, str]:
    """Return an error's code and message."""
    with pytest.raises(ClientError) as caught:
        ask(client, model)
    error = caught.value.response["Error"]
    return error["Code"], error["Message"]


def test_start_does_not_offer_the_chat_page(many: ManyFleet) -> None:
    """The page does not support endpoints with many models, and lists none of them."""
    log = (many.fleet.run_dir.parent / "up.log").read_text()

    assert f"runtime API: {many.fleet.runtime} with many" in log
    assert "in a browser" not in log


def test_each_model_answers_and_stays_where_it_was_loaded(many: ManyFleet) -> None:
    """TargetModel of boto3 selects the model; each model is loaded once."""
    client = many.fleet.client()
    first = {name: ask(client, name) for name in CLASSIFIERS}
    again = {name: ask(client, name) for name in CLASSIFIERS}

    assert len({json.dumps(answer) for answer, _ in first.values()}) == len(CLASSIFIERS)
    for name in CLASSIFIERS:
        assert again[name][0] == first[name][0]
        assert again[name][1]["x-torchmoor-instance"] == first[name][1]["x-torchmoor-instance"]
        assert again[name][1]["x-amzn-sagemaker-invoked-routing-reason"] == "model-resident"
        assert again[name][1]["x-torchmoor-model-cache"] == "hit"


def test_model_that_generates_streams_to_its_target(many: ManyFleet) -> None:
    """The stream operation accepts the header and streams the model's tokens."""
    client = many.fleet.client()
    client.meta.events.register(
        "before-call.sagemaker-runtime.InvokeEndpointWithResponseStream",
        lambda params, **_: params["headers"].update({TARGET_MODEL: "writes.tar.gz"}),
    )
    body = json.dumps({"inputs": "the cat", "parameters": {"max_new_tokens": 8}, "stream": True}).encode()

    answer = client.invoke_endpoint_with_response_stream(EndpointName="many", ContentType="application/json", Body=body)
    text = b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"]).decode()

    events = [json.loads(line.removeprefix("data:")) for line in text.splitlines() if line.startswith("data:")]
    assert events[-1]["generated_text"] is not None


def test_missing_and_broken_models_fail_alone(many: ManyFleet) -> None:
    """Missing and broken models return their own errors, while the others answer."""
    client = many.fleet.client()

    assert refusal(client, "nothing.tar.gz")[0] == "ValidationError"
    code, message = refusal(client, "text.tar.gz")
    assert code == "ModelError"
    assert "(424)" in message
    assert ask(client, CLASSIFIERS[0])[1]["content-type"] == "application/json"


def test_platform_loads_invokes_and_unloads_by_its_own_names(many: ManyFleet) -> None:
    """The container's operations load models from a folder that TargetModel cannot name."""
    name, url = PLATFORM_NAME, str(many.population.platform_model)
    load = {"model_name": name, "url": url}

    assert requests.post(f"{many.fleet.runtime}/models", json=load, timeout=60).status_code == 200
    assert requests.post(f"{many.fleet.runtime}/models", json=load, timeout=60).status_code == 409
    assert requests.get(f"{many.fleet.runtime}/models/{name}", timeout=60).json() == {
        "modelName": name,
        "modelUrl": url,
    }
    headers = {"Content-Type": "application/json", TARGET_MODEL: "customers/7.tar.gz"}
    invoked = requests.post(f"{many.fleet.runtime}/models/{name}/invoke", data=BODY, headers=headers, timeout=60)
    assert invoked.json() == ask(many.fleet.client(), CLASSIFIERS[0])[0]
    assert requests.delete(f"{many.fleet.runtime}/models/{name}", timeout=60).status_code == 200
    assert requests.get(f"{many.fleet.runtime}/models/{name}", timeout=60).status_code == 404
    held = {row["name"] for row in requests.get(f"{many.fleet.admin}/models", timeout=60).json()["models"]}
    assert name not in held


def test_operator_sees_pins_and_unloads(many: ManyFleet) -> None:
    """The admin plane reports the models as the instances do."""
    instance = ask(many.fleet.client(), CLASSIFIERS[1])[1]["x-torchmoor-instance"]

    assert requests.post(f"{many.fleet.admin}/models/{CLASSIFIERS[1]}/pin", timeout=30).status_code == 200

    def rows() -> list[dict[str, Any]]:
        told = requests.get(f"{many.fleet.admin}/models", timeout=60).json()["models"]
        return [row for row in told if row["name"] == CLASSIFIERS[1] and row["instance"] == instance]

    wait_until(lambda: rows()[0]["pinned"], "the model is pinned")
    assert (rows()[0]["tier"], rows()[0]["bytes"] + rows()[0]["mapped_bytes"] > 0) == ("device", True)
    assert requests.post(f"{many.fleet.admin}/models/{CLASSIFIERS[1]}/unpin", timeout=30).status_code == 200
    assert (
        requests.post(f"{many.fleet.admin}/models/{CLASSIFIERS[1]}/unload?instance={instance}", timeout=30).status_code
        == 200
    )
    assert [row for row in rows() if row["tier"] != "disk"] == []


@pytest.mark.browser
def test_dashboard_shows_where_a_model_is_and_unloads_it(many: ManyFleet) -> None:
    instance = ask(many.fleet.client(), CLASSIFIERS[2])[1]["x-torchmoor-instance"]
    with run_chromium() as browser, open_tab(browser, many.fleet.admin) as tab:
        page = tab.page
        page.get_by_label("Name contains").fill(CLASSIFIERS[2])
        unload = page.get_by_role("button", name=f"Unload {CLASSIFIERS[2]} at {instance}")
        row = page.locator("#models tr", has=unload)
        expect(row).to_contain_text("device")
        expect(row).to_contain_text(re.compile(r"\d [KM]?i?B"))
        card = page.locator(".card", has=page.get_by_role("heading", name=instance, exact=True))
        expect(card).to_contain_text("Models (disk)")

        unload.click()
        page.get_by_role("dialog").get_by_role("button", name="Unload", exact=True).click()

        expect(page.locator("#done")).to_have_text(f"{CLASSIFIERS[2]} is unloaded.")
        expect(unload).to_have_count(0)
    held = requests.get(f"{many.fleet.admin}/models", timeout=60).json()["models"]
    assert [row for row in held if row["name"] == CLASSIFIERS[2] and row["tier"] in ("device", "host")] == []


def test_metrics_count_models_and_hits(many: ManyFleet) -> None:
    """LoadedModelCount uses the instances' reports, ModelCacheHit their receipts."""
    client = many.fleet.client()
    for name in CLASSIFIERS[:2] * 2:
        ask(client, name)

    def value(start: str) -> float:
        lines = requests.get(f"{many.fleet.admin}/metrics", timeout=60).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(start))

    assert value("ModelCacheHit_total") >= 2
    wait_until(lambda: value("LoadedModelCount") >= 2, "the instances have reported their models")
