"""What is different about a request for one of many models, whatever its dialect.

Its instance is chosen by what instances hold (torchmoor.proxy.routing.models), which therefore learns what is sent
where and what comes of it; and whether the model was there is counted.
"""

from __future__ import annotations

from time import monotonic
from typing import Any

from torchmoor.errors import ApiError, ModelNotReady
from torchmoor.proxy.api.invocation import ERROR_HEADER, Invocation
from torchmoor.proxy.api.validation import TARGET_MODEL
from torchmoor.proxy.dispatch.choice import Choice
from torchmoor.proxy.http.answer import Answer
from torchmoor.proxy.http.call import Waiting
from torchmoor.proxy.http.message import AnswerHead, Request
from torchmoor.proxy.instances.instance import Instance, Lease
from torchmoor.proxy.instances.registry import Endpoint
from torchmoor.wire import error_codes, headers

CACHE = headers.MODEL_CACHE.encode()  # a handler's receipt: where it had the model when the request came
LOAD_MS = headers.MODEL_LOAD_MS.encode()  # how long the request waited for its model
IN_MEMORY = frozenset((b"hit", b"host"))
NOT_THERE = frozenset(
    code.encode()
    for code in (
        error_codes.MODEL_UNKNOWN,
        error_codes.MODEL_BROKEN,
        error_codes.LOAD_TIMED_OUT,
        error_codes.OUT_OF_MEMORY,
        error_codes.OUT_OF_DISK,
    )
)


class ForTargetModel(Invocation):
    """To be mixed into a dialect's invocation, before it."""

    may_name_session = False
    _was_held = False  # in the chosen instance's memory, as far as we knew

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        models = self.dispatcher.variant.models
        assert models is not None  # checked by the dialect
        self._models = models
        self._model = self.target_model = self.read_target_model()
        self.metrics.model_invocations += 1
        if self._body_check is None:
            self.num_prefix_bytes = 0  # no strategy looks at it

    def read_target_model(self) -> str:
        """Which model is meant: by the header, without which there is no such invocation."""
        name = self.request.find(TARGET_MODEL)
        assert name is not None
        return name.decode("latin-1")

    def _take(self, choice: Choice) -> None:
        name = choice.instance.name
        self._was_held = self._models.is_held(self._model, name)
        self._models.begin(self._model, name)
        super()._take(choice)

    def _release(self, lease: Lease) -> None:
        self._models.end(self._model, lease.instance.name)
        super()._release(lease)

    def on_answer(self, head: AnswerHead, *, can_replay: bool) -> Answer | Instance | Waiting | None:
        """What it says of the model is noted; then as for any request. No room at one instance: another is tried."""
        assert self.choice is not None
        name = self.choice.instance.name
        if head.status < 300:
            self._count(head)
            self._models.loaded(self._model, name)
        elif head.find(ERROR_HEADER) in NOT_THERE:
            self._models.failed(self._model, name)
        return super().on_answer(head, can_replay=can_replay)

    def _count(self, head: AnswerHead) -> None:
        """A hit, or how long it was waited for the model: by the handler's word, else by what we knew and saw."""
        found, load_ms = head.find(CACHE), head.find(LOAD_MS) or b""
        if self._was_held if found is None else found in IN_MEMORY:
            self.metrics.model_hits += 1
        else:
            waited_s = int(load_ms) / 1000 if load_ms.isdigit() else monotonic() - self.sent_at
            self.metrics.model_loading_wait.observe(waited_s)

    def timeout_error(self) -> ApiError:
        """If the model cannot be there yet, that is why there is no answer."""
        assert self.choice is not None
        if self._models.is_held(self._model, self.choice.instance.name):
            return super().timeout_error()
        return ModelNotReady(
            f"Model {self._model} is not ready for inference yet: it is being loaded. Try again later."
        )


def is_for_target_model(request: Request, endpoint: Endpoint) -> bool:
    """True if a request names one of an endpoint's many models."""
    return endpoint.settings.multi_model is not None and TARGET_MODEL in request.layout.places
