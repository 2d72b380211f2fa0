"""What is written of a request to its instance, once and once more, and what is counted of it meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.heads import make_request
from torchmoor.proxy.http.outgoing import OutgoingRequest, ReplayBudget, WholeRequest

BODY = b"abcdef"


def budget_of(max_body_bytes: int = 100, max_total_bytes: int = 100) -> ReplayBudget:
    return ReplayBudget(max_body_bytes=max_body_bytes, max_total_bytes=max_total_bytes)


def in_pieces(budget: ReplayBudget, *, declared: bool = True) -> OutgoingRequest:
    """Return a request whose body arrives in two pieces and has not ended."""
    request = make_request(b"POST", b"/x", fields=[(b"content-length", b"6")] if declared else [])
    outgoing = OutgoingRequest(request, budget, BODY[:2])
    outgoing.add(BODY[2:])
    return outgoing


@pytest.mark.parametrize("is_whole", [True, False])
def test_kept_request_is_sent_once_more_from_its_beginning(is_whole: bool) -> None:
    """With another head, and with the same body, however it came; what was kept is counted until it is forgotten."""
    budget = budget_of()
    outgoing = WholeRequest(budget, BODY) if is_whole else in_pieces(budget)

    outgoing.begin(b"one ")
    first = outgoing.take()
    assert (outgoing.take(), outgoing.can_repeat, budget.used_bytes) == (b"", True, 6)
    outgoing.begin(b"two ")
    second = outgoing.take()
    outgoing.forget_kept()
    outgoing.forget_kept()

    assert (first, second) == (b"one abcdef", b"two abcdef")
    assert (outgoing.can_repeat, budget.used_bytes, outgoing.take()) == (False, 0, b"")


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("budget", [budget_of(max_body_bytes=5), budget_of(max_total_bytes=5)], ids=["body", "total"])
def test_request_beyond_the_budget_is_sent_once(is_whole: bool, budget: ReplayBudget) -> None:
    """It may wait for its target all the same: until something of it was written it can be sent from its beginning."""
    outgoing = WholeRequest(budget, BODY) if is_whole else in_pieces(budget)
    assert outgoing.can_repeat

    outgoing.begin(b"one ")

    assert (outgoing.take(), outgoing.can_repeat, budget.used_bytes) == (b"one abcdef", False, 0)


def test_pieces_that_come_after_the_first_write_are_written_behind_it() -> None:
    """And all of them when the request is sent once more."""
    outgoing = OutgoingRequest(make_request(b"POST", b"/x", fields=[(b"content-length", b"6")]), budget_of(), b"ab")
    outgoing.begin(b"one ")
    written = [outgoing.take()]
    outgoing.add(b"cd")
    outgoing.add(b"ef")
    written.append(outgoing.take())
    outgoing.end()

    outgoing.begin(b"two ")

    assert [*written, outgoing.take()] == [b"one ab", b"cdef", b"two abcdef"]


class Check:
    """A body's check that accepts everything."""

    max_body_bytes = 100

    def hold(self, num_bytes: int, address: str, drop: Callable[[], None]) -> None: ...

    def verify(self, body: bytes) -> None: ...

    def release(self) -> None: ...


def test_a_body_that_must_be_verified_takes_of_the_budget_at_its_end() -> None:
    """Before that, its signature may be forged."""
    budget = budget_of()
    request = make_request(b"POST", b"/x", fields=[(b"content-length", b"6")])
    request.body_check = Check()
    outgoing = OutgoingRequest(request, budget, BODY[:2])
    outgoing.add(BODY[2:])
    assert (outgoing.can_repeat, budget.used_bytes) == (True, 0)

    outgoing.end()
    outgoing.begin(b"one ")

    assert (outgoing.take(), outgoing.can_repeat, budget.used_bytes) == (b"one abcdef", True, 6)
