"""Settings of probes, circuit breakers, slow start and retries."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from torchmoor.config.group import Count, Fraction, Positive, SettingsGroup, SharedCount, refusal


class HealthSettings(SettingsGroup, title="health"):
    """Intervals and time-outs of probes and status polls."""

    starting_interval_s: Positive = Field(
        0.25, description="Time between probes of an instance that is not ready or has not answered the last probe."
    )
    ready_interval_s: Positive = Field(1.0, description="Time between probes of a ready instance.")
    probe_timeout_s: Positive = Field(1.5, description="Time-out of a probe.")
    worker_timeout_s: Positive = Field(2.0, description="Time-out of the probe that the handler's worker answers.")
    status_interval_s: Positive = Field(
        5.0, description="Time between polls of an instance's status: sessions, models and free memory."
    )
    busy_status_interval_s: Positive = Field(0.5, description="Time between these polls while a model is loading.")
    max_status_per_s: Positive = Field(
        20.0, description="Status polls per second over all instances; in a large fleet each is polled less often."
    )
    unanswered_before_down: Count = Field(
        3,
        description="Unanswered probes after which an instance is down. A busy instance may answer late; while it "
        "streams, it does not count as down.",
    )


class RecoverySettings(SettingsGroup, title="recovery"):
    """Circuit breakers, slow start and retries."""

    max_failures: Count = Field(5, description="Consecutive failures that open an instance's circuit breaker.")
    min_open_s: Positive = Field(
        2.0, description="Time until an open breaker lets one request through; each failure doubles it."
    )
    max_open_s: Positive = Field(60.0, description="Longest time that a breaker is open.")
    slow_start_s: Positive = Field(
        10.0, description="Time from an instance's return until it gets its full share of work."
    )
    least_share: Fraction = Field(0.1, description="Share of work at the beginning of a slow start.")
    retry_fraction: Fraction = Field(0.2, description="Fraction of all requests that may be sent to another instance.")
    retry_burst: SharedCount = Field(100, description="Retries beyond the fraction, for a burst when an instance dies.")

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.max_open_s < self.min_open_s:
            raise refusal("max_open_s", f"must be min_open_s or more, not {self.max_open_s}")
        return self
