"""Decides how many instances a variant needs, as pure functions of settings, demand and time.

    backlog                all requests that wait or run, so that running requests keep their instances
    target tracking        scales out at once, until the backlog per instance, or the requests of the last minute per
                           instance, is at most the target; scales in when fewer instances would have sufficed for the
                           whole scale-in cool-down, to the most that were needed in that time. A margin prevents
                           oscillation near the target.
    step                   scales from zero as soon as there is a backlog (HasBacklogWithoutCapacity); a starting
                           instance counts as capacity
    after a scale-out      no scale-in while an added instance starts, because clients may have got a Retry-After.
                           From when it is ready, the scale-in cool-down and that of the policy that added it must pass.

A scale-out is never delayed. Starting instances count, so that one backlog adds instances once. A scale-out also ends a
running scale-in cool-down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torchmoor.config.scaling import ScalingSettings

# Application Auto Scaling also scales in below 90 % of the target.
SCALE_IN_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Scaling:
    """Desired number of instances, and the state for the next decision.

    low_since: time since which fewer would have sufficed; most_needed: the most needed since then.
    stays_until: earliest time of a scale-in. cooldown_s: of the last scale-out.
    """

    desired: int
    low_since: float | None = None
    most_needed: int = 0
    stays_until: float = -math.inf
    cooldown_s: float = 0.0


def decide(
    settings: ScalingSettings,
    state: Scaling,
    *,
    backlog: int,
    now: float,
    invocations: int = 0,
    awaited_until: float | None = None,
) -> Scaling:
    """Return the state after a look at the demand. now: monotonic seconds. invocations: requests of the last minute.

    awaited_until: while an added instance starts, when the last client that got a Retry-After comes back.
    """
    load = invocations if settings.counts_invocations else backlog
    wanted, cooldown_s = _want_more(settings, state.desired, backlog, load)
    wanted = min(wanted, settings.max_capacity)
    if wanted > state.desired:
        return Scaling(wanted, stays_until=now + cooldown_s, cooldown_s=cooldown_s)
    if awaited_until is not None:
        stays_until = max(state.stays_until, now + state.cooldown_s, awaited_until)
        return replace(state, low_since=None, most_needed=0, stays_until=stays_until)
    needed = _need(settings, state.desired, backlog, load)
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


def explain(
    settings: ScalingSettings,
    state: Scaling,
    *,
    backlog: int,
    now: float,
    invocations: int = 0,
    is_awaited: bool = False,
) -> str:
    """Explain the desired number to operators, in one clause. is_awaited: an added instance starts."""
    tracking, wanted = settings.tracking, state.desired
    if wanted == 0:
        return "nothing waits"
    if tracking is None:
        return "no target tracking: only the step from no instance to some"
    found = f"a backlog of {backlog}"
    if settings.counts_invocations:
        found = f"a rate of {invocations} requests per minute"
    asked = _ask(settings, backlog, invocations)
    if asked > settings.max_capacity:
        return f"{found} asks for {asked}, and MaxCapacity is {settings.max_capacity}"
    if state.low_since is not None:
        left_s = max(state.low_since + tracking.scale_in_cooldown_s, state.stays_until) - now
        return f"{state.most_needed} would do for {found}; fewer in {max(0.0, left_s):.0f} s if it stays so"
    if is_awaited and asked < wanted:
        return "an instance is being started, for which clients may wait"
    if wanted == settings.min_capacity and asked < wanted:
        return f"MinCapacity is {wanted}"
    return f"{found}, at a target of {tracking.target:g} an instance"


def is_limited(settings: ScalingSettings, state: Scaling, *, backlog: int, invocations: int = 0) -> bool:
    """Return whether the load asks for more instances than MaxCapacity."""
    return state.desired > 0 and _ask(settings, backlog, invocations) > settings.max_capacity


def _ask(settings: ScalingSettings, backlog: int, invocations: int) -> int:
    """Return for how many instances the load asks, without a limit; 0 without target tracking."""
    load = invocations if settings.counts_invocations else backlog
    return 0 if settings.tracking is None else math.ceil(load / settings.tracking.target)


def _want_more(settings: ScalingSettings, desired: int, backlog: int, load: int) -> tuple[int, float]:
    """Return the number that a policy requires for a scale-out, and that policy's cool-down."""
    if desired == 0 and backlog > 0 and settings.step is not None:
        return settings.step.num_instances, settings.step.cooldown_s
    if desired == 0 or settings.tracking is None:
        return 0, 0.0
    return math.ceil(load / settings.tracking.target), settings.tracking.scale_out_cooldown_s


def _need(settings: ScalingSettings, desired: int, backlog: int, load: int) -> int:
    """Return the smallest number of instances that suffices for the load; a backlog needs one or more."""
    tracking = settings.tracking
    if tracking is None or not tracking.can_scale_in:
        return desired
    return max(settings.min_capacity, int(backlog > 0), math.ceil(load / (SCALE_IN_SHARE * tracking.target)))
