"""The queue of late binding: the order of requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmoor.proxy.routing.waiting import Ticket, WaitingBytes, WaitingQueue


def make_queue(max_waiting: int = 10, max_bytes: int = 1000) -> WaitingQueue[str]:
    return WaitingQueue(max_waiting=max_waiting, total=WaitingBytes(max_bytes))


def ticket(owner: str, deadline: float = 0.0, *, principal: str = "", home: str | None = None) -> Ticket[str]:
    return Ticket(owner, deadline=deadline, num_bytes=1, principal=principal.encode(), home=home)


def anything(ticket: Ticket[str]) -> bool:
    """Accept each ticket."""
    return True


def fill(queue: WaitingQueue[str], *tickets: Ticket[str]) -> None:
    for each in tickets:
        assert queue.try_add(each)
    queue.check_integrity()


def drain(queue: WaitingQueue[str]) -> list[str]:
    """Return all tickets that any instance can serve, in order."""
    owners = []
    while (popped := queue.pop_other(anything)) is not None:
        owners.append(popped.owner)
        queue.check_integrity()
    return owners


def test_sooner_deadline_goes_first_then_sooner_arrival() -> None:
    """The earlier deadline goes first, then the earlier arrival; a retried request keeps its deadline."""
    queue = make_queue()
    fill(queue, ticket("late", 9), ticket("soon", 3), ticket("first of two", 5), ticket("second of two", 5))

    assert drain(queue) == ["soon", "first of two", "second of two", "late"]


def test_principals_take_turns() -> None:
    """Principals take turns, so that many requests of one do not delay another's few."""
    queue = make_queue()
    fill(queue, *(ticket(f"a{number}", number, principal="a") for number in range(4)))
    fill(queue, ticket("b0", 50, principal="b"), ticket("c0", 60, principal="c"), ticket("b1", 70, principal="b"))

    assert drain(queue) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_turn_waits_for_its_own_instance_and_blocks_nobody() -> None:
    """A turn waits for its own instance while others pass it, and comes first there."""
    queue = make_queue()
    fill(queue, ticket("turn", 1, home="x"), ticket("new", 2), ticket("later turn", 5, home="x"))

    assert queue.pop_turn("y", anything) is None
    assert [queue.pop_turn("x", anything).owner, drain(queue), queue.pop_turn("x", anything).owner] == [
        "turn",
        ["new"],
        "later turn",
    ]
    assert queue.pop_turn("x", anything) is None
    assert queue.num_waiting == 0


def test_one_that_cannot_go_is_passed_over_and_stays() -> None:
    """A ticket that has already tried the free instance is skipped and stays."""
    queue = make_queue()
    fill(queue, ticket("stuck", 1), ticket("free", 2), ticket("other", 3, principal="b"))

    popped = queue.pop_other(lambda each: each.owner != "stuck")

    assert popped.owner == "free"
    assert queue.pop_other(lambda each: False) is None
    assert drain(queue) == ["other", "stuck"]


def test_queue_is_bounded_by_number_and_by_bytes_of_all_queues() -> None:
    """The number and the bytes of all queues are limited.

    A refusal changes nothing, and a ticket that leaves makes room.
    """
    total = WaitingBytes(100)
    one, other = WaitingQueue[str](max_waiting=2, total=total), WaitingQueue[str](max_waiting=9, total=total)
    large = Ticket("large", deadline=0.0, num_bytes=90)
    fill(one, large, ticket("small"))

    assert not one.try_add(ticket("one too many"))
    assert not other.try_add(Ticket("too large", deadline=0.0, num_bytes=10))
    assert other.try_add(Ticket("fits", deadline=0.0, num_bytes=9))
    assert one.remove(large)
    assert not one.remove(large)

    assert (one.num_waiting, other.num_waiting, total.used_bytes) == (1, 1, 10)
    assert one.try_add(ticket("fits now", home="x"))


def test_ticket_that_left_is_not_served() -> None:
    """A removed ticket is not served from either line; removing one of an unknown line is not an error."""
    queue = make_queue()
    gone, stays = ticket("gone", 1, home="x"), ticket("stays", 2, home="x")
    fill(queue, gone, stays)

    assert queue.remove(gone)
    assert not queue.remove(ticket("stranger", 3, home="nowhere"))
    assert not queue.remove(ticket("stranger", 3))

    assert queue.pop_turn("x", anything) is stays


def test_turn_that_its_instance_cannot_hold_is_passed_over_and_stays() -> None:
    """A turn whose long body does not fit its instance waits, and shorter ones of this instance continue."""
    queue = make_queue()
    fill(queue, ticket("long", 1, home="x"), ticket("short", 2, home="x"))

    popped = queue.pop_turn("x", lambda each: each.owner == "short")

    assert popped.owner == "short"
    assert queue.pop_turn("x", lambda each: each.owner == "short") is None
    assert queue.turns() == {"x": 1}


def test_turns_of_an_instance_that_is_gone_are_given_back() -> None:
    """All turns of a removed instance are returned for another choice; other tickets stay."""
    queue = make_queue()
    fill(queue, ticket("one", home="x"), ticket("two", home="x"), ticket("else", home="y"), ticket("new"))

    assert [each.owner for each in queue.take_turns("x")] == ["one", "two"]
    assert queue.take_turns("x") == []

    assert queue.num_waiting == 2
    queue.check_integrity()


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.sampled_from([None, "x", "y"]), st.booleans()),
        max_size=40,
    )
)
def test_nothing_is_lost_and_nothing_is_served_twice(steps: list[tuple[str, int, str | None, bool]]) -> None:
    """Under any sequence of operations each ticket ends once, and the counts return to 0."""
    queue = make_queue(max_waiting=20)
    waiting: list[Ticket[str]] = []
    for number, (principal, deadline, home, is_arrival) in enumerate(steps):
        if is_arrival:
            new = ticket(str(number), deadline, principal=principal, home=home)
            if queue.try_add(new):
                waiting.append(new)
        elif waiting and deadline < 2:
            assert queue.remove(waiting.pop(deadline % len(waiting)))
        else:
            popped = queue.pop_other(anything) if home is None else queue.pop_turn(home, anything)
            assert (popped is None) == (not any(each.home == home for each in waiting))
            if popped is not None:
                waiting.remove(popped)
        queue.check_integrity()

    assert queue.num_waiting == len(waiting)


@pytest.mark.parametrize("damage", ["num_waiting", "bytes"])
def test_integrity_check_notices_wrong_counts(damage: str) -> None:
    """The integrity check compares the counts with the tickets."""
    total = WaitingBytes(10)
    queue = WaitingQueue[str](max_waiting=2, total=total)
    assert queue.try_add(ticket("a"))
    if damage == "bytes":
        total.used_bytes = 0
    else:
        queue.num_waiting = 0

    with pytest.raises(RuntimeError):
        queue.check_integrity()
