"""Instances in order of their load."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.torchmoor.routing.candidates import FakeCandidate, change, named, pool_of

NAMES = ["a", "b", "c", "d"]


def test_least_outstanding_is_the_least_loaded_that_is_open() -> None:
    """Full, unready and excluded instances are passed over."""
    full = FakeCandidate("full", outstanding=1, capacity=1)
    down = FakeCandidate("down", is_ready=False)
    one, two = FakeCandidate("one", 1), FakeCandidate("two", 2)
    pool = pool_of(full, down, two, one)

    assert pool.find_least_loaded() is one
    assert pool.find_least_loaded(frozenset({"one"})) is two
    assert pool.find_least_loaded(frozenset({"one", "two"})) is None


def test_ties_go_to_the_one_that_has_waited_longest() -> None:
    """Ties go to the instance that was chosen longest ago, so that equal load spreads."""
    instances = named(3)
    pool = pool_of(*instances)
    chosen = []

    for _ in range(6):
        found = pool.find_least_loaded()
        assert found is not None
        change(pool, found, outstanding=1)
        chosen.append(found.name)
        change(pool, found, outstanding=0)

    assert chosen == ["i0", "i1", "i2"] * 2


def test_instance_that_ends_a_request_is_found_below_the_others() -> None:
    """After a request ends, its instance is found, because the search starts at the lowest changed level."""
    instances = named(2)
    pool = pool_of(*instances)
    for instance in instances:
        change(pool, instance, outstanding=2)
    assert pool.find_least_loaded() is instances[0]

    change(pool, instances[1], outstanding=1)

    assert pool.find_least_loaded() is instances[1]


def test_random_reaches_every_open_instance_and_no_other() -> None:
    """Every open instance is drawn with equal probability, and no other."""
    instances = named(5)
    pool = pool_of(*instances)
    change(pool, instances[2], is_ready=False)
    rng = Random(1)

    counts = Counter(found.name for _ in range(4000) if (found := pool.find_random(rng)))

    assert set(counts) == {"i0", "i1", "i3", "i4"}
    assert all(900 < count < 1100 for count in counts.values())


def test_random_finds_the_only_one_that_is_not_excluded() -> None:
    """The only instance that is not excluded is found, however unlikely by chance; without one the result is None."""
    pool = pool_of(*named(50))
    rng = Random(1)
    all_but_one = frozenset(f"i{index}" for index in range(49))

    assert {pool.find_random(rng, all_but_one).name for _ in range(20)} == {"i49"}
    assert pool.find_random(rng, all_but_one | {"i49"}) is None
    assert pool_of().find_random(rng) is None


def test_walk_meets_every_instance_once_in_an_order_of_the_key() -> None:
    """The walk's order does not depend on the order in which instances were added, so that all proxies agree."""
    forwards, backwards = pool_of(*named(5)), pool_of(*reversed(named(5)))

    for key in (0, 1 << 63, (1 << 64) - 1):
        order = [instance.name for instance in forwards.walk(key)]
        assert sorted(order) == [f"i{index}" for index in range(5)]
        assert order == [instance.name for instance in backwards.walk(key)]
    assert list(pool_of().walk(5)) == []


def test_instance_that_leaves_moves_only_its_own_keys() -> None:
    """If an instance leaves, other instances keep their keys and what they cached."""
    instances = named(5)
    pool = pool_of(*instances)
    rng = Random(2)
    keys = [rng.getrandbits(64) for _ in range(2000)]
    before = {key: next(pool.walk(key)) for key in keys}

    pool.remove(instances[3])

    assert {key for key in keys if next(pool.walk(key)) is not before[key]} == {
        key for key in keys if before[key] is instances[3]
    }
    assert all(250 < count < 550 for count in Counter(found.name for found in before.values()).values())


def test_change_of_an_instance_that_was_removed_is_ignored() -> None:
    """A change of a removed instance has no effect, even if another one has its name now."""
    old, new = FakeCandidate("a", outstanding=1), FakeCandidate("a")
    pool = pool_of(old)
    pool.remove(old)
    change(pool, old, outstanding=0)
    assert pool.find_least_loaded() is None

    pool.add(new)
    change(pool, old, is_ready=False)

    assert pool.find_least_loaded() is new
    assert pool.find("a") is new
    pool.check_integrity()


@given(
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.sampled_from(["up", "down", "toggle", "remove", "add"]), st.booleans()),
        max_size=60,
    )
)
def test_pool_agrees_with_a_search_of_all_instances(steps: list[tuple[str, str, bool]]) -> None:
    """After any changes, the pool finds what a search of all instances would."""
    known = {name: FakeCandidate(name, capacity=3) for name in NAMES}
    pool = pool_of(*known.values())
    for name, step, ask in steps:
        instance = known.get(name)
        if step == "add" and instance is None:
            known[name] = FakeCandidate(name, capacity=3)
            pool.add(known[name])
        elif instance is not None and step == "remove":
            pool.remove(known.pop(name))
        elif instance is not None and step == "up":
            change(pool, instance, outstanding=instance.outstanding + 1)
        elif instance is not None and step == "down":
            change(pool, instance, outstanding=max(0, instance.outstanding - 1))
        elif instance is not None and step == "toggle":
            change(pool, instance, is_ready=not instance.is_ready)
        pool.check_integrity()
        if ask:
            open_loads = [i.outstanding for i in known.values() if i.is_ready and i.outstanding < i.capacity]
            found = pool.find_least_loaded()
            assert (None if found is None else found.outstanding) == min(open_loads, default=None)


@pytest.mark.parametrize(("attribute", "value"), [("outstanding", 2), ("capacity", 0), ("name", "i2")])
def test_integrity_check_notices_a_pool_that_was_not_told(attribute: str, value: object) -> None:
    """The integrity check compares the pool with the instances and finds a change without notification."""
    instances = named(2)
    pool = pool_of(*instances)
    pool.check_integrity()

    setattr(instances[0], attribute, value)

    with pytest.raises(RuntimeError):
        pool.check_integrity()


def test_all_proxies_walk_in_the_same_order() -> None:
    """A key's order is fixed, because proxies of several versions share a fleet; the last order wraps around."""
    pool = pool_of(*(FakeCandidate(name) for name in "dcba"))

    orders = ["".join(each.name for each in pool.walk(key)) for key in (0, 1 << 62, 2 << 62, 3 << 62, (1 << 64) - 1)]

    assert orders == ["cbad", "bcad", "adcb", "dbac", "cbad"]
