"""The admin plane's view of many models: which are where, and what an operator may do to them.

Nothing is kept here: the instances are asked whenever somebody asks, one round at a time, and at most once a second.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from time import monotonic
from typing import Any

from aiohttp import web

from torchmoor.admin.cross_origin import find_foreign_page
from torchmoor.errors import UnknownEndpoint, ValidationError
from torchmoor.metrics.models import ModelMetricsCollector
from torchmoor.proxy.instances.instance import Instance
from torchmoor.proxy.instances.operations import OperationAnswer, Operations
from torchmoor.proxy.instances.registry import Endpoint, Registry
from torchmoor.wire import operations

STATUS_TIMEOUT_S = 2.0
ACTION_TIMEOUT_S = 360.0  # an unload waits for the requests that use the model
FRESH_S = 1.0
ACTIONS = ("pin", "unpin", "prewarm", "unload")
_WHERE_HELD = ("pin", "prewarm")  # the others go to every instance: whoever has no such model says so


class ModelsAdmin:
    """GET /models, and POST /models/NAME/pin, unpin, prewarm and unload.

    GET /models?endpoint=E: one row a model and instance, and one an instance. POST: ?endpoint=E where there are several
    with many models; ?instance=I for one instance, else pin and prewarm go to those that hold the model, or where
    routing would send a request for it, unpin and unload to all.
    """

    def __init__(self, registry: Registry, operations: Operations, collector: ModelMetricsCollector) -> None:
        self.collector = collector
        self._registry = registry
        self._operations = operations
        self._lock = asyncio.Lock()
        self._told: dict[str, dict[str, Any]] = {}
        self._told_at = -FRESH_S

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Serve here."""
        router.add_get("/models", self._show)
        router.add_post("/models/{name:.+}/{action:" + "|".join(ACTIONS) + "}", self._act)

    # What is where

    async def _show(self, request: web.Request) -> web.Response:
        endpoint = request.query.get("endpoint")
        instances = [i for e in self._endpoints() if endpoint in (None, e.name) for i in e.instances]
        told = await self._ask_all()
        return web.json_response(
            {
                "models": [
                    {"endpoint": instance.endpoint, "instance": instance.name, **row}
                    for instance in instances
                    for row in told.get(instance.name, {}).get("models", ())
                ],
                "instances": [
                    {
                        "endpoint": instance.endpoint,
                        "instance": instance.name,
                        "answered": instance.name in told,
                        "budgets": told.get(instance.name, {}).get("budgets", {}),
                        "next_to_go": told.get(instance.name, {}).get("next_to_go", []),
                    }
                    for instance in instances
                ],
            }
        )

    async def _ask_all(self) -> dict[str, dict[str, Any]]:
        """The status of every ready instance with many models, by its name."""
        async with self._lock:
            if monotonic() - self._told_at >= FRESH_S:
                instances = [i for e in self._endpoints() for i in e.instances if i.is_ready]
                answers = await asyncio.gather(*(self._ask(instance) for instance in instances))
                named = zip(instances, answers, strict=True)
                self._told = {instance.name: status for instance, status in named if status is not None}
                self._told_at = monotonic()
            return self._told

    async def _ask(self, instance: Instance) -> dict[str, Any] | None:
        answer = await self._operations.ask(instance, operations.STATUS, {}, timeout_s=STATUS_TIMEOUT_S)
        status = _content(answer) if answer is not None and answer.status == 200 else None
        if status is None or not isinstance(status.get("models"), list):
            return None
        rows = [row for row in status["models"] if isinstance(row, dict)]
        return {**{key: status[key] for key in ("budgets", "next_to_go") if key in status}, "models": rows}

    def _endpoints(self) -> list[Endpoint]:
        """Those with many models."""
        return [endpoint for endpoint in self._registry.endpoints() if endpoint.settings.multi_model is not None]

    # What is done

    async def _act(self, request: web.Request) -> web.Response:
        origin = find_foreign_page(request)
        if origin is not None:
            return _error(403, f"A page of {origin} may not do this.")
        name, action = request.match_info["name"], request.match_info["action"]
        try:
            instances = self._choose(name, action, request.query)
        except ValidationError as error:
            return _error(error.status, error.message)
        if not instances:
            return _error(404, "There is no ready instance with many models that is meant; see GET /models.")
        body = {"action": action, "model": name}
        answers = await asyncio.gather(
            *(self._operations.ask(each, operations.MODELS, body, timeout_s=ACTION_TIMEOUT_S) for each in instances)
        )
        self._told_at = -FRESH_S
        if action in _WHERE_HELD:
            self._expect(name, instances, answers)
        rows = [_row(instance, answer) for instance, answer in zip(instances, answers, strict=True)]
        done = [row for row in rows if row["status"] == 200]
        return web.json_response({"model": name, "instances": rows}, status=200 if done else rows[0]["status"])

    def _expect(self, name: str, instances: list[Instance], answers: list[OperationAnswer | None]) -> None:
        """Requests follow the model although no report has it yet."""
        for instance, answer in zip(instances, answers, strict=True):
            models = self._registry.variant_of(instance).models
            is_still_there = self._registry.find(instance.name) is instance and instance.is_ready
            if models is not None and answer is not None and answer.status == 200 and is_still_there:
                models.expect(name, instance.name)

    def _choose(self, name: str, action: str, query: Mapping[str, str]) -> list[Instance]:
        """The ready instances that are meant. Raises ValidationError."""
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
    """What became of an action at an instance."""
    if answer is None:
        return {"instance": instance.name, "status": 504, "error": "The instance gave no answer in time."}
    content = _content(answer) or {}
    if answer.status == 200:
        return {"instance": instance.name, "status": 200, "tier": content.get("tier")}
    error = content.get("error")
    message = error.get("message") if isinstance(error, dict) else content.get("message")
    return {"instance": instance.name, "status": answer.status, "code": answer.code, "error": str(message)}


def _content(answer: OperationAnswer) -> dict[str, Any] | None:
    try:
        content = json.loads(answer.body)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)
