"""Arriving bodies: which of them are dropped to make room."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmoor.proxy.http.arriving import MANY, ArrivingBodies, ArrivingBody, source_of


class Arrivals:
    """Arriving bodies at a time that the test sets, and the names of those that were dropped."""

    def __init__(self, max_bytes: int) -> None:
        self.now = 0.0
        self.num_dropped = 0
        self.dropped: list[str] = []
        self.bodies = ArrivingBodies(max_bytes, clock=lambda: self.now, on_dropped=self._count)

    def _count(self, setting: str) -> None:
        assert setting == "max_arriving_bytes"
        self.num_dropped += 1

    def receive(self, name: str, num_bytes: int, source: str = "10.0.0.1") -> ArrivingBody:
        body = ArrivingBody(source, lambda: self.dropped.append(name))
        self.bodies.add(body, bytes(num_bytes))
        return body


def test_a_stalled_body_makes_room_for_one_that_arrives() -> None:
    """The body of a source with the lowest rate is dropped, however many bytes it has."""
    arrivals = Arrivals(1000)
    arrivals.receive("stalled", 700)
    arrivals.now = 60.0
    arriving = arrivals.receive("arriving", 100)
    arrivals.now = 61.0

    arrivals.bodies.add(arriving, bytes(300))

    assert (arrivals.dropped, arrivals.num_dropped, arrivals.bodies.num_bytes) == (["stalled"], 1, 400)


def test_a_source_with_many_bytes_gives_way_to_others() -> None:
    """A slow body stays if the rest of its source is small, because a source with more bytes is dropped first."""
    arrivals = Arrivals(1000)
    slow = arrivals.receive("slow", 50, source="10.0.0.2")
    arrivals.now = 10.0
    for number in range(9):
        arrivals.receive(f"fast {number}", 100)
    arrivals.now = 15.0

    arrivals.bodies.add(slow, bytes(200))

    assert arrivals.dropped == ["fast 0", "fast 1"]
    assert arrivals.bodies.num_bytes == 950


def test_a_body_that_arrives_can_be_the_one_that_goes() -> None:
    """An arriving body can be dropped itself: of two sources with one body each, the older one."""
    arrivals = Arrivals(1000)
    older = arrivals.receive("older", 500)
    arrivals.now = 1.0
    arrivals.receive("newer", 300, source="10.0.0.2")
    arrivals.now = 2.0

    arrivals.bodies.add(older, bytes(300))

    assert (arrivals.dropped, arrivals.bodies.num_bytes) == (["older"], 300)


def test_among_many_bodies_one_search_frees_a_16th() -> None:
    """One search frees a sixteenth of the limit, so that searches through thousands of small bodies are rare."""
    arrivals = Arrivals(16 * (MANY + 1))
    for number in range(MANY + 1):
        arrivals.receive(str(number), 16)
    arrivals.now = 1.0

    arrivals.receive("last", 16)

    assert arrivals.bodies.num_bytes <= 15 * (MANY + 1)
    assert arrivals.dropped == [str(number) for number in range(len(arrivals.dropped))]


def test_a_body_is_removed_once() -> None:
    """Removing a body twice has no effect, and nothing of it is left."""
    arrivals = Arrivals(1000)
    body = arrivals.receive("one", 10)

    arrivals.bodies.discard(body)
    arrivals.bodies.discard(body)

    assert (arrivals.bodies.num_bytes, arrivals.dropped) == (0, [])


STEPS = st.tuples(st.sampled_from(("add", "add", "take", "discard")), st.integers(0, 4), st.integers(1, 60))


@given(st.lists(STEPS, max_size=30))
def test_the_total_is_the_sum_of_the_bodies_that_arrive(steps: list[tuple[str, int, int]]) -> None:
    """At most the limit after each step; a whole body has every byte, and a dropped one is answered once."""
    arrivals = Arrivals(100)
    received: dict[int, bytes] = {}
    bodies = [ArrivingBody(f"10.0.0.{number // 2}", lambda n=number: drop(n)) for number in range(5)]

    def drop(number: int) -> None:
        assert received.pop(number)
        arrivals.bodies.discard(bodies[number])  # as the exchange does that answers
        arrivals.dropped.append(str(number))

    for step, number, num_bytes in steps:
        arrivals.now += 1.0
        piece = bytes([num_bytes]) * num_bytes
        if str(number) in arrivals.dropped:
            continue
        if step == "add":
            received[number] = received.get(number, b"") + piece
            arrivals.bodies.add(bodies[number], piece)
        elif step == "take":
            assert arrivals.bodies.take(bodies[number], piece) == received.pop(number, b"") + piece
            bodies[number] = ArrivingBody(bodies[number].source, bodies[number].drop)
        else:
            arrivals.bodies.discard(bodies[number])
            received.pop(number, None)
            bodies[number] = ArrivingBody(bodies[number].source, bodies[number].drop)
        assert arrivals.bodies.num_bytes == sum(map(len, received.values())) <= 100
        assert arrivals.num_dropped == len(arrivals.dropped) == len(set(arrivals.dropped))

    for body in bodies:
        arrivals.bodies.discard(body)
    assert arrivals.bodies.num_bytes == 0


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("", ""),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2::1", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
    ],
)
def test_an_ipv6_client_has_a_network(host: str, source: str) -> None:
    assert source_of(host) == source
