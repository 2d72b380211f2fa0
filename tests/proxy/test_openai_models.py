"""OpenAI's paths on endpoints with many models: the body's `model` is the target."""

from typing import Any

import openai
import pytest

from tests.proxy.conftest import MakeStage, Stage
from tests.proxy.fake_many import FakeFleet
from tests.proxy.test_openai import call, client
from tests.waiting import wait_until
from torchmoor.config.routing import MultiModelSettings

TASKS = ("embeddings", "rerank", "chat/completions")


@pytest.fixture
def many(make_stage: MakeStage) -> Stage:
    """Return a proxy in front of two instances with two models."""
    return make_stage(multi_model=MultiModelSettings(), prepare=FakeFleet(("m1.tar.gz", "m2.tar.gz")))


@pytest.mark.parametrize("base", ["/v1", "/endpoints/llava/openai/v1"])
@pytest.mark.parametrize("task", TASKS)
def test_the_bodys_model_is_the_target(many: Stage, base: str, task: str) -> None:
    """The request goes to an instance with the model; a header with another name takes precedence."""
    body = b'{"input": "a", "model": "m1.tar.gz"}'
    header = {"X-Amzn-SageMaker-Target-Model": "m2.tar.gz"}

    status, _, answer = call(many, f"{base}/{task}", body)
    again = call(many, f"{base}/{task}", body)
    named = call(many, f"{base}/{task}", body, **header)

    assert (status, answer["model"]) == (200, "m1.tar.gz")
    assert again[2] == answer
    assert again[1]["x-amzn-sagemaker-invoked-routing-reason"] == "model-resident"
    assert named[2]["model"] == "m2.tar.gz"
    received = [*many.a.received, *many.b.received]
    assert all(each.body == body for each in received)


@pytest.mark.parametrize("operation", ["responses", "responses/input_tokens", "responses/compact"])
def test_the_model_of_a_response_is_the_target(many: Stage, operation: str) -> None:
    """A header takes precedence over the model; without both, the error says what is missing."""
    header = {"X-Amzn-SageMaker-Target-Model": "m2.tar.gz"}

    status, _, answer = call(many, f"/v1/{operation}", b'{"input": "a", "model": "m1.tar.gz"}')
    named = call(many, f"/v1/{operation}", b'{"input": "a", "model": "m1.tar.gz"}', **header)
    lacking, _, error = call(many, f"/v1/{operation}", b'{"input": "a"}')

    assert (status, answer["model"], named[2]["model"]) == (200, "m1.tar.gz", "m2.tar.gz")
    assert (lacking, error["error"]["param"]) == (400, "model")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b'{"input": "a"}', 400, "model"),
        (b'{"input": "a", "model": 7}', 400, "model"),
        (b'{"input": "a", "model": "m1\\r\\nX-Evil: 1"}', 400, None),
        (b'{"input": "a", "model": "\\u00fc"}', 400, None),
        (b'{"input": "a", "model": "\\ud800"}', 400, None),
        (b'{"input": "a", "model": "absent.tar.gz"}', 404, None),
    ],
)
def test_a_wrong_model_is_refused(many: Stage, body: bytes, status: int, param: str | None) -> None:
    """A name that is not printable is refused and never reaches an instance."""
    given, _, answer = call(many, "/v1/embeddings", body)

    assert (given, answer["error"]["param"]) == (status, param)
    assert not any("x-evil" in each.headers for each in (*many.a.received, *many.b.received))


def test_an_endpoint_with_one_model_has_no_embeddings(stage: Stage) -> None:
    """The error for embeddings on an endpoint with one model says what is needed."""
    status, _, answer = call(stage, "/v1/embeddings", b'{"input": "a", "model": "llava"}')

    assert status == 404
    assert "many models" in answer["error"]["message"]
    assert call(stage, "/v1/embeddings", None)[0] == 404


def test_an_adapter_that_is_not_loaded_is_not_said_to_be_unknown(make_stage: MakeStage) -> None:
    """The error for an adapter that is not loaded does not call it unknown, since a request by its name loads it."""
    prepare = FakeFleet(("sql", "legal"))
    stage = make_stage(multi_model=MultiModelSettings(are_adapters=True), prepare=prepare)
    gpt = client(stage)
    gpt.chat.completions.create(model="llava/sql", messages=[{"role": "user", "content": "hi"}])
    wait_until(lambda: "llava/sql" in [each.id for each in gpt.models.list()], "it is listed")

    with pytest.raises(openai.NotFoundError) as unloaded:
        gpt.models.retrieve("llava/legal")
    with pytest.raises(openai.NotFoundError) as unknown:
        gpt.models.retrieve("sql")

    assert (unloaded.value.code, unknown.value.code) == ("model_not_found", "model_not_found")
    assert "No instance has loaded the adapter `legal`" in unloaded.value.message
    assert "There is: `llava`, `llava/sql`." in unknown.value.message


def test_models_have_capabilities(stage: Stage, many: Stage) -> None:
    def capabilities(of: Stage) -> Any:
        [model] = client(of).models.list()
        return (model.model_extra or {})["capabilities"]

    assert capabilities(stage) == ["chat.completions", "completions", "responses"]
    assert capabilities(many) == ["chat.completions", "completions", "embeddings", "rerank"]
    for name in ("a", "b"):
        stage.instance(name).takes_operations = False
    assert capabilities(stage) == []  # an operator's own handler, whose capabilities are unknown
