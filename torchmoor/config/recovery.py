"""Settings of circuit breakers, slow start and retries: the group `recovery`."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from torchmoor.config.group import Count, Fraction, Positive, SettingsGroup, SharedCount, refusal


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
