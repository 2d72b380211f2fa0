"""What is kept of an asynchronous request, from its submission until it is forgotten. Records only: no I/O.

    WAITING --claim--> RUNNING --decide--> DECIDED --finish--> COMPLETED | FAILED | CANCELLED | EXPIRED
       ^                  |                   ^
       `------retry-------'                   `-- cancel, or its time to live has passed (from WAITING)
                                                  cancel, or that and a lapsed lease    (from RUNNING)

How a request ends is settled once, when it becomes DECIDED; what follows (objects published, notices sent) may be done
by any worker and more than once. So a request never has both a result and a failure, nor two different results.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any


class AsyncState(StrEnum):
    """Where a request is."""

    WAITING = "WAITING"  # for a worker, or for the time of its next attempt
    RUNNING = "RUNNING"  # a worker has a lease of it, which may have lapsed
    DECIDED = "DECIDED"  # how it ends is settled, but not yet published and noticed
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"  # its time to live passed before an attempt ended well

    @property
    def is_end(self) -> bool:
        """True if nothing is left to do."""
        return self in ENDS


ENDS = (AsyncState.COMPLETED, AsyncState.FAILED, AsyncState.CANCELLED, AsyncState.EXPIRED)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncRequest:
    """One InvokeEndpointAsync, checked. Its input is an object (`input_location`) or inline (`body`), never both."""

    inference_id: str
    endpoint: str
    output_location: str  # URL of the result object
    failure_location: str  # URL of the failure object
    principal: str = ""  # hash of whoever sent it; "": credentials are not asked for
    invocation_id: str = ""  # amz-sdk-invocation-id: the same in a client's retries; "": it sent none
    content_type: str = ""
    accept: str = ""
    custom_attributes: str = ""
    input_location: str | None = None  # URL
    body: bytes | None = field(default=None, repr=False)
    ttl_s: float = 21_600.0  # RequestTTLSeconds
    timeout_s: float = 900.0  # InvocationTimeoutSeconds
    received_at: float = 0.0  # epoch seconds by the queue's clock, which stamps it: what a submitter gives is ignored

    def __post_init__(self) -> None:
        if (self.input_location is None) == (self.body is None):
            raise ValueError("a request has either input_location or body")

    @property
    def expires_at(self) -> float:
        """When it is too late to begin another attempt."""
        return self.received_at + self.ttl_s

    @property
    def invocation_key(self) -> str | None:
        """The same for all retries of one call of a client, and for nothing else; None: nothing tells."""
        if not self.invocation_id:
            return None
        parts = json.dumps([self.endpoint, self.principal, self.invocation_id])
        return hashlib.sha256(parts.encode()).hexdigest()

    def stamped(self, received_at: float) -> AsyncRequest:
        """As it is stored."""
        return replace(self, received_at=received_at)

    def to_json(self) -> str:
        """All of it but the body, which goes into a store as the bytes that it is."""
        return _to_json(self)

    @classmethod
    def from_json(cls, text: str | bytes, body: bytes | None) -> AsyncRequest:
        """What `to_json` wrote, with its body; b"" for an inline one that is left out or gone."""
        values = json.loads(text)
        return cls(**values, body=(body or b"") if values["input_location"] is None else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncOutcome:
    """How a request ends. A result is staged in the object store, or small and here as `body`."""

    state: AsyncState  # COMPLETED, FAILED, CANCELLED or EXPIRED
    content_type: str = ""
    custom_attributes: str = ""
    staged: str | None = None  # URL of the staged object
    body: bytes | None = field(default=None, repr=False)
    reason: str = ""  # of anything but COMPLETED, in words for the client

    def __post_init__(self) -> None:
        if not self.state.is_end:
            raise ValueError(f"no request ends as {self.state.value}")

    @property
    def succeeded(self) -> bool:
        """True if there is a result, False if there is a failure."""
        return self.state is AsyncState.COMPLETED

    def to_json(self) -> str:
        """All of it but the body."""
        return _to_json(self)

    @classmethod
    def from_json(cls, text: str | bytes, body: bytes | None) -> AsyncOutcome:
        """What `to_json` wrote, with its body."""
        values = json.loads(text)
        return cls(**values | {"state": AsyncState(values["state"])}, body=body)


CANCELLED = AsyncOutcome(state=AsyncState.CANCELLED, reason="The request was cancelled.")
EXPIRED = AsyncOutcome(
    state=AsyncState.EXPIRED, reason="The request was not done within its time to live (RequestTTLSeconds)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One worker's hold of a request."""

    request: AsyncRequest
    attempt: int  # from 1; 0 if it was decided before any
    token: str = field(repr=False)  # of this hold alone: whoever claims it after us makes ours worthless
    decided: AsyncOutcome | None = None  # how it ends is settled: publish, notify and finish, nothing else


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncRecord:
    """A request and what became of it so far, to be shown. Bodies are left out, and None."""

    request: AsyncRequest  # an inline body is shown as b""
    state: AsyncState
    attempts: int  # begun
    due_at: float | None  # of a WAITING one: when its next attempt may begin; None: now
    updated_at: float  # epoch seconds
    reason: str = ""  # of the last attempt that failed, or of the end
    instance: str = ""  # that has it, or had it last
    outcome: AsyncOutcome | None = None  # once it is decided


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """How much work an endpoint has. `waiting + running` is SageMaker's ApproximateBacklogSize."""

    waiting: int = 0
    running: int = 0
    decided: int = 0  # answered, and needing no instance any more, but still to be published
    oldest_received_at: float | None = None  # of the waiting and running, epoch seconds by the queue's clock
    oldest_age_s: float = 0.0  # the same as an age, by that clock; 0.0: there is none

    @classmethod
    def of(cls, counts: Mapping[AsyncState, int], oldest_received_at: float | None, now: float) -> Backlog:
        """counts: requests by state."""
        return cls(
            waiting=counts.get(AsyncState.WAITING, 0),
            running=counts.get(AsyncState.RUNNING, 0),
            decided=counts.get(AsyncState.DECIDED, 0),
            oldest_received_at=oldest_received_at,
            oldest_age_s=0.0 if oldest_received_at is None else max(0.0, now - oldest_received_at),
        )


def _to_json(record: Any) -> str:
    values = {item.name: getattr(record, item.name) for item in fields(record) if item.name != "body"}
    return json.dumps(values, separators=(",", ":"))
