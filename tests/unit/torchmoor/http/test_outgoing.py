"""Bytes of a request to an instance, sent once or repeated, and what is counted meanwhile."""

import pytest

from torchmoor.proxy.http.outgoing import OutgoingRequest, ReplayBudget

BODY = b"abcdef"


def budget_of(max_body_bytes: int = 100, max_total_bytes: int = 100) -> ReplayBudget:
    return ReplayBudget(max_body_bytes=max_body_bytes, max_total_bytes=max_total_bytes)


def test_kept_request_is_sent_once_more_from_its_beginning() -> None:
    """A kept request is repeated with another head and the same body, and counts until it is dropped."""
    budget = budget_of()
    outgoing = OutgoingRequest(budget, BODY)

    outgoing.begin(b"one ")
    first = outgoing.take()
    assert (outgoing.take(), outgoing.can_repeat, budget.used_bytes) == (b"", True, 6)
    outgoing.begin(b"two ")
    second = outgoing.take()
    outgoing.forget_kept()
    outgoing.forget_kept()

    assert (first, second) == (b"one abcdef", b"two abcdef")
    assert (outgoing.can_repeat, budget.used_bytes, outgoing.take()) == (False, 0, b"")


@pytest.mark.parametrize("budget", [budget_of(max_body_bytes=5), budget_of(max_total_bytes=5)], ids=["body", "total"])
def test_request_beyond_the_budget_is_sent_once(budget: ReplayBudget) -> None:
    """A request beyond the budget is sent once, but may wait for its target until its first byte is written."""
    outgoing = OutgoingRequest(budget, BODY)
    assert outgoing.can_repeat

    outgoing.begin(b"one ")

    assert (outgoing.take(), outgoing.can_repeat, budget.used_bytes) == (b"one abcdef", False, 0)
