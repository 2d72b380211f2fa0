"""Admission to the engine's memory: which turns wait, and in which order they retry."""

import threading

from handlers.chat.turns.admission import Admission


class Guest:
    """A turn that uses memory and counts its retries."""

    def __init__(self, room: Admission) -> None:
        self.num_calls = 0
        room.enter()

    def again(self) -> None:
        self.num_calls += 1


def test_one_that_is_alone_has_nobody_to_wait_for() -> None:
    """A turn that is alone is refused at once, and uses memory until it reports its end."""
    room = Admission()
    alone = Guest(room)

    assert not room.try_wait(alone.again)

    room.leave()
    assert repr(room) == "<Admission 0 using, 0 waiting>"


def test_those_who_wait_are_called_in_order_two_for_each_that_is_over() -> None:
    """Each turn that ends lets the two oldest waiting turns retry; these count as users of memory."""
    room = Admission()
    guests = [Guest(room) for _ in range(4)]
    for guest in guests[1:]:
        assert room.try_wait(guest.again)

    room.leave()

    assert [guest.num_calls for guest in guests] == [0, 1, 1, 0]
    assert repr(room) == "<Admission 2 using, 1 waiting>"


def test_if_all_wait_for_one_another_the_first_may_begin() -> None:
    """If all turns wait, the first one may retry; alone without enough memory it is refused."""
    room = Admission()
    guests = [Guest(room) for _ in range(3)]
    for guest in guests:
        assert room.try_wait(guest.again)
    assert [guest.num_calls for guest in guests] == [1, 0, 0]

    assert not room.try_wait(guests[0].again)

    room.leave()
    assert [guest.num_calls for guest in guests] == [1, 1, 1]
    assert repr(room) == "<Admission 2 using, 0 waiting>"


def test_one_in_whose_way_somebody_was_tries_again() -> None:
    """A turn retries if others ended between its failed attempt and its wait."""
    room = Admission()
    Guest(room)
    late = Guest(room)
    room.leave()

    assert room.try_wait(late.again)

    assert late.num_calls == 1
    assert not room.try_wait(late.again)


def test_one_that_gives_up_waiting_is_not_called() -> None:
    """A turn whose client disconnected is not called back."""
    room = Admission()
    user, waiting = Guest(room), Guest(room)
    room.try_wait(waiting.again)

    assert room.try_remove(waiting.again)
    assert not room.try_remove(waiting.again)
    room.leave()

    assert (user.num_calls, waiting.num_calls) == (0, 0)
    assert repr(room) == "<Admission 0 using, 0 waiting>"


def test_nobody_is_forgotten_when_all_wait_at_once() -> None:
    """With many threads, some turn always uses memory while others wait, so each of them is called."""
    for _ in range(200):
        room = Admission()
        guests = [Guest(room) for _ in range(4)]
        start = threading.Barrier(4)

        def wait(guest: Guest, room: Admission = room, start: threading.Barrier = start) -> None:
            start.wait()
            room.try_wait(guest.again)

        threads = [threading.Thread(target=wait, args=(guest,)) for guest in guests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert room.num_using == sum(guest.num_calls for guest in guests) == 1
