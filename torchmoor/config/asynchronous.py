"""What asynchronous inference is told: of each endpoint as SageMaker has it, and of this proxy's own."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torchmoor.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncEndpointSettings:
    """An endpoint's AsyncInferenceConfig. A path that is "" follows from async_inference.output_root."""

    output_path: str = ""
    failure_path: str = ""
    success_topic: str = ""  # an SNS topic's ARN
    error_topic: str = ""
    include_response_in: tuple[str, ...] = ()
    max_concurrent_per_instance: int | None = None  # None: half of an instance's capacity; the rest is for clients

    def __post_init__(self) -> None:
        most = self.max_concurrent_per_instance
        if most is not None and not 1 <= most <= 1000:
            raise ConfigError(f"MaxConcurrentInvocationsPerInstance must be from 1 to 1000, not {most}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncInferenceSettings:
    """The group async_inference: where requests and results are kept, and how often things are tried."""

    queue: str = ""  # sqlite:///a/file.db, redis://host:port/db or rediss://...
    output_root: str = ""  # file:///a/directory or s3://bucket/prefix; for endpoints without an S3OutputPath
    lease_s: float = 15.0  # a request whose worker has not been heard of for so long is taken by another
    poll_interval_s: float = 0.5  # how late a request may be noticed that another process has queued
    max_attempts: int = 5  # at instances that fail or are lost meanwhile; then the request has failed
    min_backoff_s: float = 1.0  # before an attempt is repeated; doubled each time
    max_backoff_s: float = 60.0
    max_inline_bytes: int = 128_000  # of a result that is kept in the queue until it is published
    max_publishing: int = 64  # results of an endpoint on their way to their place, beside the requests that run
    max_submitting: int = 1024  # requests that are being written to the queue; with more, clients are told to wait

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, (int, float)) and value <= 0:
                raise ConfigError(f"async_inference.{item.name} must be positive, not {value}")
        if self.max_backoff_s < self.min_backoff_s:
            raise ConfigError(f"async_inference.max_backoff_s must be min_backoff_s or more, not {self.max_backoff_s}")
