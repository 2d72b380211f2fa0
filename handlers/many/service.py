"""The service of many models: requests by model name, and the operations of operators and the proxy."""

import time
from typing import Any, cast

from handlers.errors import HandlerError, InvalidRequest, ResponseUnknown
from handlers.many.loading.checkpoint_loader import CheckpointLoader
from handlers.many.metrics import MANY_METRICS, count_models
from handlers.many.model import AnsweringModel, ModelLease
from handlers.many.operations import manage_models
from handlers.many.residency.registry import ModelRegistry
from handlers.requests.incoming import Incoming
from handlers.requests.reply import PendingReply
from handlers.worker.counters import Counters
from torchmoor.wire import headers as wire
from torchmoor.wire import operations
from torchmoor.wire.response_ids import read_resource_path


class ManyService:
    """Routes requests to models. `start` never raises and never waits."""

    def __init__(self, registry: ModelRegistry, loader: CheckpointLoader, instance: str, device: str) -> None:
        self._registry = registry
        self._loader = loader
        self._instance = instance
        self._device = device
        self.counters = registry.counters

    def stop(self) -> None:
        """Refuse the waiting requests and close every model."""
        self._registry.close()
        self._loader.stop()

    def start(self, incoming: Incoming, reply: PendingReply) -> None:
        """Answer a request through `reply`, errors included."""
        with reply.guarded():
            operation = incoming.headers.get(wire.OPERATION)
            if operation == operations.STATUS:
                reply.finish_json(self.status())
            elif operation == operations.MODELS:
                manage_models(self._registry, incoming, reply)
            elif operation:
                raise InvalidRequest(f"there is no operation {operation[:40]!r}; there are status, models and cancel")
            else:
                self._ask(incoming, reply)

    def _ask(self, incoming: Incoming, reply: PendingReply) -> None:
        name = incoming.headers.get(wire.TARGET_MODEL) or self._find_model(incoming)
        if not name:
            raise InvalidRequest(
                "name the model in the header X-Amzn-SageMaker-Target-Model: boto3's TargetModel, or one of the "
                "extra_headers of OpenAI's client"
            )
        question = incoming.headers.get(wire.MODEL_QUESTION, "")
        if question not in ("", *operations.MODEL_QUESTIONS):
            raise InvalidRequest(f"{wire.MODEL_QUESTION} must be one of {', '.join(operations.MODEL_QUESTIONS)}")
        request = _ModelRequest(name, incoming, reply, self.counters)
        cancel = self._registry.acquire(name, request.begin, request.refuse)
        reply.on_cancel(lambda reason: cancel())

    def _find_model(self, incoming: Incoming) -> str | None:
        """Return the model of the response, conversation or file that the path names; None if it names nothing.

        Raises ResponseUnknown if no model in memory has it: sessions end when their model leaves memory.
        """
        path = incoming.headers.get(wire.RESOURCE, "").partition(" ")[2].partition("?")[0]
        place = read_resource_path(path)
        if place is None:
            return None
        for name, model in self._registry.in_memory().items():
            if cast(AnsweringModel, model).holds(place.session_id):
                return name
        raise ResponseUnknown(
            "No model in memory has this id: it has expired or was deleted, or its model has left memory.",
            api_code="not_found",
        )

    def status(self) -> dict[str, Any]:
        """Report the worker's models, for the proxy and for operators."""
        requests = self.counters.read(MANY_METRICS)["requests"]
        return {
            "instance": self._instance,
            "device": self._device,
            **self._registry.status(),
            "requests": requests,
        }

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of the metrics. Any thread."""
        return count_models(self.counters, self._registry.status(), self._loader.intake.decoding)


class _ModelRequest:
    """One request and its lease, which ends with the answer."""

    def __init__(self, name: str, incoming: Incoming, reply: PendingReply, counters: Counters) -> None:
        self._name = name
        self._incoming = incoming
        self._reply = reply
        self._counters = counters
        self._began = time.monotonic()

    def begin(self, lease: ModelLease) -> None:
        """Pass the request to the model. A thread of the registry or the pump."""
        self._reply.receipts[wire.MODEL_CACHE] = lease.found
        self._reply.receipts[wire.MODEL_LOAD_MS] = str(round(lease.load_s * 1000))
        self._reply.on_end(lambda: self._end(lease))
        name, question = self._name, self._incoming.headers.get(wire.MODEL_QUESTION)
        model = cast(AnsweringModel, lease.model)  # `CheckpointLoader` loads no others
        version = self._incoming.headers.get(wire.MODEL_VERSION)
        with self._reply.guarded():
            if version is not None and version not in (versions := model.metadata["versions"]):
                message = f"the model has no version {version[:20]!r}; it has: {', '.join(versions)}"
                raise InvalidRequest(message)
            if question == operations.METADATA:
                self._reply.finish_json({"name": name, **model.metadata})
            elif question == operations.READY:
                self._reply.finish_json({"name": name, "ready": True})
            else:
                model.start(self._incoming, self._reply)

    def refuse(self, error: HandlerError) -> None:
        self._counters.add("requests_refused")
        self._reply.fail(error)

    def _end(self, lease: ModelLease) -> None:
        lease.release()
        status = self._reply.status
        outcome = "cancelled" if self._reply.is_cancelled else "answered" if status < 500 else "failed"
        self._counters.add(f"requests_{outcome}")
        self._counters.observe("latency", time.monotonic() - self._began)
