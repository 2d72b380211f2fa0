"""What follows from DNS's answers."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from torchmoor.fleet.discovery_plan import Known, Place, Plan, Target, make_plan

HERE, THERE, ELSEWHERE = Place("10.0.0.1", 85), Place("10.0.0.2", 85), Place("10.0.0.3", 85)


def target(name: str, *places: Place, port: int = 85) -> Target:
    return Target(name, port, tuple(place.host for place in places))


def plan(
    *targets: Target,
    known: Mapping[str, Known] | None = None,
    absences: Mapping[str, int] | None = None,
    taken: str = "",
    max_instances: int = 10,
) -> Plan:
    return make_plan(
        targets, known or {}, absences or {}, is_taken=lambda name: name == taken, max_instances=max_instances
    )


def test_who_is_named_and_unknown_joins() -> None:
    """At its first address, with the port of the record."""
    found = plan(target("a", HERE), target("b", THERE, ELSEWHERE, port=86), known={})

    assert found.join == {"a": HERE, "b": Place(THERE.host, 86)}
    assert found.is_sure
    assert [found.replace, found.leave, found.call_back, found.notes] == [{}, [], [], []]


def test_who_is_missed_once_stays_and_leaves_when_missed_twice() -> None:
    """One server behind an address may know of a change later than another."""
    known = {"a": Known(HERE), "b": Known(THERE)}

    first = plan(target("a", HERE), known=known)
    second = plan(target("a", HERE), known=known, absences=first.absences)
    third = plan(target("a", HERE), known={**known, "b": Known(THERE, is_leaving=True)}, absences=second.absences)

    assert (first.leave, first.is_sure) == ([], False)
    assert (second.leave, second.is_sure) == (["b"], True)
    assert (third.leave, third.is_sure) == ([], True)


def test_who_is_named_again_begins_anew() -> None:
    """An answer that flaps never adds up."""
    known = {"a": Known(HERE), "b": Known(THERE)}

    first = plan(target("a", HERE), known=known)
    second = plan(target("a", HERE), target("b", THERE), known=known, absences=first.absences)
    third = plan(target("a", HERE), known=known, absences=second.absences)

    assert second.absences == {}
    assert third.leave == []


def test_who_leaves_and_is_named_again_is_called_back() -> None:
    """If nobody has come in its place."""
    leaving = Known(HERE, is_leaving=True)

    assert plan(target("a", HERE), known={"a": leaving}).call_back == ["a"]
    assert plan(target("a"), known={"a": leaving}).call_back == ["a"]


def test_an_answer_that_names_nobody_takes_no_serving_instance() -> None:
    """There is nobody else for the work; whoever does not serve is let go, as after a scale-in to none."""
    known = {"a": Known(HERE), "b": Known(THERE, is_serving=False)}

    found = plan(known=known, absences={"a": 2, "b": 2})

    assert found.leave == ["b"]
    assert found.notes == ["the answer names nobody: instances that answer stay"]


def test_another_address_is_a_replacement() -> None:
    """Also another port; and while the old one still leaves, the newest answer counts."""
    moving = Known(HERE, is_leaving=True, successor=THERE)

    assert plan(target("a", THERE), known={"a": Known(HERE)}).replace == {"a": THERE}
    assert plan(target("a", HERE, port=86), known={"a": Known(HERE)}).replace == {"a": Place(HERE.host, 86)}
    assert plan(target("a", THERE), known={"a": moving}).replace == {}
    assert plan(target("a", ELSEWHERE), known={"a": moving}).replace == {"a": ELSEWHERE}
    same = Known(HERE, is_leaving=True, successor=HERE)  # with other settings
    assert plan(target("a", HERE), known={"a": same}).call_back == []
    back = plan(target("a", HERE), known={"a": moving})
    assert (back.replace, back.call_back) == ({}, ["a"])


def test_one_of_several_addresses_is_kept_while_it_serves() -> None:
    """Then the next is tried, and after the last the first."""
    both = target("a", HERE, THERE)

    assert plan(both, known={"a": Known(THERE)}).replace == {}
    assert plan(both, known={"a": Known(HERE, is_serving=False)}).replace == {"a": THERE}
    assert plan(both, known={"a": Known(THERE, is_serving=False)}).replace == {"a": HERE}
    assert plan(target("a", HERE), known={"a": Known(HERE, is_serving=False)}).replace == {}


def test_a_target_whose_address_is_not_found_stays_as_it_is_known() -> None:
    """Its question had no answer in time."""
    found = plan(target("a"), target("b"), known={"a": Known(HERE)})

    assert [found.join, found.replace, found.leave] == [{}, {}, []]
    assert found.absences == {}
    assert found.notes == ["b has no address"]


@pytest.mark.parametrize(
    ("bad", "note"),
    [
        (target("un_der", THERE), "'un_der' cannot be an instance's name"),
        (target("a" * 64, THERE), f"'{'a' * 64}' cannot be an instance's name"),
        (target("", THERE), "'' cannot be an instance's name"),
        (target("b", THERE, port=0), "b has port 0"),
        (target("static", THERE), "static is an instance already, and not by this name"),
        (target("a", THERE, port=86), "a is named twice"),
    ],
)
def test_what_cannot_be_an_instance_is_left_out(bad: Target, note: str) -> None:
    """With a note; the rest of the answer counts."""
    found = plan(target("a", HERE), bad, taken="static")

    assert found.join == {"a": HERE}
    assert found.notes == [note]


def test_no_more_than_so_many_instances() -> None:
    """Those that are known come first, so that a long answer takes nobody's place."""
    found = plan(*(target(f"a{number}", HERE) for number in range(5)), known={"a4": Known(HERE)}, max_instances=3)

    assert list(found.join) == ["a0", "a1"]
    assert found.leave == []
    assert found.notes == ["more than max_instances (3) are named"]
