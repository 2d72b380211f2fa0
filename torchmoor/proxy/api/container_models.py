"""The operations on models of SageMaker's containers (AWS: "Custom Containers Contract for Multi-Model Endpoints").

    POST   /models                 {"model_name", "url"}: load; 409 if it is loaded already, 507 if memory is full
    GET    /models                 list the loaded models, in pages
    GET    /models/{name}          describe a loaded model, or 404
    DELETE /models/{name}          unload; the answer comes when its memory is free
    POST   /models/{name}/invoke   send a request to it, or 404

The platform chooses the names; they are not TargetModels. One instance of the first endpoint loads a model and gets its
requests, because only that instance knows the model's url. A model counts as loaded until it is unloaded or that
instance loses its memory; the instance may move it to a slower tier meanwhile.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote

from torchmoor.errors import ApiError, ModelBusy, ModelNotLoaded, ServiceUnavailable, TooManyModels, ValidationError
from torchmoor.proxy.api.begin_invocation import begin_invocation
from torchmoor.proxy.api.deferred_reply import defer_operation, in_task
from torchmoor.proxy.api.invocation import Invocation
from torchmoor.proxy.api.operation import Operation
from torchmoor.proxy.api.passthrough import PassThroughDialect
from torchmoor.proxy.api.replies import JSON, Handler, container_error, json_reply, unknown_operation
from torchmoor.proxy.api.runtime_members import TARGET_MODEL
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http.call import Call
from torchmoor.proxy.http.field_names import ERROR_CODE
from torchmoor.proxy.http.message import Reply, Request
from torchmoor.proxy.instances.handler_operations import HandlerOperations, OperationAnswer
from torchmoor.proxy.instances.instance import SERVING, Instance
from torchmoor.wire import operations
from torchmoor.wire.json_values import parse_json

PATH = b"/models"
PAGE_SIZE = 100  # models per page of the list
NO_ROOM = TooManyModels.status
TOO_MANY = "Too many models are being loaded or unloaded. Try again later."

_NAME = re.compile(r"[A-Za-z0-9._~-]{1,256}", re.ASCII)


@dataclass(slots=True)
class LoadedModel:
    """A model by its url.

    instance: the one that has it or is loading it. is_ready: it takes requests. is_busy: it is loaded or unloaded now.
    """

    url: str
    instance: str
    is_ready: bool = False
    is_busy: bool = True


class ContainerModelsApi:
    """Maps the platform's operations to the handlers' `models` operation."""

    def __init__(self, dispatchers: Dispatchers, operations: HandlerOperations) -> None:
        self._dispatchers = dispatchers
        self._settings = dispatchers.settings.container
        self._endpoint = dispatchers.registry.endpoints()[0]
        self._handlers = operations
        self._invocations = Operation(dispatchers, self._endpoint, LoadedModelDialect())
        self._models: dict[str, LoadedModel] = {}
        dispatchers.registry.listen(self._on_change)

    def find_handler(self, method: bytes, path: bytes) -> Handler | None:
        return self._handle if path == PATH or path.startswith(PATH + b"/") else None

    def _handle(self, request: Request, request_id: bytes) -> Call | Reply:
        try:
            return self._route(request, request_id)
        except ApiError as error:
            return container_error(error, request_id)

    def _route(self, request: Request, request_id: bytes) -> Call | Reply:
        self._dispatchers.get_endpoints(request, self._endpoint.name)  # every request is about this one
        name, verb = _read_path(request)
        match (request.method, bool(name), verb):
            case (b"GET", False, ""):
                return self._list(request)
            case (b"POST", False, ""):
                return self._order(request, request_id, self._load)
            case (b"GET", True, ""):
                return json_reply(200, _row(name, self._get(name).url))
            case (b"DELETE", True, ""):
                return self._order(request, request_id, lambda body: self._unload(name))
            case (b"POST", True, "invoke"):
                return self._invoke(request, request_id, name)
        raise unknown_operation(request)

    def _get(self, name: str) -> LoadedModel:
        model = self._models.get(name)
        if model is None or not model.is_ready:
            raise ModelNotLoaded(f"Model {name[:256]} is not loaded.")
        return model

    def _list(self, request: Request) -> Reply:
        """List a page of models by name; a token is the last name of the page before."""
        query = parse_qs(request.query.decode("latin-1"))
        token = query.get("next_page_token", [""])[0]
        names = sorted(name for name, model in self._models.items() if model.is_ready)
        begin = bisect_right(names, token)
        page = names[begin : begin + PAGE_SIZE]
        listed: dict[str, object] = {"models": [_row(name, self._models[name].url) for name in page]}
        if begin + len(page) < len(names):
            listed["nextPageToken"] = page[-1]
        return json_reply(200, listed)

    def _invoke(self, request: Request, request_id: bytes, name: str) -> Invocation:
        model = self._get(name)
        invocation = begin_invocation(self._invocations, request, request_id, model=name)
        others = frozenset(each.name for each in self._endpoint.instances if each.name != model.instance)
        invocation.assignment.exclude(others)
        return invocation

    # Loading and unloading

    def _order(self, request: Request, request_id: bytes, work: Callable[[bytes], Coroutine[Any, Any, Reply]]) -> Call:
        begin = in_task(self._handlers.tasks, work, TOO_MANY)
        return defer_operation(self._dispatchers, request, request_id, begin, timeout_s=self._settings.load_timeout_s)

    async def _load(self, body: bytes) -> Reply:
        """Load a model: at another instance if one has no memory for it. Raises ApiError."""
        name, url = _read_load(body)
        known = self._models.get(name)
        if known is not None and known.is_busy:
            raise _busy(name)
        if known is None and len(self._models) >= self._settings.max_models:
            raise TooManyModels(f"{self._settings.max_models} models are loaded; unload some first.")
        # The instance of a loaded model answers 409, or loads the model again if it has lost it.
        home = None if known is None else self._dispatchers.registry.find(known.instance)
        instance, tried = home or self._choose(name, frozenset()), frozenset[str]()
        answer = await self._load_at(instance, name, url, known)
        while answer is not None and answer.status == NO_ROOM:
            tried |= {instance.name}
            try:
                instance = self._choose(name, tried)
            except ServiceUnavailable:
                break  # no instance is left: the last answer says that there is no memory
            answer = await self._load_at(instance, name, url, None)
        return _reply(answer, _row(name, url))

    def _choose(self, name: str, tried: frozenset[str]) -> Instance:
        dispatcher = self._dispatchers.first(self._endpoint)
        models, pool = dispatcher.variant.models, dispatcher.variant.pool
        assert models is not None  # the settings ensure it
        pick = models.choose(name, pool, tried)
        if pick is None:
            raise ServiceUnavailable("No instance is ready to load the model. Try again later.")
        return pick.instance

    async def _load_at(
        self, instance: Instance, name: str, url: str, known: LoadedModel | None
    ) -> OperationAnswer | None:
        """Return an instance's answer, if it gave one. known: the loaded model of this name, which goes on serving."""
        model = LoadedModel(url, instance.name)
        current = self._models[name] = known or model
        current.is_busy = True
        answer = await self._ask(instance, operations.LOAD, {operations.MODEL: name, operations.URL: url})
        current.is_busy = False
        if self._models.get(name) is not current:  # the instance has lost its memory meanwhile
            return None
        if answer is not None and (answer.status == 200 or (answer.status == 409 and known is None)):
            self._models[name] = model
            model.is_ready, model.is_busy = True, False
        elif known is None or (answer is not None and answer.status == NO_ROOM):
            del self._models[name]
        return answer

    async def _unload(self, name: str) -> Reply:
        """Unload a model. Raises ApiError."""
        model = self._get(name)
        if model.is_busy:
            raise _busy(name)
        instance = self._dispatchers.registry.find(model.instance)
        assert instance is not None  # a lost instance's models are forgotten
        model.is_ready, model.is_busy = False, True
        answer = await self._ask(instance, operations.UNLOAD, {operations.MODEL: name})
        model.is_busy = False
        row = _row(name, model.url)
        if answer is None or answer.status not in (200, 404):
            model.is_ready = True
            return _reply(answer, row)
        if self._models.get(name) is model:
            del self._models[name]
        return json_reply(200, row)  # 404: the instance has evicted it already

    async def _ask(self, instance: Instance, action: str, more: Mapping[str, object]) -> OperationAnswer | None:
        body, timeout_s = {operations.ACTION: action, **more}, self._settings.load_timeout_s
        return await self._handlers.ask(instance, operations.MODELS, body, timeout_s=timeout_s)

    def _on_change(self, instance: Instance) -> None:
        """Forget the models of an instance that has lost its memory."""
        if not self._dispatchers.registry.has(instance) or instance.state not in SERVING:
            for name in [name for name, model in self._models.items() if model.instance == instance.name]:
                del self._models[name]


