"""POST /v1/responses: a response in the background is queued before its client gets the instance's answer.

An answer that names the response means that the instance has accepted it. The instance generates it when it
receives the queue's request, which may be sent several times. If the queue refuses the request, the client gets the
queue's error, and the proxy closes the session that the response has opened, or deletes the response if it is in a
conversation.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import time
from typing import Any

from torchmoor.async_inference.request import DEFAULT_TTL_S, AsyncRequest, background_request
from torchmoor.async_inference.service import AsyncInference
from torchmoor.errors import ApiError, CallerLimited, ServiceUnavailable, ValidationError
from torchmoor.proxy.api.invocation import Invocation
from torchmoor.proxy.dispatch import unavailable
from torchmoor.proxy.http.answer import Loss
from torchmoor.proxy.http.call import HOLD, PASS_ON, Judgement, NextStep, Outcome
from torchmoor.proxy.http.field_names import BACKGROUND, NEW_SESSION_ID
from torchmoor.proxy.http.message import AnswerHead
from torchmoor.proxy.instances.handler_operations import HandlerOperations
from torchmoor.proxy.instances.instance import Instance
from torchmoor.wire import operations
from torchmoor.wire.response_ids import read_response_id
from torchmoor.wire.session_header import read_expiry
from torchmoor.wire.session_ids import session_hash

# Of one attempt, the longest of AWS's asynchronous requests. Not a setting: the handler has one for the time of an
# answer, handler.engine.turn_timeout_s.
TIMEOUT_S = 3600.0
CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class BackgroundQueue:
    """Where responses in the background are queued. service: None if no endpoint accepts asynchronous requests."""

    service: AsyncInference | None
    operations: HandlerOperations


@dataclass(frozen=True, slots=True)
class Accepted:
    """A response in the background that an instance has accepted. head: the answer's.

    opened: the id and expiry of the session that it has opened; empty if it is in a conversation.
    """

    response_id: str
    head: AnswerHead
    instance: Instance

    @property
    def opened(self) -> bytes:
        return self.head.find(NEW_SESSION_ID) or b""


class ResponseInvocation(Invocation):
    """An Invocation whose answer may be held until the queue has the response that it names.

    If the instance is lost meanwhile, another instance may accept the request. Without the client's invocation id this
    makes another response, and the first one is closed.
    """

    _held: AnswerHead | None = None
    _held_id = ""  # of the response that it names
    _is_queued = False

    def __init__(self, queue: BackgroundQueue, *args: Any, **options: Any) -> None:
        """args, options: an Invocation's."""
        super().__init__(*args, **options)
        self._queue = queue

    def on_answer(self, head: AnswerHead, *, can_replay: bool) -> Judgement:
        """Hold the answer that names a response in the background until that is queued."""
        name = head.find(BACKGROUND)
        if name is None or self._is_queued:
            return super().on_answer(head, can_replay=can_replay)
        accepted = Accepted(name.decode("latin-1"), head, self.assignment.chosen.instance)
        self._held, self._held_id = head, accepted.response_id
        try:
            self._submit(accepted)
        except ApiError as error:  # not yet: the exchange waits for this judgement
            asyncio.get_running_loop().call_soon(self._refuse, error, accepted)
        return HOLD

    def on_lost(self, loss: Loss, *, can_replay: bool) -> NextStep:
        self._held, self._held_id = None, ""
        return super().on_lost(loss, can_replay=can_replay)

    def _submit(self, accepted: Accepted) -> None:
        """Start to queue a response. Raises ApiError."""
        endpoint, service, callers = self.operation.endpoint, self._queue.service, self._dispatchers.callers
        if service is None or endpoint.name not in service.endpoints:
            raise ValidationError(f"'background' needs asynchronous inference, which endpoint {endpoint.name} lacks.")
        principal = self.request.principal
        if accepted.opened:
            self._dispatchers.sessions.on_opened(endpoint, principal, accepted.opened, accepted.instance)
        expires_at = read_expiry(accepted.opened)
        try:
            asked = background_request(
                accepted.response_id,
                endpoint=endpoint.name,
                principal=principal,
                source="" if principal else self.assignment.caller,
                ttl_s=DEFAULT_TTL_S if expires_at is None else min(DEFAULT_TTL_S, max(1.0, expires_at - time())),
                timeout_s=TIMEOUT_S,
            )
        except ValueError as error:
            raise ServiceUnavailable("The instance names no response.") from error

        def on_done(stored: AsyncRequest | ApiError) -> None:
            if isinstance(stored, ApiError):
                self._refuse(stored, accepted)
            else:
                self._pass_on(accepted)

        share = None if callers is None else callers.async_share(self.assignment.caller)
        if not service.try_submit(asked, on_done, share):
            raise ServiceUnavailable(unavailable.TOO_MANY_SUBMITTED)

    def _pass_on(self, accepted: Accepted) -> None:
        if self._held is not accepted.head:  # the client has another answer, or gets one
            if accepted.response_id != self._held_id:
                self._close(accepted)
            return
        self._is_queued = True
        if self._waiter is not None:
            self._waiter.resume(PASS_ON)

    def _refuse(self, error: ApiError, accepted: Accepted) -> None:
        """Answer with the queue's error, and close the session that the instance has opened."""
        if self._held is accepted.head or accepted.response_id != self._held_id:
            self._close(accepted)
        if self._held is not accepted.head:
            return
        self._held = None
        callers = self._dispatchers.callers
        if callers is not None and isinstance(error, CallerLimited):
            callers.num_refused[error.setting] += 1
        if self._waiter is not None:
            self._waiter.resume(self.fail(error))

    def _close(self, accepted: Accepted) -> None:
        """Close the session that an instance has opened for a response, or delete the response in its conversation."""
        place, callers = read_response_id(accepted.response_id), self._dispatchers.callers
        if place is not None:
            body: dict[str, object] = {
                operations.ACTION: operations.CLOSE,
                operations.SESSION: session_hash(place.session_id),
            }
            if not accepted.opened:
                body[operations.ENTRY] = place.number
            elif callers is not None:  # it counts if the client has left; the caller's lease was released with it
                callers.sessions.lost(self.assignment.caller, (self.operation.endpoint.name, place.session_id))
            handlers = self._queue.operations
            if not handlers.tasks.is_full:
                asked = handlers.ask(accepted.instance, operations.SESSIONS, body, timeout_s=CLOSE_TIMEOUT_S)
                handlers.tasks.start(asked)

    def finish(self, outcome: Outcome) -> None:
        if self._held is not None and not self._is_queued:  # the client has left, and its session is open
            self.assignment.note_session(self.operation.endpoint, self._held)
        super().finish(outcome)
