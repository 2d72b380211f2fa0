"""Who waits for memory and who is called back."""

import threading

from handlers.chat.turns.admission import Admission


class Guest:
    """Uses memory, and counts how often it is called back."""

    def __init__(self, room: Admission) -> None:
        self.num_calls = 0
        room.enter()

    def again(self) -> None:
        self.num_calls += 1


def test_one_that_is_alone_has_nobody_to_wait_for() -> None:
    """It is to be refused, and uses memory until it says that it is over."""
    room = Admission()
    alone = Guest(room)

    assert not room.try_wait(alone.again)

    room.leave()
    assert repr(room) == "<Admission 0 using, 0 waiting>"


def test_those_who_wait_are_called_in_order_two_for_each_that_is_over() -> None:
    """By then they count as users, so that they can be waited for."""
    room = Admission()
    guests = [Guest(room) for _ in range(4)]
    for guest in guests[1:]:
        assert room.try_wait(guest.again)

    room.leave()

    assert [guest.num_calls for guest in guests] == [0, 1, 1, 0]
    assert repr(room) == "<Admission 2 using, 1 waiting>"


def test_if_all_wait_for_one_another_the_first_may_begin() -> None:
    """If even that one finds no room, alone as it is, it is refused, or they would call one another for ever."""
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
    """The other may have left between the moment when there was no room and the wish to wait."""
    room = Admission()
    Guest(room)
    late = Guest(room)
    room.leave()

    assert room.try_wait(late.again)

    assert late.num_calls == 1
    assert not room.try_wait(late.again)


def test_one_that_gives_up_waiting_is_not_called() -> None:
    """Its client has left."""
    room = Admission()
    user, waiting = Guest(room), Guest(room)
    room.try_wait(waiting.again)

    assert room.try_remove(waiting.again)
    assert not room.try_remove(waiting.again)
    room.leave()

    assert (user.num_calls, waiting.num_calls) == (0, 0)
    assert repr(room) == "<Admission 0 using, 0 waiting>"


def test_nobody_is_forgotten_when_all_wait_at_once() -> None:
    """From many threads: as long as somebody waits, somebody uses memory, whose end will call the next."""
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

        assert room._num_using == sum(guest.num_calls for guest in guests) == 1
