"""OpenAI's embeddings and rerank as bodies of tasks: their answers, and clear errors."""

import base64
import json
import struct
import tracemalloc
from typing import Any

import pytest

from handlers.errors import InvalidRequest
from handlers.many.openai_bodies import read_task_request
from handlers.many.request import TaskRequest
from handlers.requests.incoming import Incoming
from handlers.settings.tasks import TaskSettings

MAX_VALUES, MAX_INPUTS = TaskSettings().max_json_values, TaskSettings().max_inputs
EMBEDDINGS, CLASSIFICATION = "sentence-embeddings", "text-classification"
VECTORS = [[3.0, 4.0, 0.0], [0.0, 0.0, 2.0]]
RERANK = {"query": "a cat", "documents": ["dogs", {"text": "cats"}, "birds"]}


def read(body: Any, task: str = EMBEDDINGS) -> TaskRequest:
    headers = {"content-type": "application/json", "x-amzn-sagemaker-target-model": "mini"}
    return read_task_request(Incoming(headers, json.dumps(body).encode()), MAX_VALUES, task=task, max_inputs=MAX_INPUTS)


def answer(body: Any, result: Any, task: str = EMBEDDINGS) -> dict[str, Any]:
    form = read(body, task).form
    return form.answer(result, 7)


@pytest.mark.parametrize("texts", ["a cat", ["a cat", "a dog"]])
def test_embeddings_have_openais_form(texts: Any) -> None:
    """The answer names the model as the client did, or else the target model; the input is one text or several."""
    assert read({"input": texts, "model": "mine"}).inputs == (texts if isinstance(texts, list) else [texts])
    found = answer({"input": texts, "model": "mine", "user": "bob"}, {"embeddings": VECTORS})

    assert [(each["object"], each["index"], each["embedding"]) for each in found["data"]] == [
        ("embedding", 0, VECTORS[0]),
        ("embedding", 1, VECTORS[1]),
    ]
    assert (found["object"], found["model"]) == ("list", "mine")
    assert found["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert answer({"input": texts}, {"embeddings": VECTORS})["model"] == "mini"


def test_embeddings_can_be_shorter_and_in_base64() -> None:
    """The task shortens the vectors; base64 has 32-bit floats, little-endian."""
    body = {"input": ["a", "b"], "dimensions": 2, "encoding_format": "base64"}

    [data, _] = answer(body, {"embeddings": [[0.6, 0.8], [1.0, 0.0]]})["data"]

    assert read(body).parameters["dimensions"] == 2
    assert struct.unpack("<2f", base64.b64decode(data["embedding"])) == pytest.approx((0.6, 0.8))


@pytest.mark.parametrize("task", [EMBEDDINGS, CLASSIFICATION])
@pytest.mark.parametrize("body", [{"query": "q", "documents": ["a"] * 200_000}, {"input": ["a"] * 200_000}])
def test_too_many_texts_are_refused_before_they_become_inputs(body: Any, task: str) -> None:
    """Too many texts are refused before inputs are made of them: 3,900,000 documents in 14 MiB took 510 MB and 9 s."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="may have 1 to 256 inputs, not 200000"):
            read(body, task)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 12 << 20


def test_rerank_orders_documents_by_the_cosine_of_their_embeddings() -> None:
    """The query is embedded with the documents."""
    assert read(RERANK).inputs == ["a cat", "dogs", "cats", "birds"]
    result = {"embeddings": [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.6, 0.8]]}

    found = answer({**RERANK, "top_n": 2, "return_documents": True}, result)

    assert found["results"] == [
        {"index": 1, "relevance_score": 1.0, "document": {"text": "cats"}},
        {"index": 2, "relevance_score": 0.6, "document": {"text": "birds"}},
    ]
    assert found["usage"]["total_tokens"] == 7


def test_rerank_uses_a_cross_encoders_score() -> None:
    """A model with one label reads query and document together; one with several cannot rank."""
    assert read(RERANK, CLASSIFICATION).inputs[1] == {"text": "a cat", "text_pair": "cats"}
    labels = [[{"label": "LABEL_0", "score": score}] for score in (0.1, 0.9, 0.5)]

    assert [each["index"] for each in answer(RERANK, labels, CLASSIFICATION)["results"]] == [1, 2, 0]
    with pytest.raises(InvalidRequest, match="one label"):
        answer(RERANK, [[{"score": 0.9}, {"score": 0.1}]] * 3, CLASSIFICATION)


@pytest.mark.parametrize(
    ("body", "task", "param"),
    [
        ({"input": []}, EMBEDDINGS, "input"),
        ({"input": ""}, EMBEDDINGS, "input"),
        ({"input": [1, 2]}, EMBEDDINGS, "input"),
        ({"input": [[1, 2]]}, EMBEDDINGS, "input"),
        ({"input": None}, EMBEDDINGS, "input"),
        ({"input": ["a"] * 257}, EMBEDDINGS, "input"),
        ({"query": "a", "documents": None}, EMBEDDINGS, "documents"),
        ({"query": "a", "documents": ["b"] * 257}, EMBEDDINGS, "documents"),
        ({"query": "a", "documents": ["b"] * 256}, EMBEDDINGS, "documents"),
        ({"input": "a", "dimensions": 0}, EMBEDDINGS, "dimensions"),
        ({"input": "a", "dimensions": True}, EMBEDDINGS, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, EMBEDDINGS, "encoding_format"),
        ({"input": "a", "model": 7}, EMBEDDINGS, "model"),
        ({"input": "a", "colour": "red"}, EMBEDDINGS, "colour"),
        ({"input": "a"}, "fill-mask", "model"),
        (RERANK, "fill-mask", "model"),
        ({"documents": ["a"]}, EMBEDDINGS, "query"),
        ({"messages": [{"role": "user", "content": "a"}]}, EMBEDDINGS, "model"),
        ({"prompt": "a"}, "fill-mask", "model"),
        ({"text": "a"}, "fill-mask", "inputs"),
        ({**RERANK, "documents": "a"}, EMBEDDINGS, "documents"),
        ({**RERANK, "documents": []}, EMBEDDINGS, "documents"),
        ({**RERANK, "documents": [{"title": "a"}]}, EMBEDDINGS, "documents"),
        ({**RERANK, "top_n": 0}, EMBEDDINGS, "top_n"),
        ({**RERANK, "return_documents": 1}, EMBEDDINGS, "return_documents"),
    ],
)
def test_errors_name_the_field(body: Any, task: str, param: str) -> None:
    """The error for a wrong value, or for a model of another task, names the field."""
    with pytest.raises(InvalidRequest) as caught:
        read(body, task)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "task", "words"),
    [
        ({"messages": []}, EMBEDDINGS, "task is sentence-embeddings, and 'messages' is for text-generation"),
        ({"messages": []}, EMBEDDINGS, "or OpenAI's 'input'"),
        ({"prompt": "a"}, CLASSIFICATION, "or 'query' and 'documents'"),
        ({}, "fill-mask", "this model's task is fill-mask, send"),
        ({**RERANK, "query": ["a"]}, EMBEDDINGS, "'query' must be a text that is not empty$"),
        ({**RERANK, "documents": [""]}, EMBEDDINGS, "'documents' must be a list of texts that are not empty$"),
        ({"documents": None}, EMBEDDINGS, "'documents' must be a list of texts that are not empty, not null$"),
    ],
)
def test_errors_say_what_can_be_sent(body: Any, task: str, words: str) -> None:
    """The error states the model's task and the form of the field."""
    with pytest.raises(InvalidRequest, match=words):
        read(body, task)


@pytest.mark.parametrize(("texts", "are_tokens"), [(7, True), ([[7, 8]], True), (["a", 7], True), (True, False)])
def test_only_numbers_are_taken_for_token_ids(texts: Any, are_tokens: bool) -> None:
    """Token ids must be integers; booleans are refused like a wrong text."""
    with pytest.raises(InvalidRequest) as caught:
        read({"input": texts})
    assert ("token ids" in str(caught.value)) is are_tokens


def test_an_unknown_field_is_found_among_many() -> None:
    """The error names one unknown field, shortened; sorting all names of a 2 MB body is not necessary."""
    body = {"input": "a", "x" * 1000: 1, **{f"k{number}": 1 for number in range(1000)}}
    with pytest.raises(InvalidRequest, match=f"there is no field '{'x' * 40}' for embeddings here") as caught:
        read(body)
    assert caught.value.param == "x" * 40


def test_a_body_with_inputs_is_the_tasks_own() -> None:
    """A body with `inputs` gets the task's own answer, as with Hugging Face."""
    assert read({"inputs": "a", "input": "b"}).form is None


def test_raw_tensors_are_refused_by_the_models_task() -> None:
    """The error for raw tensors, which open inference clients send by default, names the model's task."""
    incoming = Incoming({"inference-header-content-length": "14"}, b'{"inputs": []}\xff\xff')

    with pytest.raises(InvalidRequest, match="this model's task is sentence-embeddings, which takes no tensors"):
        read_task_request(incoming, MAX_VALUES, task=EMBEDDINGS, max_inputs=MAX_INPUTS)
