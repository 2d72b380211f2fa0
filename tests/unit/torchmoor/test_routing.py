"""Strategies as pure functions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

from torchmoor.routing.least_outstanding import LeastOutstanding
from torchmoor.routing.random import RandomChoice
from torchmoor.routing.sessions import rendezvous
from torchmoor.routing.strategy import FIRST_ATTEMPT, RouteRequest


@dataclass
class FakeCandidate:
    name: str
    outstanding: int = 0
    capacity: int = 4
    last_chosen: int = 0
    is_ready: bool = True


def test_least_outstanding_takes_the_least_loaded() -> None:
    """The fewest outstanding invocations win."""
    instances = [FakeCandidate("a", 2), FakeCandidate("b", 1), FakeCandidate("c", 3)]

    chosen = LeastOutstanding().choose(FIRST_ATTEMPT, instances)

    assert chosen is instances[1]


def test_least_outstanding_breaks_ties_by_the_longest_unchosen() -> None:
    """Equal load spreads."""
    instances = [
        FakeCandidate("a", last_chosen=3),
        FakeCandidate("b", last_chosen=1),
        FakeCandidate("c", last_chosen=2),
    ]

    chosen = LeastOutstanding().choose(FIRST_ATTEMPT, instances)

    assert chosen is instances[1]


def test_strategies_leave_out_full_unready_and_tried_instances() -> None:
    """None is the answer when nobody can take the request."""
    instances = [
        FakeCandidate("full", outstanding=4),
        FakeCandidate("down", is_ready=False),
        FakeCandidate("tried"),
    ]
    request = RouteRequest(excluded=frozenset({"tried"}))

    for strategy in (LeastOutstanding(), RandomChoice(Random(1))):
        assert strategy.choose(request, instances) is None
        assert strategy.choose(request, []) is None
        instances.append(FakeCandidate("free", outstanding=3))
        assert strategy.choose(request, instances) is instances.pop()


def test_random_reaches_every_instance() -> None:
    """Each is as likely as the others."""
    instances = [FakeCandidate(name) for name in "abcd"]
    strategy = RandomChoice(Random(1))

    counts = Counter(chosen.name for _ in range(4000) if (chosen := strategy.choose(FIRST_ATTEMPT, instances)))

    assert len(counts) == 4
    assert all(900 < count < 1100 for count in counts.values())


def test_rendezvous_moves_only_the_sessions_of_the_instance_that_left() -> None:
    """And the order in which a proxy knows the instances does not matter."""
    instances = [FakeCandidate(name) for name in "abcd"]
    sessions = [f"session-{number}" for number in range(400)]
    before = {session: rendezvous(session, instances) for session in sessions}

    instances[1].is_ready = False
    after = {session: rendezvous(session, instances[::-1]) for session in sessions}

    moved = {session for session in sessions if before[session] is not after[session]}
    assert moved == {session for session in sessions if before[session] is instances[1]}
    assert all(60 < count < 140 for count in Counter(chosen.name for chosen in before.values() if chosen).values())


def test_rendezvous_without_a_ready_instance_is_none() -> None:
    """Nobody can take the session."""
    assert rendezvous("session", [FakeCandidate("a", is_ready=False)]) is None
