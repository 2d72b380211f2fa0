"""How many instances a variant shall have: pure functions of its settings, its backlog and the time.

    backlog                what waits or runs, of any kind; so nothing that runs is ever scaled away
    target tracking        enough instances that each has at most the target of the backlog, at once; fewer when fewer
                           would have been enough for the whole scale-in cool-down, and then the most that were needed
                           in that time. With a margin, so that a backlog near the target does not swing.
    step                   from no instance to some as soon as there is a backlog (HasBacklogWithoutCapacity); an
                           instance that is being started counts as capacity
    after a scale-out      no instance goes before the cool-down of the policy that added it has passed

A scale-out is never held back: what is being started counts in the number that is compared, so that the same backlog
asks for instances once. It also ends a scale-in cool-down that was running.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torchmoor.config.scaling import ScalingSettings

# Application Auto Scaling scales in below 90 % of the target, too.
SCALE_IN_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Scaling:
    """How many instances shall run, and what the next decision needs to know of the last ones.

    low_since: since when fewer would have been enough, and most_needed: how many, at most, since then.
    stays_until: no instance goes before that.
    """

    desired: int
    low_since: float | None = None
    most_needed: int = 0
    stays_until: float = -math.inf


def decide(settings: ScalingSettings, state: Scaling, *, backlog: int, now: float) -> Scaling:
    """The state after a look at the backlog. now: monotonic seconds, which never go back from call to call."""
    wanted, cooldown_s = _want_more(settings, state.desired, backlog)
    wanted = min(wanted, settings.max_capacity)
    if wanted > state.desired:
        return Scaling(wanted, stays_until=now + cooldown_s)
    needed = _need(settings, state.desired, backlog)
    if needed >= state.desired or settings.tracking is None:
        return replace(state, low_since=None, most_needed=0)
    if state.low_since is None:
        state = replace(state, low_since=now, most_needed=needed)
    assert state.low_since is not None
    most_needed = max(state.most_needed, needed)
    if now - state.low_since < settings.tracking.scale_in_cooldown_s or now < state.stays_until:
        return replace(state, most_needed=most_needed)
    is_still_low = needed < most_needed
    return Scaling(most_needed, low_since=now if is_still_low else None, most_needed=needed if is_still_low else 0)


def explain(settings: ScalingSettings, state: Scaling, *, backlog: int, now: float) -> str:
    """Why it is so many instances: a clause for operators."""
    tracking, wanted = settings.tracking, state.desired
    if wanted == 0:
        return "nothing waits"
    if tracking is None:
        return "no target tracking: only the step from no instance to some"
    asked = math.ceil(backlog / tracking.target)
    if asked > wanted:
        return f"a backlog of {backlog} asks for {asked}, and MaxCapacity is {settings.max_capacity}"
    if state.low_since is not None:
        left_s = max(state.low_since + tracking.scale_in_cooldown_s, state.stays_until) - now
        return (
            f"{state.most_needed} would do for a backlog of {backlog}; fewer in {max(0.0, left_s):.0f} s if it stays so"
        )
    if wanted == settings.min_capacity and asked < wanted:
        return f"MinCapacity is {wanted}"
    return f"a backlog of {backlog}, at a target of {tracking.target:g} an instance"


def has_backlog_without_capacity(desired: int, backlog: int) -> bool:
    """CloudWatch's metric of that name, for the policy: something waits, and no instance runs or is being started."""
    return backlog > 0 and desired == 0


def _want_more(settings: ScalingSettings, desired: int, backlog: int) -> tuple[int, float]:
    """The number that the policies ask for, if it is more, and that policy's cool-down."""
    if has_backlog_without_capacity(desired, backlog):
        return (0, 0.0) if settings.step is None else (settings.step.num_instances, settings.step.cooldown_s)
    if desired == 0 or settings.tracking is None:
        return 0, 0.0
    return math.ceil(backlog / settings.tracking.target), settings.tracking.scale_out_cooldown_s


def _need(settings: ScalingSettings, desired: int, backlog: int) -> int:
    """The smallest number of instances that does with this backlog."""
    tracking = settings.tracking
    if tracking is None or not tracking.can_scale_in:
        return desired
    return max(settings.min_capacity, math.ceil(backlog / (SCALE_IN_SHARE * tracking.target)))