class LoadedModelDialect(PassThroughDialect):
    """Sends the path's model name as TargetModel. The client's own TargetModel is for logs only."""

    held_back = frozenset((TARGET_MODEL,))

    def added_lines(self, request: Request) -> bytes:
        return b"%b: %b\r\n" % (TARGET_MODEL, _read_path(request)[0].encode())


def _read_path(request: Request) -> tuple[str, str]:
    """Read the name and what follows it from a path; each may be empty."""
    name, _, verb = unquote(request.path[len(PATH) + 1 :].decode("latin-1")).partition("/")
    return name, verb


def _read_load(body: bytes) -> tuple[str, str]:
    """Read the name and the url from a body. Raises ValidationError."""
    content = parse_json(body)
    name, url = (content.get("model_name"), content.get("url")) if isinstance(content, dict) else (None, None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValidationError(
            'The body must be {"model_name": NAME, "url": FOLDER}, NAME of letters, digits and "._~-".'
        )
    if not isinstance(url, str) or not url:
        raise ValidationError("url must be the folder in which the model lies.")
    return name, url


def _reply(answer: OperationAnswer | None, row: dict[str, str]) -> Reply:
    """Answer a success in the contract's form, anything else as the instance does. Raises ServiceUnavailable."""
    if answer is None:
        raise ServiceUnavailable("The instance gave no answer. Try again later.")
    if answer.status == 200:
        return json_reply(200, row)
    return Reply(answer.status, (JSON, (ERROR_CODE, answer.code.encode("latin-1"))), answer.body)


def _busy(name: str) -> ModelBusy:
    return ModelBusy(f"Model {name} is being loaded or unloaded already.")


def _row(name: str, url: str) -> dict[str, str]:
    return {"modelName": name, "modelUrl": url}
