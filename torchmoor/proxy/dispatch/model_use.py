"""The use of one of an endpoint's many models by one request.

Instances are chosen by the models that they hold (torchmoor.proxy.routing.model_placement). ModelUse tells the
placement which instance got a request, and whether the answer shows that this instance has the model.
"""

from __future__ import annotations

from time import monotonic

from torchmoor.errors import ModelNotReady
from torchmoor.metrics.invocations import InvocationMetrics
from torchmoor.proxy.dispatch.dispatcher import Dispatcher
from torchmoor.proxy.http.field_names import ERROR_CODE, MODEL_CACHE, MODEL_LOAD_MS
from torchmoor.proxy.http.message import AnswerHead
from torchmoor.wire import error_codes

_IN_MEMORY = frozenset((b"hit", b"host"))
_NOT_LOADED = frozenset(code.encode() for code in error_codes.MODEL_NOT_LOADED)


class ModelUse:
    """Keeps the bookkeeping of models and the metrics of hits for one request."""

    def __init__(self, dispatcher: Dispatcher, name: str) -> None:
        """name: the model's, as instances know it."""
        models = dispatcher.variant.models
        assert models is not None  # the dialect has checked it
        self.name = name
        self._models = models
        self._metrics: InvocationMetrics = dispatcher.metrics
        self._was_held = False  # whether the chosen instance had the model in memory, as far as the proxy knew
        self._metrics.model_invocations += 1

    def begin(self, instance: str) -> None:
        self._was_held = self._models.is_held(self.name, instance)
        self._models.begin(self.name, instance)

    def end(self, instance: str) -> None:
        self._models.end(self.name, instance)

    def on_answer(self, head: AnswerHead, instance: str, sent_at: float) -> None:
        """Learn from an answer whether the instance has the model."""
        if head.status < 300:
            self._count(head, sent_at)
            self._models.loaded(self.name, instance)
        elif head.find(ERROR_CODE) in _NOT_LOADED:
            self._models.failed(self.name, instance)

    def _count(self, head: AnswerHead, sent_at: float) -> None:
        """Count a hit or the wait for the model: as the handler reports it or, without report, as the proxy saw it."""
        found, load_ms = head.find(MODEL_CACHE), head.find_number(MODEL_LOAD_MS)
        if self._was_held if found is None else found in _IN_MEMORY:
            self._metrics.model_hits += 1
        else:
            waited_s = monotonic() - sent_at if load_ms is None else load_ms / 1000
            self._metrics.model_loading_wait.observe(waited_s)

    def find_timeout_error(self, instance: str) -> ModelNotReady | None:
        """Explain a time-out by the model's loading; None if the instance has the model."""
        if self._models.is_held(self.name, instance):
            return None
        return ModelNotReady(f"Model {self.name} is not ready for inference yet: it is being loaded. Try again later.")
