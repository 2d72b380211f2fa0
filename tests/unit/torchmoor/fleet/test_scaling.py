"""The scaling policies as functions: AWS's published example, and what holds for every backlog at every time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmoor.config.scaling import LEAST_TARGET, ScalingSettings, StepScaling, TargetTracking, TrackedMetric
from torchmoor.errors import ConfigError
from torchmoor.fleet.scaled_variant import RecentRequests
from torchmoor.fleet.scaling import Scaling, decide, explain, is_limited

PUBLISHED = ScalingSettings()  # target 5.0, 0 to 1, in after 600 s, out 300 s
TRACKED = TargetTracking(target=5, scale_in_cooldown_s=60, scale_out_cooldown_s=30)
SEVERAL = ScalingSettings(max_capacity=8, tracking=TRACKED, step=StepScaling(cooldown_s=20))


def why(variant: Variant, backlog: int) -> str:
    return explain(variant.settings, variant.state, backlog=backlog, now=variant.now)


class Variant:
    """A variant whose backlog and clock a test sets; remembers every decision."""

    def __init__(self, settings: ScalingSettings, desired: int = 0) -> None:
        self.settings = settings
        self.state = Scaling(desired)
        self.now = 1000.0

    def look(self, backlog: int, after_s: float = 1.0) -> int:
        """Make one decision, some time after the last one."""
        self.now += after_s
        self.state = decide(self.settings, self.state, backlog=backlog, now=self.now)
        return self.state.desired


def test_published_example_wakes_at_once_and_sleeps_after_its_cooldown() -> None:
    """With target 5.0 and 0 to 1 instances, one request starts the instance, and exactly 600 idle seconds stop it."""
    variant = Variant(PUBLISHED)

    assert variant.look(0) == 0
    assert variant.look(1) == 1
    assert variant.look(1000) == 1
    assert variant.look(0) == 1
    assert variant.look(0, after_s=599.5) == 1
    assert variant.look(0, after_s=0.5) == 0


def test_long_job_is_never_scaled_away() -> None:
    """Running requests count as backlog, so an instance with a long job stays, unlike the known complaint about AWS."""
    variant = Variant(PUBLISHED, desired=1)

    assert {variant.look(1, after_s=3600) for _ in range(48)} == {1}


def test_one_request_in_the_cooldown_begins_it_again() -> None:
    """A request during the cool-down restarts it, since the smaller number must have sufficed for its whole length."""
    variant = Variant(PUBLISHED, desired=1)
    variant.look(0)
    variant.look(0, after_s=590)
    variant.look(1)

    assert variant.look(0) == 1
    assert variant.look(0, after_s=599) == 1
    assert variant.look(0, after_s=1) == 0


def test_wakes_with_the_steps_number_then_follows_the_target() -> None:
    """Step scaling starts the first instances, because an idle variant has no backlog per instance.

    Then the target applies.
    """
    variant = Variant(SEVERAL)

    assert [variant.look(23), variant.look(23), variant.look(23)] == [1, 5, 5]


def test_the_rate_of_requests_is_tracked() -> None:
    """SageMakerVariantInvocationsPerInstance divides the requests of the last minute, whatever the backlog.

    While requests wait or run, one instance stays.
    """
    tracking = TargetTracking(metric=TrackedMetric.INVOCATIONS, target=70, scale_in_cooldown_s=60)
    settings = ScalingSettings(max_capacity=3, tracking=tracking)

    state = decide(settings, Scaling(1), backlog=500, invocations=70, now=0)
    assert state.desired == 1
    state = decide(settings, state, backlog=0, invocations=141, now=1)
    assert state.desired == 3
    said = explain(settings, state, backlog=0, invocations=300, now=1)
    assert said == "a rate of 300 requests per minute asks for 5, and MaxCapacity is 3"
    state = decide(settings, state, backlog=1, invocations=0, now=400)
    assert explain(settings, state, backlog=1, invocations=0, now=400) == (
        "1 would do for a rate of 0 requests per minute; fewer in 60 s if it stays so"
    )
    assert decide(settings, state, backlog=1, invocations=0, now=460).desired == 1
    assert decide(settings, state, backlog=0, invocations=0, now=460).desired == 1, (
        "one was needed during the cool-down"
    )


def test_recent_requests_are_those_of_the_last_minute() -> None:
    """The count covers 60 seconds, however often it is read, and begins with the first reading."""
    recent = RecentRequests()

    assert recent.count(1000, now=0.0) == 0
    assert [recent.count(1000 + at, now=at / 10) for at in range(1, 301)][-1] == 300
    assert recent.count(1300, now=59.0) == 300
    assert recent.count(1300, now=70.0) == 200
    assert recent.count(1310, now=500.0) == 10
    assert recent.count(1310, now=560.0) == 0


def test_instances_that_start_count() -> None:
    """Starting instances count, so a constant backlog adds instances once.

    A larger one adds more within the cool-down.
    """
    variant = Variant(SEVERAL, desired=1)

    assert [variant.look(11), variant.look(11), variant.look(16), variant.look(1000)] == [3, 3, 4, 8]


def test_scale_in_keeps_what_the_cooldown_needed() -> None:
    """The scale-in follows the largest need during the cool-down, not a dip at its end."""
    variant = Variant(SEVERAL, desired=8)
    variant.look(20, after_s=100)  # 5 suffice
    variant.look(3, after_s=30)

    assert variant.look(0, after_s=30) == 5
    assert variant.look(0, after_s=59) == 5
    assert variant.look(0, after_s=1) == 0


def test_backlog_near_the_target_does_not_swing() -> None:
    """With target 5, two instances with a backlog of 10 or 9.1 stay two."""
    variant = Variant(SEVERAL, desired=2)

    assert {variant.look(backlog, after_s=100) for backlog in (10, 10, 10, 10)} == {2}
    assert {variant.look(9, after_s=100) for _ in range(4)} == {2}


def test_what_was_added_stays_for_the_cooldown_of_its_policy() -> None:
    """Added instances stay for their policy's cool-down, even if the scale-in cool-down is shorter."""
    settings = ScalingSettings(tracking=TargetTracking(scale_in_cooldown_s=0), step=StepScaling(cooldown_s=20))
    variant = Variant(settings)
    variant.look(1)

    assert variant.look(0, after_s=19) == 1
    assert variant.look(0, after_s=1) == 0


