"""Notification of one ended request, and its message in SageMaker's format, which SNS topics and webhooks share."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from torchmoor.async_inference.request import AsyncOutcome, AsyncRequest

MAX_RESPONSE_BYTES = 128 * 1024  # longest answer that a message includes
MAX_REASON_CHARS = 4096  # in a message, which SNS limits to 256 KiB; the failure object holds all of it


@dataclass(frozen=True, slots=True)
class Notification:
    """The end of a request. response: the published object's bytes; None if they are not in memory."""

    request: AsyncRequest
    outcome: AsyncOutcome
    ended_at: float  # epoch seconds
    response: bytes | None = field(repr=False)

    @property
    def message_id(self) -> str:
        """Return an id that is stable over retries and unique per request. An inference id may not fit in a header."""
        return f"msg_{self.request.identity}"

    def message(self, region: str, *, includes_response: bool) -> dict[str, Any]:
        """Return SageMaker's message, without the fields that are unknown.

        failureLocation occurs twice: beside failureReason, and where SageMaker's own messages have it.
        """
        request, outcome = self.request, self.outcome
        asked = {
            "accept": request.accept,
            "contentType": request.content_type,
            "endpointName": request.endpoint,
            "inputLocation": request.input_location,
        }
        answered = {
            "contentType": outcome.content_type,
            "outputLocation": request.output_location if outcome.succeeded else "",
            "failureLocation": "" if outcome.succeeded else request.failure_location,
        }
        message: dict[str, Any] = {
            "awsRegion": region,
            "eventTime": _timestamp(self.ended_at),
            "receivedTime": _timestamp(request.received_at),
            "invocationStatus": "Completed" if outcome.succeeded else "Failed",
            "requestParameters": _known(asked),
            "responseParameters": _known(answered),
            "inferenceId": request.inference_id,
            "eventVersion": "1.0",
            "eventSource": "aws:sagemaker",
            "eventName": "InferenceResult",
        }
        if not outcome.succeeded:
            message["failureReason"] = outcome.reason[:MAX_REASON_CHARS]
            message["failureLocation"] = request.failure_location
        if includes_response and self.response is not None and len(self.response) <= MAX_RESPONSE_BYTES:
            message["responseBody"] = {"content": base64.b64encode(self.response).decode(), "encoding": "BASE64"}
        return message


def _known(values: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in values.items() if value}


def _timestamp(seconds: float) -> str:
    """Format a time like 2022-01-25T22:46:00.608Z."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
