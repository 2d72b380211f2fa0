"""OpenAI's embeddings, and the rerank requests of Cohere and Jina, as task requests: bodies and answers.

A body is recognised by its fields, as the chat dialects are: `input` is embeddings, `query` with `documents` is rerank.
"""

import base64
import math
import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handlers.chat.checks import is_int, read_flag
from handlers.errors import InvalidRequest
from handlers.many.request import MAX_NAME, NUMBER_BYTES, TaskRequest, as_list, read_body, read_request
from handlers.requests.incoming import Incoming
from torchmoor.wire import headers as wire

EMBEDDINGS, CLASSIFICATION = "sentence-embeddings", "text-classification"
TEXT_GENERATION = "text-generation"
ENCODINGS = ("float", "base64")
EMBEDDING_FIELDS = {"input", "model", "encoding_format", "dimensions", "user"}
TEXTS = {
    "input": "a text that is not empty, or a list of such texts",
    "query": "a text that is not empty",
    "documents": "a list of texts that are not empty",
}
RERANK_FIELDS = {"query", "documents", "model", "top_n", "return_documents", "user"}


def read_task_request(incoming: Incoming, max_json_values: int, *, task: str, max_inputs: int) -> TaskRequest:
    """Read a body of any form for a task. Raises InvalidJson, InvalidRequest, UnsupportedMedia.

    max_inputs: checked first, because the parsed request takes many times a text's memory.
    """
    if wire.INFERENCE_HEADER_LENGTH in incoming.headers:
        raise InvalidRequest(f"this model's task is {task}, which takes no tensors: send {_takes(task)}", param="model")
    body = read_body(incoming, max_json_values)
    if not isinstance(body, dict) or "inputs" in body:
        return read_request(body)
    given = {name: value for name, value in body.items() if value is not None}
    model = incoming.headers.get(wire.TARGET_MODEL, "")
    if "input" in given:
        _check_number(given, "input", max_inputs)
        return _read_embeddings(given, model).request_of(task)
    if "documents" in given:
        _check_number(given, "documents", max_inputs)
        request = _read_rerank(given, model).request_of(task)
        if len(request.inputs) > max_inputs:  # the query is one of them
            message = f"a request may have {max_inputs - 1} documents beside its query, not {max_inputs}"
            raise InvalidRequest(message, param="documents")
        return request
    for name in ("input", "documents"):
        if name in body:
            raise InvalidRequest(f"'{name}' must be {TEXTS[name]}, not null", param=name)
    for name in ("messages", "prompt"):
        if name in body:
            message = f"this model's task is {task}, and '{name}' is for {TEXT_GENERATION}: send {_takes(task)}"
            raise InvalidRequest(message, param="model")
    raise InvalidRequest(f"the body has no 'inputs': this model's task is {task}, send {_takes(task)}", param="inputs")


def _takes(task: str) -> str:
    others = {EMBEDDINGS: ", or OpenAI's 'input'", CLASSIFICATION: ", or 'query' and 'documents' to rank"}
    return '{"inputs": ..., "parameters": {...}}' + others.get(task, "")


@dataclass(frozen=True, slots=True)
class EmbeddingsForm:
    """OpenAI's embeddings. dimensions: None for all of the model's."""

    model: str
    texts: Sequence[str]
    is_base64: bool
    dimensions: int | None

    @property
    def bytes_per_number(self) -> float:
        return 16 / 3 if self.is_base64 else NUMBER_BYTES

    def request_of(self, task: str) -> TaskRequest:
        if task != EMBEDDINGS:
            raise InvalidRequest(f"this model's task is {task}, and embeddings need {EMBEDDINGS}", param="model")
        return TaskRequest(list(self.texts), {"truncation": False, "dimensions": self.dimensions}, self)

    def answer(self, result: Any, num_tokens: int) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": index, "embedding": self._encode(vector)}
            for index, vector in enumerate(result["embeddings"])
        ]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": self.model, "usage": usage}

    def _encode(self, vector: list[float]) -> list[float] | str:
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if self.is_base64 else vector


