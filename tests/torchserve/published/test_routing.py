"""The routing example: an endpoint that changes its strategy by UpdateEndpoint, and CloudWatch's figures."""

from pathlib import Path

import pytest

from tests.torchserve.published.conftest import RunClient

pytestmark = [pytest.mark.torchserve, pytest.mark.s3, pytest.mark.slow]


def test_strategies_change_under_load_from_create_to_delete(run_client: RunClient, archives: Path) -> None:
    """No request fails right after the waiter has ended; metric math gives the example's table."""
    told = run_client("routing.py", str(archives / "llava.mar"))

    for strategy in ("RANDOM", "LEAST_OUTSTANDING_REQUESTS"):
        assert told[strategy] == {"statuses": [200] * 12, "routing": {"RoutingStrategy": strategy}}
    assert told["labels"] == ["errors in percent", "milliseconds"]
    assert set(told["figures"]["rate"]) == {0.0}
    assert all(value > 0.1 for value in told["figures"]["milliseconds"])
