"""Settings of how long an instance may take, and of how long requests may take to end."""

from __future__ import annotations

from pydantic import Field

from torchmoor.config.group import Positive, SettingsGroup


class TimeoutSettings(SettingsGroup, title="timeouts"):
    """Time-outs of requests to instances."""

    connect_timeout_s: Positive = Field(1.0, description="Time-out of a connection to an instance.")
    model_timeout_s: Positive = Field(60.0, description="Longest time to an answer's end, or to a stream's first byte.")
    stream_idle_timeout_s: Positive = Field(60.0, description="Longest time between two pieces of a stream.")
    stream_total_timeout_s: Positive = Field(480.0, description="Longest time to a stream's end.")
    sweep_interval_s: Positive = Field(0.25, description="Interval at which deadlines are checked.")
    cancel_timeout_s: Positive = Field(
        5.0,
        description="Time-out of an operation that cancels requests at an instance, or ends sessions that were closed "
        "elsewhere.",
    )
    pool_idle_timeout_s: Positive = Field(
        60.0, description="Time after which an unused connection to an instance is closed."
    )
    stop_grace_s: Positive = Field(5.0, description="Time for running requests to end after SIGTERM.")
