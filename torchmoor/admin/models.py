"""Endpoints with many models: the list of models, and an operator's actions on them.

The instances hold the state. They are asked for each list, in one round at a time and at most once per second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from aiohttp import web

from torchmoor.admin.http import error_message, get, post, read_content
from torchmoor.admin.recent_answers import RecentAnswers
from torchmoor.errors import ApiError, UnknownEndpoint, ValidationError
from torchmoor.proxy.api.reference import admin_schemas
from torchmoor.proxy.instances.endpoint import Endpoint
from torchmoor.proxy.instances.handler_operations import HandlerOperations, OperationAnswer
from torchmoor.proxy.instances.instance import SERVING, Instance
from torchmoor.proxy.instances.registry import Registry
from torchmoor.wire import operations

STATUS_TIMEOUT_S = 2.0
ACTION_TIMEOUT_S = 360.0  # an unload waits for the requests that use the model
FRESH_S = 1.0
MAX_QUERIES = 32  # at once
ACTIONS = (operations.PIN, operations.UNPIN, operations.PREWARM, operations.UNLOAD)
_WHERE_HELD = (operations.PIN, operations.PREWARM)  # others go to every instance; one without the model answers so


class ModelsAdmin:
    """Serves GET /models, and POST /models/NAME/pin, unpin, prewarm and unload.

    GET /models?endpoint=E has a row per model and instance, and a row per instance. POST needs ?endpoint=E if several
    endpoints have many models. With ?instance=I it goes to that instance. Otherwise pin and prewarm go to the instances
    that hold the model, or to the one that routing would choose for it; unpin and unload go to all.
    """

    def __init__(self, registry: Registry, operations: HandlerOperations) -> None:
        self._registry = registry
        self._operations = operations
        self._statuses = RecentAnswers(FRESH_S)
        self._free = asyncio.Semaphore(MAX_QUERIES)

    @get(
        "/models",
        "listModelsOfInstances",
        "List the models of endpoints with many models.",
        admin_schemas.PLACED_MODELS,
    )
    async def _show(self, request: web.Request) -> web.Response:
        endpoint = request.query.get("endpoint")
        instances = [i for e in self._endpoints() if endpoint in (None, e.name) for i in e.instances]
        statuses = await self._statuses.get(None, self._ask_all)
        return web.json_response(
            {
                "models": [
                    {"endpoint": instance.endpoint, "instance": instance.name, **row}
                    for instance in instances
                    for row in statuses.get(instance.name, {}).get("models", ())
                ],
                "instances": [
                    {
                        "endpoint": instance.endpoint,
                        "instance": instance.name,
                        "answered": instance.name in statuses,
                        "budgets": statuses.get(instance.name, {}).get("budgets", {}),
                        "next_to_go": statuses.get(instance.name, {}).get("next_to_go", []),
                    }
                    for instance in instances
                ],
            }
        )

    async def _ask_all(self) -> dict[str, dict[str, Any]]:
        """Return the statuses of the instances with many models that answer requests, by instance name."""
        instances = [i for e in self._endpoints() for i in e.instances if i.state in SERVING]
        answers = await asyncio.gather(*(self._ask(instance) for instance in instances))
        named = zip(instances, answers, strict=True)
        return {instance.name: status for instance, status in named if status is not None}

    async def _ask(self, instance: Instance) -> dict[str, Any] | None:
        async with self._free:
            answer = await self._operations.ask(instance, operations.STATUS, {}, timeout_s=STATUS_TIMEOUT_S)
        status = read_content(answer)
        if not isinstance(status.get("models"), list):
            return None
        rows = [row for row in status["models"] if isinstance(row, dict)]
        return {**{key: status[key] for key in ("budgets", "next_to_go") if key in status}, "models": rows}

    def _endpoints(self) -> list[Endpoint]:
        """Return the endpoints with many models."""
        return [endpoint for endpoint in self._registry.endpoints() if endpoint.settings.multi_model is not None]

    @post(
        "/models/{name:.+}/{action:" + "|".join(ACTIONS) + "}",
        "actOnModel",
        "Pin, unpin, prewarm or unload a model.",
        admin_schemas.MODEL_ACTION,
        is_body_required=False,
    )
    async def _act(self, request: web.Request) -> web.Response:
        name, action = request.match_info["name"].removeprefix("/"), request.match_info["action"]  # as for TargetModel
        instances = self._choose(name, action, request.query)
        if not instances:
            raise ApiError("No ready instance with many models matches; see GET /models.", status=404)
        body = {operations.ACTION: action, operations.MODEL: name}
        answers = await asyncio.gather(
            *(self._operations.ask(each, operations.MODELS, body, timeout_s=ACTION_TIMEOUT_S) for each in instances)
        )
        self._statuses.forget()
        if action in _WHERE_HELD:
            self._expect(name, instances, answers)
        rows = [_row(instance, answer) for instance, answer in zip(instances, answers, strict=True)]
        # One that does not hold the model, 404, says less than one that fails.
        status = min((row["status"] for row in rows), key=lambda status: (status != 200, status == 404))
        return web.json_response({"model": name, "instances": rows}, status=status)

    def _expect(self, name: str, instances: list[Instance], answers: list[OperationAnswer | None]) -> None:
        """Route requests for the model to these instances before their next report names it."""
        for instance, answer in zip(instances, answers, strict=True):
            is_still_there = self._registry.has(instance) and instance.is_ready
            if answer is None or answer.status != 200 or not is_still_there:
                continue
            models = self._registry.variant_of(instance).models
            if models is not None:
                models.expect(name, instance.name)

    def _choose(self, name: str, action: str, query: Mapping[str, str]) -> list[Instance]:
        """Return the ready instances that the query selects. Raises ValidationError."""
        endpoints = self._endpoints()
        if "endpoint" in query:
            endpoints = [endpoint for endpoint in endpoints if endpoint.name == query["endpoint"]]
            if not endpoints:
                raise UnknownEndpoint(query["endpoint"])
        if "instance" not in query and len(endpoints) > 1:
            raise ValidationError("Several endpoints have many models: add ?endpoint=NAME.")
        ready = [i for endpoint in endpoints for i in endpoint.instances if i.is_ready]
        if "instance" in query:
            return [instance for instance in ready if instance.name == query["instance"]]
        return self._where_held(name, endpoints, ready) if action in _WHERE_HELD else ready

    def _where_held(self, name: str, endpoints: Iterable[Endpoint], ready: list[Instance]) -> list[Instance]:
        placed: list[Instance] = []
        for endpoint in endpoints:
            for variant in endpoint.variants:
                assert variant.models is not None
                held = [i for i in ready if i.variant == variant.name and variant.models.is_held(name, i.name)]
                pick = None if held else variant.models.choose(name, variant.pool)
                placed += held if pick is None else [pick.instance]
        return placed


def _row(instance: Instance, answer: OperationAnswer | None) -> dict[str, Any]:
    """Return an instance's result of an action."""
    if answer is None:
        return {"instance": instance.name, "status": 504, "error": "The instance gave no answer in time."}
    content = answer.content()
    if answer.status == 200:
        return {"instance": instance.name, "status": 200, "tier": content.get("tier")}
    return {
        "instance": instance.name,
        "status": answer.status,
        "code": answer.code,
        "error": error_message(content),
    }
