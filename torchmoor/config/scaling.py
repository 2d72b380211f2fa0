"""Settings of how many instances a variant may have, and of the policies that decide it.

The defaults are those of AWS's example of an asynchronous endpoint that scales to zero. application_autoscaling.py
reads these settings in Application Auto Scaling's form, whose names are the fields' aliases.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from torchmoor.config.group import Count, Positive, SettingsGroup, SharedCount, refusal

NotNegative = Annotated[float, Field(ge=0)]
LEAST_TARGET = 8.51592e-109  # as at AWS


class TrackedMetric(StrEnum):
    """A metric of target tracking, by AWS's name. The last two are predefined."""

    BACKLOG = "ApproximateBacklogSizePerInstance"
    CONCURRENCY = "SageMakerVariantConcurrentRequestsPerModelHighResolution"  # here it is the backlog, too
    INVOCATIONS = "SageMakerVariantInvocationsPerInstance"  # requests of the last minute


class TargetTracking(SettingsGroup, title="TargetTracking", validate_by_name=True, validate_by_alias=True):
    """Keep a metric near a target."""

    metric: TrackedMetric = TrackedMetric.BACKLOG
    target: Positive = Field(
        5.0,
        alias="TargetValue",
        description="Target backlog per instance: requests that wait or run. Above it, instances are added.",
    )
    scale_in_cooldown_s: NotNegative = Field(
        600.0,
        alias="ScaleInCooldown",
        description="Time for which fewer instances must have been enough before one is stopped.",
    )
    scale_out_cooldown_s: NotNegative = Field(
        300.0,
        alias="ScaleOutCooldown",
        description="No instance is stopped for this time after instances were added.",
    )
    can_scale_in: bool = Field(True, description="Allow this policy to stop instances.")

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.target < LEAST_TARGET:  # a backlog divided by it could be infinite
            raise refusal("TargetValue", f"must be {LEAST_TARGET} or more, not {self.target}")
        return self


class StepScaling(SettingsGroup, title="StepScaling", validate_by_name=True, validate_by_alias=True):
    """Start instances when HasBacklogWithoutCapacity is 1, which means that no instance is ready."""

    num_instances: Count = Field(1, alias="ScalingAdjustment", description="Instances to start.")
    cooldown_s: NotNegative = Field(
        300.0, alias="Cooldown", description="No instance is stopped for this time afterwards."
    )


class ScalingSettings(SettingsGroup, title="Autoscaling", validate_by_name=True, validate_by_alias=True):
    """The limits and policies of one variant. None switches a policy off."""

    min_capacity: Annotated[int, Field(ge=0)] = Field(0, alias="MinCapacity")
    max_capacity: Annotated[int, Field(ge=1)] = Field(1, alias="MaxCapacity")
    initial_count: int = Field(0, alias="InitialInstanceCount", description="Instances at the start.")
    tracking: TargetTracking | None = TargetTracking()
    step: StepScaling | None = StepScaling()
    # The default is below the 60 s that the runtime API, and boto3 by default, give a request.
    max_hold_s: Positive = Field(
        55.0,
        description="How long a request that finds no instance waits for one to start. The wait is part of the time "
        "that the client allows the model.",
    )
    max_held: SharedCount = Field(
        1024,
        description="Requests that wait for an instance to start at a time. Those that wait for a busy instance count "
        "against max_waiting of late_binding.",
    )

    @property
    def counts_invocations(self) -> bool:
        """True if target tracking divides the requests of the last minute, and not the backlog, by the instances."""
        return self.tracking is not None and self.tracking.metric is TrackedMetric.INVOCATIONS

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        least, most = self.min_capacity, self.max_capacity
        if most < least:
            raise refusal("MaxCapacity", f"must be {least} or more, not {most}")
        if not least <= self.initial_count <= most:
            raise refusal(
                "InitialInstanceCount",
                f"must be from MinCapacity ({least}) to MaxCapacity ({most}), not {self.initial_count}",
            )
        if least == 0 and self.step is None:
            raise refusal(
                "ScalingPolicies",
                "are not enough: MinCapacity 0 needs a StepScaling policy on HasBacklogWithoutCapacity, or target "
                "tracking, because otherwise nothing starts an instance",
            )
        return self
