"""The data plane's Application: finds the dialect of a request by its path and method."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from torchmoor.async_inference.service import AsyncInference
from torchmoor.errors import ApiError, InternalFailure, ValidationError
from torchmoor.proxy.access.cors import Cors
from torchmoor.proxy.access.gate import Gate, body_too_large
from torchmoor.proxy.access.web_pages import WebPageGuard
from torchmoor.proxy.api import container, tgi
from torchmoor.proxy.api.chat_page.page import ChatPage
from torchmoor.proxy.api.container import ContainerApi
from torchmoor.proxy.api.container_models import ContainerModelsApi
from torchmoor.proxy.api.control_operation import AnswerControl, ControlApi
from torchmoor.proxy.api.deferred_reply import DeferredReply
from torchmoor.proxy.api.metrics_operation import MetricsApi
from torchmoor.proxy.api.open_inference import OpenInferenceApi
from torchmoor.proxy.api.openai import OpenAIApi
from torchmoor.proxy.api.openai_dialects import is_openai, openai_error
from torchmoor.proxy.api.other_services import refuse_unknown
from torchmoor.proxy.api.reference.document import find_handler as find_reference
from torchmoor.proxy.api.replies import LOOKING, Handler, refusal, runtime_error
from torchmoor.proxy.api.response_invocation import BackgroundQueue
from torchmoor.proxy.api.response_socket import ResponseSockets
from torchmoor.proxy.api.runtime import RuntimeApi
from torchmoor.proxy.api.runtime_members import make_note
from torchmoor.proxy.api.tgi import TgiApi
from torchmoor.proxy.api.torchserve import TorchServeApi
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http.call import Call, Upgrade
from torchmoor.proxy.http.message import Reply, Request
from torchmoor.proxy.instances.handler_operations import HandlerOperations

logger = logging.getLogger(__name__)

Decision = TypeVar("Decision")


class DataPlaneApplication:
    """All dialects on one port, behind one gate."""

    def __init__(
        self,
        dispatchers: Dispatchers,
        operations: HandlerOperations,
        control: AnswerControl,
        gate: Gate | None,
        async_inference: AsyncInference | None,
    ) -> None:
        """gate: None admits every caller. async_inference: None if no endpoint has it."""
        self._dispatchers = dispatchers
        self._gate = gate
        self._openai = OpenAIApi(dispatchers, BackgroundQueue(async_inference, operations))
        self.runtime = RuntimeApi(dispatchers, async_inference)
        self.metrics: MetricsApi | None = None  # set before the first request, if this port shows the metrics
        settings = dispatchers.settings
        page = ChatPage(dispatchers.registry, settings) if settings.chat_page.is_on else None
        # Load balancers have no credentials, and a browser has none until it shows the page that asks for them.
        self._open_paths = frozenset(
            (
                container.PING,
                tgi.HEALTH,
                *(() if page is None else page.open_paths),
                *OpenInferenceApi.open_paths,
            )
        )
        listen = settings.listen
        self.pages = WebPageGuard(listen.host, listen.allowed_hosts, listen.allowed_origins)
        self._cors = Cors(listen.allowed_origins)
        container_api = ContainerApi(dispatchers)
        tgi_api = TgiApi(dispatchers, container_api)
        own_pages = WebPageGuard(listen.host, listen.allowed_hosts)
        self._finders: list[Callable[[bytes, bytes], Handler | None]] = [
            self._openai.find_handler,
            self.runtime.find_handler,
            TorchServeApi(dispatchers).find_handler,
            container_api.find_handler,
            tgi_api.find_handler,
            lambda method, path: None if self.metrics is None else self.metrics.find_handler(method, path),
            ControlApi(dispatchers, control, own_pages, tgi_api.answer_root, is_guarded=gate is not None).find_handler,
            OpenInferenceApi(dispatchers).find_handler,
            find_reference,
        ]
        if settings.container.serves_models:
            self._finders.append(ContainerModelsApi(dispatchers, operations).find_handler)
        if page is not None:
            self._finders.append(page.find_handler)

    @property
    def sockets(self) -> ResponseSockets:
        return self._openai.sockets

    note = staticmethod(make_note)

    def find_handler(self, method: bytes, path: bytes) -> Handler:
        """Return the handler of the first API that has one for this method and path."""
        for find in self._finders:
            handler = find(method, path)
            if handler is not None:
                return handler
        return refuse_unknown

    def handle(self, request: Request) -> Call | Reply:
        """Admit a request, and pass it to its dialect."""
        return self._answer(request, self._decide)

    def upgrade(self, request: Request) -> Upgrade | Reply:
        """Open a WebSocket connection for a request that is admitted like every other."""
        return self._answer(request, self._open)

    def _answer(self, request: Request, decide: Callable[[Request, bytes], Decision]) -> Decision | Reply:
        """Return what `decide` does with the request and its id, or the reply to what it raises.

        An unexpected exception becomes a 500 with the request's id and no details.
        """
        request_id = self._dispatchers.new_request_id()
        request.answer_lines = self._cors.answer_lines(request)
        decision: Decision | Reply
        try:
            decision = decide(request, request_id)
        except ApiError as refused:  # by a guard or the gate
            decision = self._find_renderer(request)(refused, request_id)
        except Exception:
            logger.exception("fault request_id=%s", request_id.decode())
            fault = InternalFailure(f"The proxy failed. Request id {request_id.decode()}.")
            decision = self._find_renderer(request)(fault, request_id)
        if isinstance(decision, Reply):
            self._dispatchers.observe_reply(request, request_id, decision)
        return decision

    def _decide(self, request: Request, request_id: bytes) -> Call | Reply:
        """Pass a request to its dialect. Raises ApiError."""
        self._admit(request)
        if self._cors.is_preflight(request):
            return self._cors.answer_preflight(request)
        decision: Call | Reply = request.line.handler(request, request_id)
        if request.body_check is not None and isinstance(decision, Reply):
            return self._after_verification(request, request_id, decision, request.body_check.max_body_bytes)
        return decision

    def _open(self, request: Request, request_id: bytes) -> Upgrade:
        """Open a WebSocket connection. Raises ApiError."""
        self._admit(request)
        if not is_openai(request.path):
            raise ValidationError("Upgrade is not supported.")
        opened = self._openai.upgrade(request, lambda message: self._answer(message, self._decide_again))
        self._dispatchers.observe_reply(request, request_id, Reply(101))
        return opened

    def _decide_again(self, request: Request, request_id: bytes) -> Call | Reply:
        """Pass the request of a WebSocket connection's message to its dialect. Raises ApiError."""
        if self._gate is not None:
            self._gate.admit_again(request)
        return self._openai.handle(request, request_id)

    def _admit(self, request: Request) -> None:
        """Check where a request comes from and its credentials. Raises ApiError."""
        is_open = self._cors.is_preflight(request) or (request.method in LOOKING and request.path in self._open_paths)
        if self.pages.is_on:
            self.pages.check(request, is_open=is_open)
        if self._gate is not None and not is_open:
            self._gate.admit(request)

    def _after_verification(self, request: Request, request_id: bytes, reply: Reply, max_body_bytes: int) -> Call:
        """Keep a reply to a signed request until its body has arrived and matches the signature."""
        return DeferredReply(
            self._dispatchers,
            request,
            request_id,
            lambda deferred, body: deferred.end(reply),
            self._find_renderer(request),
            too_large=body_too_large(request, max_body_bytes),
            max_body_bytes=max_body_bytes,
        )

    def _find_renderer(self, request: Request) -> Callable[[ApiError, bytes], Reply]:
        """Return what renders an error that arises outside the dialects: in the form of the path's dialect."""
        return openai_error if is_openai(request.path) else runtime_error

    def refuse(self, status: int, message: str) -> Reply:
        return refusal(status, message, self._dispatchers.new_request_id())
