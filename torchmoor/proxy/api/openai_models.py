"""Models as OpenAI's clients see them: endpoints, and the models of an endpoint with many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchmoor.errors import UnknownModel, UnknownOperation, ValidationError, WrongModel
from torchmoor.proxy.api.body_fields import find_model
from torchmoor.proxy.api.replies import json_reply
from torchmoor.proxy.api.runtime_members import MEMBERS, TARGET_MODEL
from torchmoor.proxy.http.field_names import OPENAI_REQUEST_ID
from torchmoor.proxy.http.message import Reply
from torchmoor.proxy.instances.endpoint import Endpoint

MAX_NAMES_SHOWN = 20  # in one message
_OF_ONE = ("chat.completions", "completions", "responses")
_OF_MANY = ("chat.completions", "completions", "embeddings", "rerank")  # each of its models can do one of these


def list_models(endpoints: Sequence[Endpoint], wanted: str, request_id: bytes) -> Reply:
    """List the models, or describe one. Raises UnknownModel."""
    fields = ((OPENAI_REQUEST_ID, request_id),)
    models = [model for endpoint in endpoints for model in _describe(endpoint)]
    if not wanted:
        return json_reply(200, {"object": "list", "data": models}, fields)
    for model in models:
        if model["id"] == wanted:
            return json_reply(200, model, fields)
    for endpoint in endpoints:
        adapter = wanted.removeprefix(f"{endpoint.name}/")
        if endpoint.settings.has_adapters and adapter not in ("", wanted):
            raise UnknownModel(
                f"No instance has loaded the adapter `{adapter[:64]}`, so it is not listed. A request may name "
                f"`{endpoint.name}/{adapter[:64]}`: it is loaded then, if the endpoint's source has it."
            )
    raise unknown_model(wanted, [model["id"] for model in models])


def unknown_model(model: str, known: Sequence[str]) -> UnknownModel:
    """Return the error for a name that is not one of these."""
    shown = ", ".join(f"`{name}`" for name in known[:MAX_NAMES_SHOWN])
    more = f" and {len(known) - MAX_NAMES_SHOWN} more (GET /v1/models)" if len(known) > MAX_NAMES_SHOWN else ""
    return UnknownModel(f"The model `{model[:64]}` does not exist. There is: {shown}{more}.")


def _describe(endpoint: Endpoint) -> list[dict[str, Any]]:
    """Describe an endpoint, and those of its adapters that its instances have reported.

    The capabilities of an operator's own handler are not known.
    """
    is_own = bool(endpoint.instances) and not any(each.can_be_operated for each in endpoint.instances)
    capabilities = () if is_own else _OF_MANY if endpoint.settings.has_many else _OF_ONE
    described = {
        "id": endpoint.name,
        "object": "model",
        "created": int(endpoint.created_at),
        "owned_by": "torchmoor",
        "capabilities": list(capabilities),
    }
    if not endpoint.settings.has_adapters:
        return [described]
    placements = [variant.models for variant in endpoint.variants if variant.models is not None]
    adapters = sorted({name for placement in placements for name in placement.names()})
    parts = [{**described, "id": f"{endpoint.name}/{name}", "parent": endpoint.name} for name in adapters]
    return [described, *parts]


def find_many(endpoints: Sequence[Endpoint]) -> Endpoint:
    """Return the first endpoint with many models. Raises UnknownOperation if there is none."""
    for endpoint in endpoints:
        if endpoint.settings.has_many:
            return endpoint
    raise UnknownOperation("Embeddings and rerank need an endpoint with many models, and there is none here.")


def read_target_model(body: bytes, endpoint: Endpoint) -> str:
    """Return the model that the beginning of a body names. endpoint: has many models.

    Raises WrongModel if there is none, and ValidationError if it cannot be a model's name.
    """
    model = find_model(body)
    if not model:
        raise WrongModel(f"Endpoint {endpoint.name} has many models: name one of them as `model`.")
    return _checked(model)


def read_adapter(body: bytes, endpoint: Endpoint) -> str | None:
    """Return the adapter that the beginning of a body names, with or without the endpoint's name before it.

    The endpoint's own name is returned as it is: it means the model without an adapter. None if the body names nothing.
    Raises WrongModel, and ValidationError if it cannot be an adapter's name.
    """
    model = find_model(body)
    return _checked(model.removeprefix(f"{endpoint.name}/")) if model else None


def _checked(model: str) -> str:
    problem = MEMBERS[TARGET_MODEL].find_problem(model.encode("utf-8", "surrogatepass"))
    if problem is not None:
        raise ValidationError(problem)
    return model