def test_both_cooldowns_begin_when_an_added_instance_is_ready() -> None:
    """Both cool-downs begin when an added instance is ready; until then a larger backlog can add more."""
    settings = ScalingSettings(
        max_capacity=2, tracking=TargetTracking(scale_in_cooldown_s=5), step=StepScaling(cooldown_s=20)
    )
    state = decide(settings, Scaling(0), backlog=1, now=0)
    state = decide(settings, state, backlog=0, now=100, awaited_until=106)
    assert decide(settings, state, backlog=6, now=100, awaited_until=106).desired == 2

    state = decide(settings, state, backlog=0, now=101)
    assert decide(settings, state, backlog=0, now=119).desired == 1
    assert decide(settings, state, backlog=0, now=120).desired == 0

    told = decide(settings, Scaling(1), backlog=0, now=100, awaited_until=150)
    told = decide(settings, told, backlog=0, now=101)
    assert decide(settings, told, backlog=0, now=149).desired == 1
    assert decide(settings, told, backlog=0, now=150).desired == 0


def test_scale_in_can_be_switched_off() -> None:
    """With DisableScaleIn, or without target tracking, added instances stay."""
    for tracking in (None, TargetTracking(can_scale_in=False, scale_in_cooldown_s=0)):
        variant = Variant(ScalingSettings(tracking=tracking))
        variant.look(1)

        assert variant.look(0, after_s=1e6) == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"min_capacity": -1}, "MinCapacity"),
        ({"max_capacity": 0}, "MaxCapacity"),
        ({"min_capacity": 3, "max_capacity": 2, "initial_count": 3}, "MaxCapacity"),
        ({"min_capacity": 1}, "InitialInstanceCount"),
        ({"initial_count": 2}, "InitialInstanceCount"),
        ({"step": None}, "HasBacklogWithoutCapacity"),
        ({"max_hold_s": 0.0}, "max_hold_s"),
    ],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, object], said: str) -> None:
    """Impossible settings, such as scaling to zero without a way back, are refused with the value's name."""
    with pytest.raises(ConfigError, match=said):
        ScalingSettings(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"target": 0.0},
        {"target": 5e-324},
        {"target": math.inf},
        {"scale_in_cooldown_s": -1.0},
        {"scale_out_cooldown_s": math.nan},
    ],
)
def test_policies_that_mean_nothing_are_refused(values: dict[str, float]) -> None:
    """A target or cool-down out of range is refused."""
    with pytest.raises(ConfigError):
        TargetTracking(**values)


def test_the_least_target_asks_for_all_instances() -> None:
    """A number of instances that no float has would end every look of the autoscaler, for all variants."""
    variant = Variant(ScalingSettings(max_capacity=8, tracking=TargetTracking(target=LEAST_TARGET)), desired=1)

    assert variant.look(10**9) == 8
    assert why(variant, 10**9).endswith("MaxCapacity is 8")


