"""How many instances a variant may have, and by which policies: frozen groups.

The defaults are AWS's own example of an asynchronous endpoint that goes to zero. torchmoor.config.scaling_file
reads them from Application Auto Scaling's own form.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchmoor.errors import ConfigError


def _require(name: str, value: float, least: float) -> None:
    """Raise ConfigError unless the number is the least one or more, and not infinite."""
    if not least <= value < float("inf"):
        raise ConfigError(f"{name} must be {least:g} or more, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTracking:
    """Keep ApproximateBacklogSizePerInstance near a target.

    scale_in_cooldown_s: an instance goes only if fewer have been enough for so long, without a break.
    scale_out_cooldown_s: after instances were added none goes for so long, whatever the backlog is.
    """

    target: float = 5.0
    scale_in_cooldown_s: float = 600.0
    scale_out_cooldown_s: float = 300.0
    can_scale_in: bool = True

    def __post_init__(self) -> None:
        _require("ScaleInCooldown", self.scale_in_cooldown_s, 0)
        _require("ScaleOutCooldown", self.scale_out_cooldown_s, 0)
        if not 0 < self.target < float("inf"):
            raise ConfigError(f"TargetValue must be positive, not {self.target}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScaling:
    """When HasBacklogWithoutCapacity is 1, go from no instance to some. cooldown_s: then none goes for so long."""

    num_instances: int = 1
    cooldown_s: float = 300.0

    def __post_init__(self) -> None:
        _require("ScalingAdjustment", self.num_instances, 1)
        _require("Cooldown", self.cooldown_s, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSettings:
    """The limits and policies of one variant.

    initial_count: instances at the start. max_hold_s: a request that finds no instance waits so long for one to start;
    that is part of the time that the client gives the model. max_held: so many wait at a time.
    """

    min_capacity: int = 0
    max_capacity: int = 1
    initial_count: int = 0
    tracking: TargetTracking | None = field(default_factory=TargetTracking)
    step: StepScaling | None = field(default_factory=StepScaling)
    max_hold_s: float = 55.0  # below the 60 s that the runtime API, and boto3 by default, give a request
    max_held: int = 1024

    def __post_init__(self) -> None:
        _require("MinCapacity", self.min_capacity, 0)
        _require("MaxCapacity", self.max_capacity, max(1, self.min_capacity))
        _require("max_held", self.max_held, 1)
        if not 0 < self.max_hold_s < float("inf"):
            raise ConfigError(f"max_hold_s must be positive, not {self.max_hold_s}")
        if not self.min_capacity <= self.initial_count <= self.max_capacity:
            raise ConfigError(
                f"InitialInstanceCount must be from MinCapacity ({self.min_capacity}) to MaxCapacity "
                f"({self.max_capacity}), not {self.initial_count}"
            )
        if self.min_capacity == 0 and self.step is None:
            raise ConfigError(
                "MinCapacity 0 needs a StepScaling policy on HasBacklogWithoutCapacity, because a backlog "
                "per instance says nothing while there is no instance: nobody would ever start one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """Instances that `torchmoor serve` starts on its own host: those of variants with Autoscaling."""

    model_store: str = "model_store"  # where the variants' archives are, MODEL_NAME.mar
    run_dir: str = ""  # where their folders and logs go while they run; "": a temporary directory
    capacity: int = 100  # requests that an instance is sent at a time
    start_timeout_s: float = 180.0  # how long it may take to load its model

    def __post_init__(self) -> None:
        _require("capacity", self.capacity, 1)
        _require("start_timeout_s", self.start_timeout_s, 1)