@dataclass(frozen=True, slots=True)
class RerankForm:
    """Documents in the order of their relevance to a query: a cross encoder's score, or the cosine of embeddings."""

    model: str
    query: str
    documents: Sequence[str]
    top_n: int
    has_documents: bool

    @property
    def bytes_per_number(self) -> float:
        return 0.0

    def request_of(self, task: str) -> TaskRequest:
        if task == CLASSIFICATION:
            pairs = [{"text": self.query, "text_pair": document} for document in self.documents]
            return TaskRequest(pairs, {"top_k": 2, "truncation": True}, self)
        if task == EMBEDDINGS:
            return TaskRequest([self.query, *self.documents], {"normalize": True}, self)
        raise InvalidRequest(
            f"this model's task is {task}, and rerank needs {EMBEDDINGS}, or {CLASSIFICATION} with one label",
            param="model",
        )

    def answer(self, result: Any, num_tokens: int) -> dict[str, Any]:
        scores = _cosines(result["embeddings"]) if isinstance(result, dict) else [_score(labels) for labels in result]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: self.top_n]
        results = [
            {
                "index": index,
                "relevance_score": scores[index],
                **({"document": {"text": self.documents[index]}} if self.has_documents else {}),
            }
            for index in best
        ]
        return {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": self.model,
            "results": results,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }


def _cosines(vectors: Sequence[Sequence[float]]) -> list[float]:
    query, *documents = vectors
    return [math.fsum(a * b for a, b in zip(query, document, strict=True)) for document in documents]


def _score(labels: Sequence[Mapping[str, Any]]) -> float:
    if len(labels) > 1:
        raise InvalidRequest("this model tells classes apart; rerank needs a model with one label", param="model")
    score: float = labels[0]["score"]
    return score


def _read_embeddings(given: Mapping[str, Any], model: str) -> EmbeddingsForm:
    _check_fields(given, EMBEDDING_FIELDS, "embeddings")
    encoding, dimensions = given.get("encoding_format", ENCODINGS[0]), given.get("dimensions")
    if encoding not in ENCODINGS:
        raise InvalidRequest(f"'encoding_format' must be one of {', '.join(ENCODINGS)}", param="encoding_format")
    texts = given["input"] if isinstance(given["input"], list) else [given["input"]]
    if any(isinstance(text, int | list) and not isinstance(text, bool) for text in texts):
        raise InvalidRequest(
            "'input' must be a text or a list of texts: token ids of another tokenizer mean nothing to this model",
            param="input",
        )
    return EmbeddingsForm(
        model=_model(given, model),
        texts=_texts(texts, "input"),
        is_base64=encoding == "base64",
        dimensions=None if dimensions is None else _positive(dimensions, "dimensions"),
    )


def _read_rerank(given: Mapping[str, Any], model: str) -> RerankForm:
    _check_fields(given, RERANK_FIELDS, "rerank")
    documents = given["documents"]
    if not isinstance(documents, list):
        raise InvalidRequest("'documents' must be a list of texts", param="documents")
    documents = [each.get("text") if isinstance(each, dict) else each for each in documents]
    has_documents, top_n = read_flag(given, "return_documents"), given.get("top_n")
    return RerankForm(
        model=_model(given, model),
        query=_texts([given.get("query")], "query")[0],
        documents=_texts(documents, "documents"),
        top_n=len(documents) if top_n is None else _positive(top_n, "top_n"),
        has_documents=has_documents,
    )


def _check_fields(given: Mapping[str, Any], known: set[str], what: str) -> None:
    unknown = next((name[:MAX_NAME] for name in given if name not in known), None)
    if unknown is not None:
        raise InvalidRequest(f"there is no field {unknown!r} for {what} here", param=unknown)


def _check_number(given: Mapping[str, Any], name: str, max_inputs: int) -> None:
    texts = given[name]
    if isinstance(texts, list) and texts:
        as_list(texts, max_inputs, name)


def _texts(texts: Sequence[Any], name: str) -> Sequence[str]:
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidRequest(f"'{name}' must be {TEXTS[name]}", param=name)
    return texts


def _positive(value: Any, name: str) -> int:
    if not is_int(value) or value < 1:
        raise InvalidRequest(f"'{name}' must be a whole number of at least 1", param=name)
    return value


def _model(given: Mapping[str, Any], model: str) -> str:
    """Return the model's name that the client used."""
    name = given.get("model", model)
    if not isinstance(name, str):
        raise InvalidRequest("'model' must be a text", param="model")
    return name
