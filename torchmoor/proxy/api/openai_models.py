"""Models as OpenAI's clients see them: endpoints, and the models of an endpoint with many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchmoor.errors import UnknownModel, UnknownOperation, ValidationError, WrongModel
from torchmoor.proxy.api.openai_by_body import find_model
from torchmoor.proxy.api.replies import json_reply
from torchmoor.proxy.api.validation import MEMBERS, TARGET_MODEL
from torchmoor.proxy.http.message import Reply
from torchmoor.proxy.instances.registry import Endpoint

_OF_ONE = ("chat.completions", "completions", "responses")
_OF_MANY = ("chat.completions", "completions", "embeddings", "rerank")  # each of its models has one of them


def list_models(endpoints: Sequence[Endpoint], wanted: str) -> Reply:
    """List the models, or describe one. Raises UnknownModel."""
    models = [_describe(endpoint) for endpoint in endpoints]
    if not wanted:
        return json_reply(200, {"object": "list", "data": models})
    for model in models:
        if model["id"] == wanted:
            return json_reply(200, model)
    raise UnknownModel(wanted, [endpoint.name for endpoint in endpoints])


def _describe(endpoint: Endpoint) -> dict[str, Any]:
    has_many = endpoint.settings.multi_model is not None
    return {
        "id": endpoint.name,
        "object": "model",
        "created": 0,
        "owned_by": "torchmoor",
        "capabilities": list(_OF_MANY if has_many else _OF_ONE),
    }


def find_many(endpoints: Sequence[Endpoint]) -> Endpoint:
    """Return the first endpoint with many models. Raises UnknownOperation if there is none."""
    for endpoint in endpoints:
        if endpoint.settings.multi_model is not None:
            return endpoint
    raise UnknownOperation("Embeddings and rerank need an endpoint with many models, and there is none here.")


def read_target_model(body: bytes, endpoint: Endpoint) -> str:
    """Return the name of the model, of an endpoint with many, in the beginning of a body.

    Raises WrongModel if there is none, and ValidationError if it cannot be a model's name.
    """
    model = find_model(body)
    if not model:
        raise WrongModel(f"Endpoint {endpoint.name} has many models: name one of them as `model`.")
    problem = MEMBERS[TARGET_MODEL].find_problem(model.encode("utf-8", "surrogatepass"))
    if problem is not None:
        raise ValidationError(problem)
    return model
