"""One forwarded request, whatever its dialect: where it goes, when it goes elsewhere, and what is counted of it.

A dialect says how an answer and an error look; this class says which instance and how often. It holds one lease of
the chosen instance from `route` to `finish`.
"""

from __future__ import annotations

import json
import logging
from time import monotonic

from torchmoor.api.gateway import Choice, Gateway
from torchmoor.api.validation import MEMBERS
from torchmoor.errors import ApiError, ModelError, ServiceUnavailable, ValidationError
from torchmoor.fleet.instance import Instance, Lease
from torchmoor.fleet.registry import Endpoint
from torchmoor.http.call import Answer, Deadlines, Loss, Outcome
from torchmoor.http.message import Headers, Reply, Request
from torchmoor.routing.sessions import SessionId

access_log = logging.getLogger("torchmoor.access")

ERROR_HEADER = b"x-torchmoor-error"
INVOCATION_ID = b"amz-sdk-invocation-id"  # the same when a client sends a request again
REFUSED_FOR_NOW = frozenset((b"Overloaded", b"OutOfMemory", b"JournalUnavailable"))
TORCHSERVE_BUSY = frozenset((503, 507))  # queue full or no worker; worker died
# An instance gets this much longer than the client: who waited too long is told so by the proxy, in the API's words.
TIMEOUT_GRACE_S = 1.0
MAX_RESETS = 1  # second attempts after a connection ended with the request perhaps begun

# Never sent on: credentials, what the proxy writes itself, what it owns.
PRIVATE_FIELDS = frozenset(
    (b"authorization", b"cookie", b"x-amz-security-token", b"x-amzn-sagemaker-inference-id", b"content-length")
)
OWN_PREFIX = b"x-torchmoor-"
PASSED_FIELDS = frozenset(MEMBERS) - PRIVATE_FIELDS  # the usual ones, so that they need no further look

TIMED_OUT = (
    "Your invocation timed out while waiting for a response from container primary. "
    "Review the latency metrics for each container in Amazon CloudWatch, resolve the issue, and try again."
)


