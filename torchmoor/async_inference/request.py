"""Records of an asynchronous request, from its submission until the queue forgets it. No I/O.

    WAITING --claim--> RUNNING --decide--> DECIDED --finish--> COMPLETED | FAILED | CANCELLED | EXPIRED
       ^                  |                   ^
       `------retry-------'                   `-- cancel, or its time to live has passed (from WAITING)
                                                  cancel, or the same and a lapsed lease (from RUNNING)

The outcome is fixed once, when the request becomes DECIDED. What follows (publish objects, send notifications) may be
done by any worker, and more than once. So a request never has both a result and a failure, nor two different results.
Two changes are allowed before the end: a failure replaces a result that can never be published, and a staged result is
marked as published.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from torchmoor.errors import QUEUE_RETRY_S, CallerLimited
from torchmoor.wire import background, headers
from torchmoor.wire.response_ids import read_response_id
from torchmoor.wire.session_ids import session_hash

# SageMaker's defaults of InvokeEndpointAsync
DEFAULT_TTL_S = 21_600.0
DEFAULT_TIMEOUT_S = 900.0


class AsyncState(StrEnum):
    """State of a request."""

    WAITING = "WAITING"  # waits for a worker, or for the time of its next attempt
    RUNNING = "RUNNING"  # leased by a worker; the lease may have lapsed
    DECIDED = "DECIDED"  # its outcome is fixed, but not yet published
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"  # its time to live passed before an attempt succeeded

    @property
    def is_end(self) -> bool:
        """Return whether nothing is left to do."""
        return self in ENDS


ENDS = (AsyncState.COMPLETED, AsyncState.FAILED, AsyncState.CANCELLED, AsyncState.EXPIRED)


@dataclass(frozen=True, slots=True)
class CallerShare:
    """Limits of one caller's pending requests, over all endpoints: their number, and bytes of their inline bodies."""

    caller: str
    max_requests: int
    max_bytes: int

    def check(self, num_requests: int, num_bytes: int, body_bytes: int) -> None:
        """Raise CallerLimited if one more request, with body_bytes, exceeds a limit beside the pending ones."""
        if num_requests >= self.max_requests:
            raise CallerLimited(
                f"{num_requests} asynchronous requests pending",
                "max_async_requests",
                self.max_requests,
                retry_after_s=QUEUE_RETRY_S,
            )
        if num_bytes + body_bytes > self.max_bytes:
            raise CallerLimited(
                f"{num_bytes + body_bytes} bytes in pending asynchronous requests, this one included",
                "max_async_bytes",
                self.max_bytes,
                retry_after_s=QUEUE_RETRY_S,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncRequest:
    """One valid InvokeEndpointAsync. Its input is either an object (`input_location`) or inline (`body`)."""

    inference_id: str
    endpoint: str
    output_location: str  # URL of the result object
    failure_location: str  # URL of the failure object
    principal: str = ""  # hash of the caller; "": the proxy requires no credentials
    invocation_id: str = ""  # amz-sdk-invocation-id, the same in a client's retries; "": not sent
    content_type: str = ""
    accept: str = ""
    custom_attributes: str = ""
    input_location: str | None = None  # URL
    body: bytes | None = field(default=None, repr=False)
    ttl_s: float = DEFAULT_TTL_S  # RequestTTLSeconds
    timeout_s: float = DEFAULT_TIMEOUT_S  # InvocationTimeoutSeconds
    response_id: str = ""  # of a response in the background, which an instance has; its locations name no objects
    source: str = ""  # the address of a caller without a principal, where callers are limited
    received_at: float = 0.0  # epoch seconds; the queue sets it on submit

    def __post_init__(self) -> None:
        if (self.input_location is None) == (self.body is None):
            raise ValueError("a request has either input_location or body")

    @property
    def session_id(self) -> str:
        """Return the id of the session that the request belongs to; "" if any instance can run it."""
        place = read_response_id(self.response_id)
        return "" if place is None else place.session_id

    @property
    def sent_fields(self) -> dict[str, str]:
        """Return the header fields of every attempt; an empty one is not sent."""
        return {
            "Accept": self.accept,
            headers.CUSTOM_ATTRIBUTES: self.custom_attributes,
            headers.INFERENCE_ID: self.inference_id,
            headers.ENDPOINT: self.endpoint,
            headers.TIMEOUT_MS: str(int((self.timeout_s + headers.TIMEOUT_GRACE_S) * 1000)),
            headers.PRINCIPAL: self.principal,
            headers.SOURCE: self.source,
            headers.RESOURCE: background.run_resource(self.response_id) if self.response_id else "",
            # The same in every attempt, so that a handler does not repeat what it recorded in an earlier one.
            "Amz-Sdk-Invocation-Id": f"async-{self.inference_id}",
        }

    @property
    def expires_at(self) -> float:
        """Return the time after which no attempt begins."""
        return self.received_at + self.ttl_s

    @property
    def identity(self) -> str:
        """Return a name that no other request shares, even a later one with the same inference id."""
        named = json.dumps([self.endpoint, self.inference_id, self.received_at])
        return hashlib.sha256(named.encode()).hexdigest()[:32]

    @property
    def locations(self) -> tuple[str, str]:
        """Return the URLs that are reserved for the request until it ends."""
        return self.output_location, self.failure_location

    @property
    def invocation_key(self) -> str | None:
        """Return a key that only the retries of one client call share; None without an invocation id."""
        if not self.invocation_id:
            return None
        parts = json.dumps([self.endpoint, self.principal, self.invocation_id])
        return hashlib.sha256(parts.encode()).hexdigest()

    def stamped(self, received_at: float) -> AsyncRequest:
        """Return the request with the time at which the queue received it."""
        return replace(self, received_at=received_at)

    def to_json(self) -> str:
        """Serialize everything but the body, which is stored as bytes."""
        return _to_json(self)

    @classmethod
    def from_json(cls, text: str | bytes, body: bytes | None) -> AsyncRequest:
        """Restore a request. body: of an inline input; None, if it is left out or deleted, becomes b""."""
        values = _from_json(cls, text)
        return cls(**values, body=(body or b"") if values["input_location"] is None else None)


def background_request(
    response_id: str, *, endpoint: str, principal: str, source: str, ttl_s: float, timeout_s: float
) -> AsyncRequest:
    """Make the request that has an instance generate a response in the background, which it keeps itself."""
    place = read_response_id(response_id)
    if place is None:
        raise ValueError("not the id of a response")
    name = f"response-{session_hash(place.session_id)}-{place.number}"  # the id itself is a credential
    return AsyncRequest(
        inference_id=name,
        endpoint=endpoint,
        output_location=f"response:{name}",
        failure_location=f"response:{name}-error",
        principal=principal,
        invocation_id=name,  # so that a client's retry finds the request
        content_type="application/json",
        body=b"{}",
        ttl_s=ttl_s,
        timeout_s=timeout_s,
        response_id=response_id,
        source=source,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncOutcome:
    """Outcome of a request. A result is staged in the object store, or is small and held in `body`."""

    state: AsyncState  # COMPLETED, FAILED, CANCELLED or EXPIRED
    content_type: str = ""
    custom_attributes: str = ""
    staged: str | None = None  # URL of the staged object, also of a result that a failure has replaced
    staged_tag: str = ""  # its identity, which its published object keeps
    body: bytes | None = field(default=None, repr=False)
    reason: str = ""  # for the client, unless COMPLETED
    error_code: str = ""  # the handler's, if it has refused the request of a response in the background
    is_published: bool = False  # the staged object has its name, and receivers are notified

    def __post_init__(self) -> None:
        if not self.state.is_end:
            raise ValueError(f"a request cannot end as {self.state.value}")

    @property
    def succeeded(self) -> bool:
        """Return whether there is a result, rather than a failure."""
        return self.state is AsyncState.COMPLETED

    def to_json(self) -> str:
        """Serialize everything but the body."""
        return _to_json(self)

    @classmethod
    def from_json(cls, text: str | bytes, body: bytes | None) -> AsyncOutcome:
        """Restore an outcome with its body."""
        values = _from_json(cls, text)
        return cls(**values | {"state": AsyncState(values["state"])}, body=body)


CANCELLED = AsyncOutcome(state=AsyncState.CANCELLED, reason="The request was cancelled.")
EXPIRED = AsyncOutcome(
    state=AsyncState.EXPIRED, reason="The request was not done within its time to live (RequestTTLSeconds)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One worker's claim of a request."""

    request: AsyncRequest
    attempt: int  # from 1; 0 if the request was decided before any
    token: str = field(repr=False)  # of this claim alone; the next claim makes it void
    decided: AsyncOutcome | None = None  # if set, only publication is left

    @classmethod
    def restore(cls, token: str, row: Sequence[Any]) -> Claim:
        """Make a claim from what a queue stores: request, its body, attempts, outcome, the outcome's body."""
        request, body, attempts, settled, output = row
        decided = None if settled is None else AsyncOutcome.from_json(settled, output)
        return cls(request=AsyncRequest.from_json(request, body), attempt=int(attempts), token=token, decided=decided)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncRecord:
    """A request and its progress, for display. Bodies are left out."""

    request: AsyncRequest  # an inline body is b""
    arrival: int  # its place in the order of arrival, of all endpoints
    state: AsyncState
    attempts: int  # begun
    due_at: float | None  # when a WAITING request may be claimed; None: now
    updated_at: float  # epoch seconds
    reason: str = ""  # why the last attempt failed, or of the outcome
    instance: str = ""  # where it runs, or ran last
    outcome: AsyncOutcome | None = None  # once decided

    @classmethod
    def restore(cls, row: Sequence[Any]) -> AsyncRecord:
        """Make a record from what a queue stores, as text and numbers or as Redis' bytes.

        row: seq, request, state, attempts, wake_at, updated_at, reason, instance, outcome.
        """
        arrival, request, state, attempts, wake_at, updated_at, reason, instance, settled = row
        state = AsyncState(_text(state))
        return cls(
            request=AsyncRequest.from_json(request, None),
            arrival=int(arrival),
            state=state,
            attempts=int(attempts),
            due_at=float(wake_at) if wake_at is not None and state is AsyncState.WAITING else None,
            updated_at=float(updated_at),
            reason=_text(reason),
            instance=_text(instance),
            outcome=None if settled is None else AsyncOutcome.from_json(settled, None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Backlog of an endpoint. `waiting + running` is SageMaker's ApproximateBacklogSize."""

    waiting: int = 0
    running: int = 0
    decided: int = 0  # answered, but not yet published
    oldest_age_s: float = 0.0  # of the waiting and running, by the queue's clock; 0.0: there is none

    @classmethod
    def of(cls, counts: Mapping[AsyncState, int], oldest_received_at: float | None, now: float) -> Backlog:
        """Make a backlog from the number of requests in each state."""
        return cls(
            waiting=counts.get(AsyncState.WAITING, 0),
            running=counts.get(AsyncState.RUNNING, 0),
            decided=counts.get(AsyncState.DECIDED, 0),
            oldest_age_s=0.0 if oldest_received_at is None else max(0.0, now - oldest_received_at),
        )


def _text(stored: str | bytes | None) -> str:
    return stored.decode() if isinstance(stored, bytes) else stored or ""


def _to_json(record: Any) -> str:
    values = {item.name: getattr(record, item.name) for item in fields(record) if item.name != "body"}
    return json.dumps(values, separators=(",", ":"))


def _from_json(kind: type, text: str | bytes) -> dict[str, Any]:
    """Return a record's fields. Those of a later version, whose proxies may share the queue, are left out."""
    known = {item.name for item in fields(kind)}
    return {name: value for name, value in json.loads(text).items() if name in known}