SETTINGS = st.builds(
    lambda least, more, target, cool_in, cool_out, step, cool_step: ScalingSettings(
        min_capacity=least,
        max_capacity=max(1, least + more),
        initial_count=least,
        tracking=TargetTracking(target=target, scale_in_cooldown_s=cool_in, scale_out_cooldown_s=cool_out),
        step=StepScaling(num_instances=step, cooldown_s=cool_step),
    ),
    least=st.integers(0, 3),
    more=st.integers(0, 6),
    target=st.floats(0.5, 50),
    cool_in=st.floats(0, 100),
    cool_out=st.floats(0, 100),
    step=st.integers(1, 4),
    cool_step=st.floats(0, 100),
)
LOOKS = st.lists(st.tuples(st.integers(0, 200), st.floats(0, 60)), max_size=60)


@settings(deadline=None)
@given(SETTINGS, LOOKS)
def test_never_outside_the_limits_and_never_idle_with_a_backlog(
    scaling: ScalingSettings, looks: list[tuple[int, float]]
) -> None:
    """The number stays between MinCapacity and MaxCapacity, and is at least one while there is a backlog."""
    variant = Variant(scaling, scaling.initial_count)

    for backlog, after_s in looks:
        desired = variant.look(backlog, after_s)

        assert scaling.min_capacity <= desired <= scaling.max_capacity
        assert desired > 0 or backlog == 0


@settings(deadline=None)
@given(SETTINGS, LOOKS)
def test_a_scale_in_is_one_that_the_whole_cooldown_allows(
    scaling: ScalingSettings, looks: list[tuple[int, float]]
) -> None:
    """After a scale-in each instance has at most its target of the cool-down's largest backlog.

    No scale-in happens within its cool-down after another, or within a scale-out's cool-down.
    """
    variant = Variant(scaling, scaling.initial_count)
    tracking, step = scaling.tracking, scaling.step
    seen: list[tuple[float, int]] = []
    stays_until = last_in_at = -math.inf

    for backlog, after_s in looks:
        before = variant.state.desired
        desired = variant.look(backlog, after_s)
        seen.append((variant.now, backlog))
        if desired > before:
            stays_until = variant.now + (step.cooldown_s if before == 0 else tracking.scale_out_cooldown_s)
        elif desired < before:
            began = variant.now - tracking.scale_in_cooldown_s + 1e-6  # floats: a sum and a difference
            assert variant.now >= stays_until
            assert last_in_at <= began
            assert all(given <= desired * tracking.target for at, given in seen if at >= began)
            last_in_at = variant.now


@settings(deadline=None)
@given(SETTINGS, st.integers(0, 200), st.integers(0, 9))
def test_a_steady_backlog_comes_to_rest(scaling: ScalingSettings, backlog: int, initial: int) -> None:
    """Under a steady backlog the number settles, with each instance at its target or below, or at MaxCapacity."""
    variant = Variant(scaling, min(max(initial, scaling.min_capacity), scaling.max_capacity))

    numbers = [variant.look(backlog, after_s=201) for _ in range(6)]

    assert numbers[3:] == [numbers[3]] * 3
    assert backlog <= numbers[3] * scaling.tracking.target or numbers[3] == scaling.max_capacity
    if not backlog:
        assert numbers[3] == scaling.min_capacity


def test_operators_are_told_why() -> None:
    """The explanation has one clause per state, with the numbers behind it."""
    variant = Variant(SEVERAL)
    assert why(variant, 0) == "nothing waits"
    assert variant.look(1) == 1
    assert why(variant, 1) == "a backlog of 1, at a target of 5 an instance"
    assert not is_limited(SEVERAL, variant.state, backlog=5)
    assert why(variant, 12) == "a backlog of 12, at a target of 5 an instance"  # the next look adds two
    assert not is_limited(SEVERAL, variant.state, backlog=12)
    assert variant.look(100) == 8
    assert why(variant, 100) == "a backlog of 100 asks for 20, and MaxCapacity is 8"
    assert is_limited(SEVERAL, variant.state, backlog=41)
    assert not is_limited(SEVERAL, variant.state, backlog=40)
    variant.look(12)
    assert why(variant, 12) == "3 would do for a backlog of 12; fewer in 60 s if it stays so"
    always = Variant(ScalingSettings(min_capacity=2, max_capacity=2, initial_count=2, tracking=TRACKED), desired=2)
    assert why(always, 1) == "MinCapacity is 2"
