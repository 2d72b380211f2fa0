"""Notices that a request has ended: SageMaker's message, to SNS topics and to webhooks.

A notice is sent again until it is taken or the tries are used up, and it may be sent twice after a crash: whoever
receives it knows it by its inferenceId.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Topics:
    """Whom one endpoint notifies by SNS: NotificationConfig of CreateEndpointConfig."""

    success_topic: str = ""  # ARN; "": nobody
    error_topic: str = ""
    include_response_in: tuple[str, ...] = ()  # of SUCCESS_NOTIFICATION_TOPIC and ERROR_NOTIFICATION_TOPIC


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What is said of one request that has ended."""

    inference_id: str
    endpoint: str
    received_at: float  # seconds since the epoch
    ended_at: float
    content_type: str  # of the request
    input_location: str | None  # None: the input came with the request
    succeeded: bool
    response_content_type: str = ""
    output_location: str = ""  # of a success
    failure_location: str = ""  # of a failure, if there is an object
    reason: str = ""  # of a failure
    response: bytes | None = None  # the answer, or the failure object's bytes; None: too large to be sent along


class Notifier(ABC):
    """Tells those who want to know that a request has ended."""

    @abstractmethod
    async def notify(self, notice: Notice, topics: Topics) -> int:
        """Send to the endpoint's topic and to every webhook. Returns how many could not be told: 0 is well.

        Raises nothing: each failure is logged. Takes no longer than the tries of one, with their time-outs.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let go of connections and threads."""
