"""Embeddings, rerank and chat of many models on real TorchServe, by OpenAI's client."""

import openai
import pytest
import requests

from tests.torchserve.many.fleet import TARGET_MODEL, ManyFleet
from tests.torchserve.many.population import CLASSIFIERS

pytestmark = pytest.mark.torchserve
TEXTS = ["the cat sat on the mat", "a cat is on a mat", "stock prices fell sharply"]


def test_openai_client_embeds_and_asks_models(many: ManyFleet) -> None:
    """The vectors equal the task's own; the client decodes base64 by default; errors are OpenAI's."""
    [variant, *_] = many.population.variants
    own = many.invoke(variant.name, {"inputs": TEXTS}).json()["embeddings"]
    with openai.OpenAI(base_url=f"{many.fleet.runtime}/v1", api_key="any", timeout=120, max_retries=0) as client:
        for encoding in ({}, {"encoding_format": "float"}):
            found = client.embeddings.create(model=variant.name, input=TEXTS, **encoding)
            assert [each.index for each in found.data] == [0, 1, 2]
            for each, vector in zip(found.data, own, strict=True):
                assert each.embedding == pytest.approx(vector, abs=1e-5)
            assert found.model == variant.name
            assert found.usage.total_tokens > len(TEXTS)
        short = client.embeddings.create(model=variant.name, input=TEXTS[0], dimensions=8)
        assert sum(number**2 for number in short.data[0].embedding) == pytest.approx(1.0, abs=1e-4)
        assert len(client.embeddings.create(model=variant.name, input=["a cat"] * 1000).data) == 1000
        said = client.chat.completions.create(
            model="writes.tar.gz", messages=[{"role": "user", "content": "the cat"}], max_tokens=4
        )
        assert said.choices
        with pytest.raises(openai.BadRequestError, match="text-classification"):
            client.embeddings.create(model=CLASSIFIERS[0], input="a")
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="absent.tar.gz", input="a")


def test_openai_client_continues_what_a_model_has_stored(many: ManyFleet) -> None:
    """The body names the model of a response; its id suffices later. A conversation is created with the header."""
    header, model = {TARGET_MODEL: "writes.tar.gz"}, "writes.tar.gz"
    with openai.OpenAI(base_url=f"{many.fleet.runtime}/v1", api_key="any", timeout=120, max_retries=0) as client:
        first = client.responses.create(model=model, input="the cat", max_output_tokens=16)
        second = client.responses.create(
            model=model, input="and", max_output_tokens=16, previous_response_id=first.id, stream=True
        )
        *_, end = second
        assert end.type in ("response.completed", "response.incomplete")
        assert end.response.previous_response_id == first.id
        assert client.responses.retrieve(first.id).output == first.output
        assert client.responses.input_tokens.count(model=model, input="the cat").input_tokens > 0
        client.responses.delete(end.response.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(end.response.id)
        with pytest.raises(openai.BadRequestError, match="extra_headers"):
            client.conversations.create()
        talk = client.conversations.create(extra_headers=header)
        client.responses.create(model=model, input="the cat", max_output_tokens=16, conversation=talk.id)
        assert len(client.conversations.items.list(talk.id).data) == 2


def test_documents_are_ranked(many: ManyFleet) -> None:
    """MiniLM puts the paraphrase before the other subject; a classifier of several classes cannot rank."""
    [variant, *_] = many.population.variants
    url = f"{many.fleet.runtime}/v1/rerank"
    body = {"model": variant.name, "query": TEXTS[0], "documents": TEXTS[:0:-1], "return_documents": True}

    answer = requests.post(url, json=body, timeout=120)
    refused = requests.post(url, json={**body, "model": CLASSIFIERS[0]}, timeout=120)

    assert [each["document"]["text"] for each in answer.json()["results"]] == [TEXTS[1], TEXTS[2]]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
