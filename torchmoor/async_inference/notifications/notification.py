"""Notification of one ended request, and its message in SageMaker's format, which SNS topics and webhooks share."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from torchmoor.async_inference.request import AsyncOutcome, AsyncRequest

MAX_RESPONSE_BYTES = 128 * 1024  # that a message includes
MAX_REASON_CHARS = 4096  # in a message, which SNS limits to 256 KiB; the failure object holds all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """What is reported about a request that has ended."""

    inference_id: str
    endpoint: str
    received_at: float  # epoch seconds
    ended_at: float
    succeeded: bool
    content_type: str = ""  # of the request
    accept: str = ""
    input_location: str | None = None  # None: the input came with the request
    response_content_type: str = ""
    output_location: str = ""  # of a success
    failure_location: str = ""  # of a failure
    reason: str = ""  # of a failure
    response: bytes | None = field(default=None, repr=False)  # the published object; None: too large

    @classmethod
    def of(cls, request: AsyncRequest, outcome: AsyncOutcome, ended_at: float, response: bytes | None) -> Notification:
        """Describe a request's outcome. response: the published object's bytes, None if they are not in memory."""
        return cls(
            inference_id=request.inference_id,
            endpoint=request.endpoint,
            received_at=request.received_at,
            ended_at=ended_at,
            succeeded=outcome.succeeded,
            content_type=request.content_type,
            accept=request.accept,
            input_location=request.input_location,
            response_content_type=outcome.content_type,
            output_location=request.output_location if outcome.succeeded else "",
            failure_location="" if outcome.succeeded else request.failure_location,
            reason=outcome.reason,
            response=response,
        )

    @property
    def message_id(self) -> str:
        """Return an id that is stable over retries and unique per request. An inference id may not fit in a header."""
        named = json.dumps([self.endpoint, self.inference_id, self.received_at])
        return f"msg_{hashlib.sha256(named.encode()).hexdigest()[:32]}"

    def message(self, region: str, *, includes_response: bool) -> dict[str, Any]:
        """Return SageMaker's message, without the fields that are unknown.

        failureLocation occurs twice: beside failureReason, and where SageMaker's own messages have it.
        """
        asked = {
            "accept": self.accept,
            "contentType": self.content_type,
            "endpointName": self.endpoint,
            "inputLocation": self.input_location,
        }
        answered = {
            "contentType": self.response_content_type,
            "outputLocation": self.output_location,
            "failureLocation": self.failure_location,
        }
        message: dict[str, Any] = {
            "awsRegion": region,
            "eventTime": _timestamp(self.ended_at),
            "receivedTime": _timestamp(self.received_at),
            "invocationStatus": "Completed" if self.succeeded else "Failed",
            "requestParameters": _known(asked),
            "responseParameters": _known(answered),
            "inferenceId": self.inference_id,
            "eventVersion": "1.0",
            "eventSource": "aws:sagemaker",
            "eventName": "InferenceResult",
        }
        if not self.succeeded:
            message["failureReason"] = self.reason[:MAX_REASON_CHARS]
            message["failureLocation"] = self.failure_location
        if includes_response and self.response is not None and len(self.response) <= MAX_RESPONSE_BYTES:
            message["responseBody"] = {"content": base64.b64encode(self.response).decode(), "encoding": "BASE64"}
        return message


def _known(values: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in values.items() if value}


def _timestamp(seconds: float) -> str:
    """Format a time like 2022-01-25T22:46:00.608Z."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
