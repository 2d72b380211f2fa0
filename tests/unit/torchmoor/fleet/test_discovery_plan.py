"""Decisions from DNS answers."""

from collections.abc import Mapping

import pytest

from torchmoor.fleet.discovery_plan import DiscoveryPlan, DnsTarget, InstanceAddress, KnownInstance, make_plan

HERE, THERE, ELSEWHERE = (
    InstanceAddress("10.0.0.1", 85),
    InstanceAddress("10.0.0.2", 85),
    InstanceAddress("10.0.0.3", 85),
)


def target(name: str, *places: InstanceAddress, port: int = 85) -> DnsTarget:
    return DnsTarget(name, port, tuple(place.host for place in places))


def plan(
    *targets: DnsTarget,
    known: Mapping[str, KnownInstance] | None = None,
    absences: Mapping[str, int] | None = None,
    taken: str = "",
    max_instances: int = 10,
) -> DiscoveryPlan:
    return make_plan(
        targets, known or {}, absences or {}, is_taken=lambda name: name == taken, max_instances=max_instances
    )


def test_who_is_named_and_unknown_joins() -> None:
    """An unknown instance in an answer joins at its first address, with the record's port."""
    found = plan(target("a", HERE), target("b", THERE, ELSEWHERE, port=86), known={})

    assert found.join == {"a": HERE, "b": InstanceAddress(THERE.host, 86)}
    assert found.is_settled
    assert [found.replace, found.drain, found.keep, found.notes] == [{}, [], [], []]


def test_who_is_missed_once_stays_and_leaves_when_missed_twice() -> None:
    """An instance leaves after two answers without it, because servers behind one address may be out of date."""
    known = {"a": KnownInstance(HERE), "b": KnownInstance(THERE)}

    first = plan(target("a", HERE), known=known)
    second = plan(target("a", HERE), known=known, absences=first.absences)
    third = plan(
        target("a", HERE), known={**known, "b": KnownInstance(THERE, is_draining=True)}, absences=second.absences
    )

    assert (first.drain, first.is_settled) == ([], False)
    assert (second.drain, second.is_settled) == (["b"], True)
    assert (third.drain, third.is_settled) == ([], True)


def test_who_is_named_again_begins_anew() -> None:
    """An answer that names an instance resets its count of misses."""
    known = {"a": KnownInstance(HERE), "b": KnownInstance(THERE)}

    first = plan(target("a", HERE), known=known)
    second = plan(target("a", HERE), target("b", THERE), known=known, absences=first.absences)
    third = plan(target("a", HERE), known=known, absences=second.absences)

    assert second.absences == {}
    assert third.drain == []


def test_who_leaves_and_is_named_again_is_called_back() -> None:
    """A leaving instance that is named again is resumed, unless another one has its name."""
    leaving = KnownInstance(HERE, is_draining=True)

    assert plan(target("a", HERE), known={"a": leaving}).keep == ["a"]
    assert plan(target("a"), known={"a": leaving}).keep == ["a"]


def test_an_answer_that_names_nobody_takes_no_serving_instance() -> None:
    """An empty answer keeps serving instances, since no others could replace them.

    Others leave, as for a scale-in to zero.
    """
    known = {"a": KnownInstance(HERE), "b": KnownInstance(THERE, is_serving=False)}

    found = plan(known=known, absences={"a": 2, "b": 2})

    assert found.drain == ["b"]
    assert found.notes == ["the answer names no instance: serving instances stay"]


def test_another_address_is_a_replacement() -> None:
    """Another address or port replaces an instance; while the old one leaves, the newest answer applies."""
    moving = KnownInstance(HERE, is_draining=True, successor=THERE)

    assert plan(target("a", THERE), known={"a": KnownInstance(HERE)}).replace == {"a": THERE}
    assert plan(target("a", HERE, port=86), known={"a": KnownInstance(HERE)}).replace == {
        "a": InstanceAddress(HERE.host, 86)
    }
    assert plan(target("a", THERE), known={"a": moving}).replace == {}
    assert plan(target("a", ELSEWHERE), known={"a": moving}).replace == {"a": ELSEWHERE}
    same = KnownInstance(HERE, is_draining=True, successor=HERE)  # with other settings
    assert plan(target("a", HERE), known={"a": same}).keep == []
    back = plan(target("a", HERE), known={"a": moving})
    assert (back.replace, back.keep) == ({}, ["a"])


def test_one_of_several_addresses_is_kept_while_it_serves() -> None:
    """One of several addresses is kept while it serves; then the next is used, in turn."""
    both = target("a", HERE, THERE)

    assert plan(both, known={"a": KnownInstance(THERE)}).replace == {}
    assert plan(both, known={"a": KnownInstance(HERE, is_serving=False)}).replace == {"a": THERE}
    assert plan(both, known={"a": KnownInstance(THERE, is_serving=False)}).replace == {"a": HERE}
    assert plan(target("a", HERE), known={"a": KnownInstance(HERE, is_serving=False)}).replace == {}


def test_a_target_whose_address_is_not_found_stays_as_it_is_known() -> None:
    """An instance whose address was not found in time keeps the known one."""
    found = plan(target("a"), target("b"), known={"a": KnownInstance(HERE)})

    assert [found.join, found.replace, found.drain] == [{}, {}, []]
    assert found.absences == {}
    assert found.notes == ["b has no address"]


@pytest.mark.parametrize(
    ("bad", "note"),
    [
        (target("un_der", THERE), "'un_der' cannot be an instance's name"),
        (target("a" * 64, THERE), f"'{'a' * 64}' cannot be an instance's name"),
        (target("", THERE), "'' cannot be an instance's name"),
        (target("b", THERE, port=0), "b has port 0"),
        (target("static", THERE), "static is already an instance from another source"),
        (target("a", THERE, port=86), "a is listed twice"),
    ],
)
def test_what_cannot_be_an_instance_is_left_out(bad: DnsTarget, note: str) -> None:
    """Records that cannot be instances are skipped with a log message; the others apply."""
    found = plan(target("a", HERE), bad, taken="static")

    assert found.join == {"a": HERE}
    assert found.notes == [note]


def test_no_more_than_so_many_instances() -> None:
    """The number of instances is limited, and known ones come first."""
    found = plan(
        *(target(f"a{number}", HERE) for number in range(5)), known={"a4": KnownInstance(HERE)}, max_instances=3
    )

    assert list(found.join) == ["a0", "a1"]
    assert found.drain == []
    assert found.notes == ["more than max_instances (3) are listed"]
