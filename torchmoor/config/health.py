"""Settings of probes and status polls of instances."""

from __future__ import annotations

from pydantic import Field

from torchmoor.config.group import Count, Positive, SettingsGroup


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
