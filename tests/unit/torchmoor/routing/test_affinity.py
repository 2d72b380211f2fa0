"""Affinity: a key's requests stay on one instance, unless it is much busier than the others."""

import pytest

from tests.unit.torchmoor.routing.candidates import FakeCandidate, change, named, pool_of
from tests.unit.torchmoor.routing.replay import replay
from torchmoor.proxy.routing.affinity import Affinity
from torchmoor.proxy.routing.prefix_aware import PrefixAware
from torchmoor.proxy.routing.strategy import StrategyRequest


def affinity(free_requests: int = 16) -> Affinity:
    return Affinity(free_requests=free_requests, load_factor=1.25)


def owner(key: int, *instances: FakeCandidate) -> str:
    pick = affinity().choose(StrategyRequest(affinity=key), pool_of(*instances))
    assert pick.reason == "affinity"
    return pick.instance.name


def test_all_proxies_agree_and_only_a_leaving_instances_keys_move() -> None:
    """The order of instances in a proxy does not change a key's instance.

    A leaving instance moves only its own keys.
    """
    instances = named(5)
    keys = [number * 0x9E3779B97F4A7C15 % (1 << 64) for number in range(400)]
    owners = {key: owner(key, *instances) for key in keys}

    assert owners == {key: owner(key, *reversed(instances)) for key in keys}
    assert set(owners.values()) == {instance.name for instance in instances}
    for key, name in owners.items():
        assert name == "i0" or owner(key, *instances[1:]) == name


def test_without_a_key_the_strategy_decides() -> None:
    """Without a key affinity chooses no instance, and the strategy decides."""
    assert affinity().choose(StrategyRequest(), pool_of(*named(2))) is None


def test_a_busy_instance_keeps_its_keys_up_to_the_bound() -> None:
    """The bound is the free requests, or under more load 1.25 times the mean.

    Beyond it, the key's next instance is used.
    """
    instances = [FakeCandidate(f"i{index}", capacity=64) for index in range(4)]
    pool, request = pool_of(*instances), StrategyRequest(affinity=7)
    first = affinity(4).choose(request, pool)
    home = first.instance

    for load, others, reason in ((3, 0, "affinity"), (4, 0, "affinity-overflow"), (11, 10, "affinity")):
        for instance in instances:
            change(pool, instance, outstanding=others)
        change(pool, home, outstanding=load)
        pick = affinity(4).choose(request, pool)
        assert (pick.reason, pick.instance is home) == (reason, reason == "affinity")

    change(pool, home, outstanding=14)
    assert affinity(4).choose(request, pool) != first
    pool.check_integrity()


@pytest.mark.parametrize("changes", [{"outstanding": 4}, {"is_ready": False}])
def test_a_full_or_unready_instance_is_passed_over(changes: dict[str, object]) -> None:
    """The next instance in the order serves a full or unready one's keys until it is back."""
    instances = named(3)
    pool, request = pool_of(*instances), StrategyRequest(affinity=3)
    first = affinity().choose(request, pool)

    change(pool, first.instance, **changes)
    second = affinity().choose(request, pool)
    assert second.instance is not first.instance
    assert second == affinity().choose(request, pool)

    change(pool, first.instance, outstanding=0, is_ready=True)
    assert affinity().choose(request, pool) == first


@pytest.mark.parametrize("seed", range(5))
def test_turns_of_100_conversations_find_their_prefix(seed: int) -> None:
    """With 4 instances and 2 proxies, turns find their prefix; a single instance would hardly compute fewer tokens."""
    outcome = replay(affinity().choose, think_time=5_000, seed=seed)

    assert outcome.found >= 0.95
    assert outcome.num_computed <= 1.05 * outcome.num_least


@pytest.mark.parametrize("seed", range(5))
def test_under_overload_affinity_is_not_worse_than_prefix_aware(seed: int) -> None:
    """Under overload, with equal thresholds, affinity finds more prefixes than PREFIX_AWARE and ends earlier."""
    threshold = 4
    plain = PrefixAware(prefix_length=1024, concurrency_threshold=threshold)

    with_keys = replay(affinity(threshold).choose, num_conversations=200, seed=seed)
    without = replay(plain.choose, num_conversations=200, seed=seed)

    assert with_keys.num_found > without.num_found
    assert with_keys.num_computed < without.num_computed
    assert with_keys.ended_at < without.ended_at
