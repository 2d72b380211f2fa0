"""The breaker's states, the share of a returning instance, and both for a variant's instances."""

import pytest

from torchmoor.config.recovery import RecoverySettings
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.errors import ConfigError
from torchmoor.proxy.instances import recovery as recovery_module
from torchmoor.proxy.instances.breaker import Breaker, BreakerState
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.recovery import Recovery, share_after
from torchmoor.proxy.instances.registry import Registry

SETTINGS = RecoverySettings(max_failures=3, min_open_s=2, max_open_s=8, slow_start_s=10, least_share=0.1)


def fail(breaker: Breaker, times: int = 1, *, now: float = 0.0, may_open: bool = True) -> BreakerState:
    for _ in range(times):
        breaker.on_failure(now, may_open=may_open)
    return breaker.state


def test_breaker_opens_after_failures_in_a_row() -> None:
    breaker = Breaker(SETTINGS)

    assert fail(breaker, 2) is BreakerState.CLOSED
    breaker.on_success()
    assert fail(breaker, 2) is BreakerState.CLOSED
    assert fail(breaker) is BreakerState.OPEN


def test_breaker_that_may_not_open_opens_as_soon_as_it_may() -> None:
    """Failures count while the breaker must not open, so that it opens as soon as it may."""
    breaker = Breaker(SETTINGS)

    assert fail(breaker, 9, may_open=False) is BreakerState.CLOSED
    assert fail(breaker) is BreakerState.OPEN


def test_open_breaker_tries_again_after_an_interval_that_doubles() -> None:
    """It tries again after 2, 4, 8 and again 8 seconds; failures while it is open do not prolong it."""
    breaker = Breaker(SETTINGS)
    fail(breaker, 3, now=100)
    now = 100.0

    for interval in (2, 4, 8, 8):
        fail(breaker, now=now + 1)
        assert not breaker.tick(now + interval - 0.1)
        assert breaker.tick(now + interval)
        assert breaker.state is BreakerState.HALF_OPEN
        assert not breaker.tick(now + interval)
        now += interval
        assert fail(breaker, now=now) is BreakerState.OPEN


@pytest.mark.parametrize("is_half_open", [False, True])
def test_success_closes_the_breaker_and_forgets_the_intervals(is_half_open: bool) -> None:
    """Any success closes the breaker, also one while it is open."""
    breaker = Breaker(SETTINGS)
    fail(breaker, 3)
    breaker.tick(2)
    fail(breaker, now=2)
    if is_half_open:
        breaker.tick(6)

    breaker.on_success()

    assert (breaker.state, breaker.num_failures) == (BreakerState.CLOSED, 0)
    fail(breaker, 3, now=10)
    assert breaker.tick(12)


def test_share_grows_from_the_least_to_all() -> None:
    """The share grows linearly from its minimum to 1 and stays within this range."""
    shares = [share_after(elapsed, SETTINGS) for elapsed in (-1, 0, 5, 10, 11)]

    assert shares == [0.1, 0.1, 0.55, 1.0, 1.0]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(number: int, clock: Clock) -> tuple[Registry, Recovery, list[Instance]]:
    """Return `number` ready instances of one variant, with breakers of SETTINGS."""
    registry = Registry([EndpointSettings(name="llava", variants=(VariantSettings(model="llava"),))])
    recovery = Recovery(registry, SETTINGS, clock=clock)
    instances = [start(registry, f"i{index}") for index in range(number)]
    return registry, recovery, instances


def start(registry: Registry, name: str) -> Instance:
    instance = Instance(name=name, endpoint="llava", model="llava", port=1)
    registry.add(instance)
    registry.set_state(name, InstanceState.READY)
    return instance


def ready_names(registry: Registry) -> list[str]:
    pool = registry.variant_of(registry.instances()[0]).pool
    pool.check_integrity()
    return sorted(instance.name for instance in pool.open_instances)


def test_instance_whose_answers_fail_gets_one_trial_at_a_time() -> None:
    """An open breaker admits no request, a half-open one a single trial, and a closed one the instance's share."""
    clock = Clock()
    registry, recovery, (bad, _) = make(2, clock)
    for _ in range(3):
        recovery.on_failed(bad)
    assert ready_names(registry) == ["i1"]

    clock.now = 2.0
    recovery.tick()

    assert ready_names(registry) == ["i0", "i1"]
    lease = bad.lease()
    assert ready_names(registry) == ["i1"]
    lease.release()
    recovery.on_answered(bad)
    lease = bad.lease()
    assert ready_names(registry) == ["i0", "i1"]
    assert (bad.share, bad.load) == (0.1, 10)
    lease.release()
    clock.now = 12.0
    recovery.tick()
    assert bad.share == 1.0
    recovery.on_failed(bad)
    recovery.on_answered(bad)
    assert bad.share == 1.0


