"""Settings of probes, circuit breakers, slow start and retries."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from torchmoor.config.group import Count, Fraction, Positive, SettingsGroup, SharedCount, refusal


class HealthSettings(SettingsGroup, title="health"):
    """How often instances are probed."""

    starting_interval_s: Positive = Field(
        0.25, description="Between probes of an instance that is not ready or has not answered the last probe."
    )
    ready_interval_s: Positive = Field(1.0, description="Between probes of a ready instance.")
    probe_timeout_s: Positive = Field(1.5, description="Timeout of a probe.")
    worker_timeout_s: Positive = Field(2.0, description="Timeout of the probe that the handler's worker answers.")
    status_interval_s: Positive = Field(5.0, description="Between questions for sessions, models and free memory.")
    busy_status_interval_s: Positive = Field(0.5, description="The same while the instance loads one of many models.")
    max_status_per_s: Positive = Field(
        20.0, description="Status questions per second over all instances; a large fleet is asked less often."
    )
    unanswered_before_down: Count = Field(
        3,
        description="Unanswered probes until an instance counts as down. A busy instance may answer late; while it "
        "streams, it is not down.",
    )


class RecoverySettings(SettingsGroup, title="recovery"):
    """When a failing instance gets no more work, how it comes back, and how many requests are sent again."""

    max_failures: Count = Field(5, description="Consecutive failures that open an instance's breaker.")
    min_open_s: Positive = Field(
        2.0, description="A breaker's wait before one request is tried; each failure doubles it."
    )
    max_open_s: Positive = Field(60.0, description="Longest time that a breaker is open.")
    slow_start_s: Positive = Field(10.0, description="From an instance's return until it gets its full share of work.")
    least_share: Fraction = Field(0.1, description="The share of work at the beginning of a slow start.")
    retry_fraction: Fraction = Field(0.2, description="Share of all requests that may be sent to another instance.")
    retry_burst: SharedCount = Field(
        100, description="Further requests that may be sent again at once, as when an instance dies."
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.max_open_s < self.min_open_s:
            raise refusal("max_open_s", f"must be min_open_s or more, not {self.max_open_s}")
        return self
