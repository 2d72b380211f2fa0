"""The service of many models: requests by model name, and the operations of operators and the proxy."""

import logging
import time
from typing import Any

from handlers.counters import MODEL_REQUEST_OUTCOMES, Counters
from handlers.errors import HandlerError, InvalidRequest
from handlers.many.loading.checkpoint import CheckpointLoader
from handlers.many.model import ModelLease
from handlers.many.request import read_body
from handlers.many.residency.registry import ModelRegistry
from handlers.reply import PendingReply
from handlers.requests import Incoming
from torchmoor.wire import headers as wire
from torchmoor.wire import operations
from torchmoor.wire.operations import ACTION, MODEL, MODEL_ACTIONS, URL

logger = logging.getLogger(__name__)

MAX_VALUES = 100  # of the body of an operation


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
                self._manage(read_body(incoming, MAX_VALUES), reply)
            elif operation:
                raise InvalidRequest(f"there is no operation {operation[:40]!r}; there are status, models and cancel")
            else:
                self._ask(incoming, reply)

    def _ask(self, incoming: Incoming, reply: PendingReply) -> None:
        name = incoming.headers.get(wire.TARGET_MODEL)
        if not name:
            raise InvalidRequest("name the model in the header X-Amzn-SageMaker-Target-Model, boto3's TargetModel")
        question = incoming.headers.get(wire.MODEL_QUESTION, "")
        if question not in ("", *operations.MODEL_QUESTIONS):
            raise InvalidRequest(f"{wire.MODEL_QUESTION} must be one of {', '.join(operations.MODEL_QUESTIONS)}")
        request = _ModelRequest(incoming, reply, self.counters)
        cancel = self._registry.acquire(name, request.begin, request.refuse)
        reply.on_cancel(lambda reason: cancel())

    def _manage(self, body: Any, reply: PendingReply) -> None:
        action, name, url = _read_action(body)
        registry = self._registry

        def done(error: HandlerError | None) -> None:
            if error is not None:
                reply.fail(error)
            else:
                self._answer_tier(name, reply)

        if action == operations.LOAD:
            registry.load(name, url, done)
        elif action == operations.UNLOAD:
            registry.unload(name, done)
        elif action == operations.UNPIN:
            registry.unpin(name)
            done(None)
        else:
            start = registry.pin if action == operations.PIN else registry.prewarm
            errors: list[HandlerError] = []

            def note(error: HandlerError | None) -> None:
                if error is not None:
                    logger.warning("model not loaded name=%s reason=%s", name, error.message)
                    errors.append(error)

            start(name, note)
            done(errors[0] if errors else None)  # the status shows later errors

    def _answer_tier(self, name: str, reply: PendingReply) -> None:
        tier = self._tiers().get(name, "source")
        reply.finish_json({MODEL: name, "tier": tier})

    def _tiers(self) -> dict[str, str]:
        return {model["name"]: model["tier"] for model in reversed(self._registry.status()["models"])}

    def status(self) -> dict[str, Any]:
        """Report the worker's models, for the proxy and for operators."""
        return {"instance": self._instance, "device": self._device, **self._registry.status(), **self._requests()}

    def _requests(self) -> dict[str, dict[str, int]]:
        return {"requests": self.counters.get_all(MODEL_REQUEST_OUTCOMES)}

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of the metrics (handlers/metrics.py). Any thread."""
        status = self._registry.status()
        tiers = [model["tier"] for model in status["models"]]
        return {
            "models": {tier: tiers.count(tier) for tier in ("device", "host", "disk", "loading", "broken")},
            "memory": {name: budget["used"] for name, budget in status["budgets"].items()},
            "capacity": {name: budget["max"] for name, budget in status["budgets"].items()},
            "events": status["counters"],
            "waiting": status["waiting"],
            "decoding": self._loader.intake.decoding.describe(),
            **self._requests(),
        }


class _ModelRequest:
    """One request and its lease, which ends with the answer."""

    def __init__(self, incoming: Incoming, reply: PendingReply, counters: Counters) -> None:
        self._incoming = incoming
        self._reply = reply
        self._counters = counters
        self._began = time.monotonic()

    def begin(self, lease: ModelLease) -> None:
        """Pass the request to the model. A thread of the registry or the pump."""
        self._reply.receipts[wire.MODEL_CACHE] = lease.found
        self._reply.receipts[wire.MODEL_LOAD_MS] = str(round(lease.load_s * 1000))
        self._reply.on_end(lambda: self._end(lease))
        name, question = self._incoming.headers[wire.TARGET_MODEL], self._incoming.headers.get(wire.MODEL_QUESTION)
        with self._reply.guarded():
            if question == operations.METADATA:
                self._reply.finish_json({"name": name, **lease.model.metadata})
            elif question == operations.READY:
                self._reply.finish_json({"name": name, "ready": True})
            else:
                lease.model.start(self._incoming, self._reply)

    def refuse(self, error: HandlerError) -> None:
        self._counters.add("refused")
        self._reply.fail(error)

    def _end(self, lease: ModelLease) -> None:
        lease.release()
        status = self._reply.status
        self._counters.add("cancelled" if self._reply.is_cancelled else "answered" if status < 500 else "failed")
        self._counters.observe("latency", time.monotonic() - self._began)


def _read_action(body: Any) -> tuple[str, str, str | None]:
    """Read a models operation: action, name, url. Raises InvalidRequest."""
    if not isinstance(body, dict) or body.keys() - {ACTION, MODEL, URL}:
        raise InvalidRequest("a models operation has 'action', 'model' and perhaps 'url'")
    action, name, url = body.get(ACTION), body.get(MODEL), body.get(URL)
    if action not in MODEL_ACTIONS:
        raise InvalidRequest(f"'action' must be one of {', '.join(MODEL_ACTIONS)}", param=ACTION)
    if not isinstance(name, str) or not name:
        raise InvalidRequest("'model' must name a model", param=MODEL)
    if url is not None and (not isinstance(url, str) or action != operations.LOAD):
        raise InvalidRequest("'url' goes with the action 'load', and is a text", param=URL)
    return action, name, url
