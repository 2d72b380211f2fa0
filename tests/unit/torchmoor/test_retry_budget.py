"""The budget of repeated requests."""

from torchmoor.proxy.dispatch.retry_budget import RetryBudget


def test_budget_is_a_burst_then_a_fraction_of_the_requests() -> None:
    """After the burst, every five requests allow one retry."""
    budget = RetryBudget(fraction=0.2, burst=3)

    assert [budget.try_take(10) for _ in range(4)] == [True, True, True, False]
    assert not budget.try_take(14)
    assert budget.try_take(15)
    assert not budget.try_take(15)


def test_budget_is_bounded() -> None:
    """A long time without retries never saves more than the burst."""
    budget = RetryBudget(fraction=0.2, burst=3)

    assert [budget.try_take(1_000_000) for _ in range(4)] == [True, True, True, False]


def test_a_retry_that_was_not_made_is_given_back() -> None:
    budget = RetryBudget(fraction=0.2, burst=1)

    assert budget.try_take(0)
    budget.release()
    assert [budget.try_take(0) for _ in range(2)] == [True, False]