class Invocation:
    """A Call (see torchmoor.http.call) with everything but the dialect's own words."""

    __slots__ = (
        "gateway",
        "endpoint",
        "request",
        "request_id",
        "session",
        "metrics",
        "max_body_bytes",
        "deadlines",
        "choice",
        "status",
        "_path",
        "_fields",
        "_lease",
        "_excluded",
        "_num_resets",
        "_sent_at",
    )

    def __init__(
        self,
        gateway: Gateway,
        endpoint: Endpoint,
        request: Request,
        *,
        request_id: bytes,
        session: SessionId | None,
        inference_id: bytes | None,
        path: bytes,
        fields: Headers,
        deadlines: Deadlines,
        max_body_bytes: int,
    ) -> None:
        self.gateway = gateway
        self.endpoint = endpoint
        self.request = request
        self.request_id = request_id
        self.session = session
        self.metrics = gateway.metrics[endpoint.name]
        self.max_body_bytes = max_body_bytes
        self.deadlines = deadlines
        self.choice: Choice | None = None
        self.status = 0  # that the client was told
        self._path = path
        self._lease: Lease | None = None
        self._excluded: frozenset[str] = frozenset()
        self._num_resets = 0
        self._sent_at = 0.0
        lines = [
            b"%b: %b\r\n" % field
            for field in fields
            if field[0] in PASSED_FIELDS or not (field[0] in PRIVATE_FIELDS or field[0].startswith(OWN_PREFIX))
        ]
        lines.append(
            b"x-torchmoor-endpoint: %b\r\nx-torchmoor-request-id: %b\r\nx-amzn-sagemaker-inference-id: %b\r\n"
            % (endpoint.name.encode(), request_id, inference_id or request_id)
        )
        if find_field(fields, INVOCATION_ID) is None:
            lines.append(b"amz-sdk-invocation-id: %b\r\n" % request_id)
        self._fields = b"".join(lines)
        self.metrics.invocations += 1

    # The dialect's part

    def error(self, error: ApiError) -> Reply:
        """The error in the dialect's form."""
        raise NotImplementedError

    def answer(self, status: int, reason: bytes, headers: Headers) -> Answer | None:
        """The answer as the client gets it; None to read its body and call on_refusal."""
        raise NotImplementedError

    def on_refusal(self, body: bytes) -> Reply:
        """The answer for a body that was asked for."""
        raise NotImplementedError

    # Call

    def route(self) -> Instance | Reply:
        """Choose and lease an instance."""
        try:
            choice = self.gateway.choose(self.endpoint, self.session, self._excluded)
        except ApiError as error:
            return self.fail(error)
        self._take(choice)
        return choice.instance

    def request_head(self, framing: bytes, time_left_s: float) -> bytes:
        """The request as the chosen instance gets it."""
        assert self.choice is not None
        self._sent_at = monotonic()
        return b"%b %b HTTP/1.1\r\n%b%b%bx-torchmoor-timeout-ms: %d\r\n\r\n" % (
            self.request.method,
            self._path,
            self.choice.request_line,
            framing,
            self._fields,
            max(0.0, time_left_s + TIMEOUT_GRACE_S) * 1000,
        )

    def on_abandoned(self) -> None:
        """The instance shall stop; a closed connection alone does not tell it before it has something to say."""
        assert self.choice is not None
        path = self._path.partition(b"?")[0]
        self.gateway.cancellations.cancel(self.choice.instance, path, self.request_id)

    def on_answer(self, status: int, reason: bytes, headers: Headers, *, can_replay: bool) -> Answer | Instance | None:
        """Pass the answer on, or go elsewhere if the instance could not take the request.

        A session's turn leaves its instance only if that has no worker, not because the instance is busy.
        """
        if status >= 400 and can_replay:
            code = find_field(headers, ERROR_HEADER)
            is_without_worker = code is None and status in TORCHSERVE_BUSY
            if (is_without_worker and self._is_repeatable) or (code in REFUSED_FOR_NOW and self.session is None):
                other = self._find_other()
                if other is not None:
                    return other
        answer = self.answer(status, reason, headers)
        if answer is not None:
            self.status = status
        return answer

    def on_lost(self, loss: Loss, *, can_replay: bool) -> Instance | Reply:
        """Go elsewhere if that cannot do the work twice, else say what happened."""
        assert self.choice is not None
        instance = self.choice.instance
        if loss is Loss.TIMEOUT:
            return self.fail(self.timeout_error())
        if loss is Loss.UNREACHABLE:
            # A reset says nothing of the instance: it may be one worker, or one request. A process that is gone
            # refuses the next connection.
            self.gateway.report_unreachable(instance)
        is_safe = loss is Loss.UNREACHABLE or (self._is_repeatable and self._num_resets < MAX_RESETS)
        if loss is Loss.RESET:
            self._num_resets += 1
        if can_replay and is_safe:
            other = self._find_other()
            if other is not None:
                return other
        return self.fail(ServiceUnavailable("The instance that was to answer is gone. Try again later."))

    def on_body_too_large(self) -> Reply:
        """The body is longer than the dialect allows."""
        return self.fail(body_too_large(self.max_body_bytes))

    def on_first_piece(self) -> None:
        """The answer's body begins."""

    def finish(self, outcome: Outcome) -> None:
        """Give the lease back and count."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        now = monotonic()
        metrics = self.metrics
        if self._sent_at:
            total = now - self.request.received_at
            model = now - self._sent_at
            metrics.model_latency.observe(model)
            metrics.overhead_latency.observe(total - model)
        if self.status >= 400:
            metrics.count_status(self.status)
        if outcome is Outcome.BROKEN:
            metrics.mid_stream_errors += 1
        if access_log.isEnabledFor(logging.DEBUG):
            self._log(outcome, now)

    # Parts of the above

    @property
    def _is_repeatable(self) -> bool:
        """True if sending the request a second time, elsewhere, cannot do its work twice.

        A turn is recorded under its invocation id, so an instance that shares the journal answers from there.
        """
        return self.session is None or self.gateway.settings.sessions.are_journaled

    def fail(self, error: ApiError) -> Reply:
        """The error's reply, counted."""
        self.status = error.status
        if isinstance(error, ModelError):
            self.metrics.model_errors += 1
        return self.error(error)

    def timeout_error(self) -> ApiError:
        """What a client is told whose model did not answer in time."""
        return ModelError(
            f'Received server error (0) from primary with message "{TIMED_OUT}"',
            original_status=0,
            original_message=TIMED_OUT,
        )

    def _take(self, choice: Choice) -> None:
        if self._lease is not None:
            self._lease.release()
        self.choice = choice
        self._lease = choice.instance.lease()

    def _find_other(self) -> Instance | None:
        """Lease another instance instead of the chosen one; None if there is none, and then nothing changes."""
        assert self.choice is not None
        excluded = self._excluded | {self.choice.instance.name}
        try:
            choice = self.gateway.choose(self.endpoint, self.session, excluded)
        except ServiceUnavailable:
            return None
        self._excluded = excluded
        self._take(choice if self.session is not None else self.gateway.choice_of(choice.instance, "retry"))
        return choice.instance

    def _log(self, outcome: Outcome, now: float) -> None:
        choice = self.choice
        record = {
            "request_id": self.request_id.decode(),
            "endpoint": self.endpoint.name,
            "method": self.request.method.decode(),
            "path": self.request.path.decode("latin-1"),
            "instance": None if choice is None else choice.instance.name,
            "routing_reason": None if choice is None else choice.reason,
            "status": self.status,
            "outcome": outcome.value,
            "duration_ms": round((now - self.request.received_at) * 1000, 3),
        }
        access_log.debug("%s", json.dumps(record))


def find_field(headers: Headers, name: bytes) -> bytes | None:
    """The first value of a field."""
    for field, value in headers:
        if field == name:
            return value
    return None


def body_too_large(limit: int) -> ValidationError:
    """The refusal of a body above a limit."""
    return ValidationError(f"The request body is longer than the limit of {limit} bytes.")
