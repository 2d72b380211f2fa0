"""Settings of asynchronous inference: of an endpoint, and of its workers."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from torchmoor.config.group import Count, Positive, SettingsGroup, refusal


class AsyncEndpointSettings(SettingsGroup, title="AsyncInferenceConfig"):
    """An endpoint's AsyncInferenceConfig. An empty path follows from async_inference.output_root.

    max_concurrent_per_instance: None for half of an instance's capacity; the rest is for synchronous requests.
    """

    output_path: str = ""
    failure_path: str = ""
    success_topic: str = Field("", description="An SNS topic's ARN.")
    error_topic: str = Field("", description="An SNS topic's ARN.")
    include_response_in: tuple[str, ...] = ()
    max_concurrent_per_instance: int | None = Field(None, ge=1, le=1000)


class AsyncInferenceSettings(SettingsGroup, title="async_inference"):
    """Where asynchronous requests and results are kept, and how often an attempt is repeated."""

    queue: str = Field(
        "", repr=False, description="URL of the queue: sqlite:///a/file.db, redis://host:port/db or rediss://..."
    )
    output_root: str = Field(
        "", description="Where results go for endpoints without S3OutputPath: file:///directory or s3://bucket/prefix."
    )
    lease_s: Positive = Field(
        15.0, description="A worker that does not renew its lease for this time loses its request."
    )
    poll_interval_s: Positive = Field(
        0.5, description="Interval at which a worker looks for requests that another process has queued."
    )
    max_attempts: Count = Field(
        5,
        description="Attempts, the first included, until a request has failed. Failures that cannot be the request's "
        "fault, such as an unreachable store or a full instance, do not count; RequestTTLSeconds limits "
        "them.",
    )
    min_backoff_s: Positive = Field(
        1.0, description="Wait before the second attempt; each further wait is twice as long."
    )
    max_backoff_s: Positive = Field(60.0, description="Longest wait between attempts.")
    max_inline_bytes: Count = Field(128_000, description="A result up to this size stays in the queue until published.")
    check_timeout_s: Positive = Field(
        2.0, description="How long a submit waits for the store to say whether the result's name is taken."
    )
    input_timeout_s: Positive = Field(
        3600.0, description="Longest time that an attempt waits for its input, from the first request to the last byte."
    )
    sweep_interval_s: Positive = Field(
        300.0, description="Time between two measurements of the output directories, which delete abandoned files."
    )
    max_publishing: Count = Field(64, description="Results of one endpoint that are published at a time.")
    max_submitting: Count = Field(
        1024, description="Requests that are queued at a time; further ones are refused with 503."
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.max_backoff_s < self.min_backoff_s:
            raise refusal("max_backoff_s", f"must be min_backoff_s or more, not {self.max_backoff_s}")
        return self