def test_request_from_before_is_no_trial() -> None:
    """A long stream that began before the breaker opened keeps no trial out, and its end admits no second one."""
    clock = Clock()
    registry, recovery, (bad, _) = make(2, clock)
    streams = [bad.lease(), bad.lease()]
    for _ in range(3):
        recovery.on_failed(bad)
    late = bad.lease()  # of a session without a journal, which no other instance can serve

    clock.now = 2.0
    recovery.tick()
    assert ready_names(registry) == ["i0", "i1"]
    trial = bad.lease()
    assert ready_names(registry) == ["i1"]
    for lease in (*streams, late):
        assert not lease.try_end_trial()
        lease.release()
    assert ready_names(registry) == ["i1"]
    assert trial.try_end_trial()
    assert ready_names(registry) == ["i0", "i1"]
    trial.release()
    assert bad.outstanding == 0


def test_at_most_half_of_the_instances_are_cut_off() -> None:
    """At most half of the instances are cut off, because the cause of more failures is elsewhere.

    A single one never is.
    """
    registry, recovery, instances = make(3, Clock())
    for instance in instances:
        for _ in range(9):
            recovery.on_failed(instance)
    assert ready_names(registry) == ["i1", "i2"]

    alone_registry, alone_recovery, (alone,) = make(1, Clock())
    for _ in range(9):
        alone_recovery.on_failed(alone)
    assert ready_names(alone_registry) == ["i0"]


def test_instance_that_was_down_comes_back_slowly() -> None:
    """An instance that was down returns with a growing share, also as a new process; a first start does not."""
    clock = Clock()
    registry, recovery, (first, second) = make(2, clock)
    assert first.share == second.share == 1.0

    registry.set_state("i0", InstanceState.DOWN)
    registry.set_state("i0", InstanceState.READY)
    again = start(registry, "i1")

    assert (first.share, again.share) == (0.1, 0.1)
    clock.now = 5.0
    recovery.tick()
    assert first.share == again.share == 0.55
    registry.set_state("i0", InstanceState.DOWN)
    clock.now = 6.0
    recovery.tick()
    assert (first.share, round(again.share, 2)) == (0.55, 0.64)
    registry.set_state("i0", InstanceState.READY)
    assert first.share == 0.1


def test_instance_that_was_let_go_comes_back_at_once() -> None:
    """An instance resumed after a scale-in gets its whole share at once, because it has not failed."""
    registry, _, (_, second) = make(2, Clock())
    registry.drain("i1")
    registry.dismiss("i1")

    again = start(registry, "i1")

    assert (second is again, again.share) == (False, 1.0)


def test_a_limited_number_of_failed_instances_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods that are replaced get new names, so the old ones would add up. Those that failed last are kept."""
    monkeypatch.setattr(recovery_module, "MAX_FAILED", 3)
    registry, _, _ = make(1, Clock())
    names = [f"pod-{number}" for number in range(5)]
    for name in names:
        start(registry, name)
        registry.remove(name)

    assert [start(registry, name).share for name in names] == [1.0, 1.0, 0.1, 0.1, 0.1]


def test_instance_that_goes_down_starts_with_a_closed_breaker() -> None:
    """An instance that goes down starts with a closed breaker, since probes now decide."""
    registry, recovery, (bad, _) = make(2, Clock())
    for _ in range(3):
        recovery.on_failed(bad)

    registry.set_state("i0", InstanceState.DOWN)

    assert bad.breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize("wrong", [{"max_failures": 0}, {"min_open_s": 100}, {"least_share": 2}, {"retry_fraction": 2}])
def test_bad_settings_are_refused(wrong: dict[str, int]) -> None:
    """ConfigError names the key."""
    with pytest.raises(ConfigError, match=r"recovery\."):
        RecoverySettings(**wrong)


def test_late_results_of_an_instance_that_was_replaced_do_not_count() -> None:
    """The next of its name has failures of its own."""
    clock = Clock()
    registry, recovery, (_, old) = make(2, clock)
    new = start(registry, old.name)
    told: list[Instance] = []
    registry.listen(told.append)
    for _ in range(2):
        recovery.on_failed(new)
    for _ in range(3):
        recovery.on_failed(old)
    recovery.on_answered(old)

    assert told == []
    recovery.on_failed(new)
    assert new.breaker.state is BreakerState.OPEN


def test_a_late_failure_may_follow_the_end_of_an_endpoint() -> None:
    """An asynchronous request, for example, ends with its instance."""
    registry, recovery, instances = make(1, Clock())
    endpoint = registry.get_endpoint("llava")
    registry.retire(endpoint)
    registry.remove(instances[0].name)
    registry.forget(endpoint)

    recovery.on_failed(instances[0])
    recovery.on_answered(instances[0])
