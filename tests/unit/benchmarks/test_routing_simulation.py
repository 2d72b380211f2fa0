"""The simulation behind benchmarks/routing.py, to which the measured figures are compared."""

from random import Random

import pytest

from benchmarks import routing_simulation


def test_service_times_have_the_mean_and_the_variation_that_are_claimed() -> None:
    """Service times are lognormal with the requested mean and half of it as standard deviation."""
    rng = Random(1)
    times = [routing_simulation.service_time(rng, 2.0) for _ in range(50_000)]
    mean = sum(times) / len(times)
    deviation = (sum((time - mean) ** 2 for time in times) / len(times)) ** 0.5

    assert mean == pytest.approx(2.0, rel=0.02)
    assert deviation / mean == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize("slots", [1, 4])
def test_central_queue_beats_least_outstanding_which_beats_random(slots: int) -> None:
    """The order holds for tail latency, and throughput never exceeds the instances' capacity."""
    runs = {
        arm: routing_simulation.simulate(arm, 20 * slots, 5, slots=slots, num_requests=30_000)
        for arm in ("random", "least_outstanding", "central_queue")
    }

    p99 = {arm: run.percentile(0.99) for arm, run in runs.items()}
    assert p99["central_queue"] < p99["least_outstanding"] < p99["random"]
    assert all(run.throughput < 5 * slots * 1.02 for run in runs.values())
    assert runs["central_queue"].throughput > 0.97 * 5 * slots


def test_closed_loop_keeps_all_users_busy() -> None:
    """Little's law: users = throughput x mean latency."""
    run = routing_simulation.simulate("least_outstanding", 40, 10, num_requests=30_000)

    assert run.throughput * sum(run.latencies_s) / len(run.latencies_s) == pytest.approx(40, rel=0.02)


def test_every_strategy_is_timed() -> None:
    """The four strategies of SageMaker's API are simulated."""
    found = routing_simulation.time_to_choose(10, num_choices=200)

    assert set(found) == {"RANDOM", "LEAST_OUTSTANDING_REQUESTS", "PREFIX_AWARE", "KV_AWARE"}
    assert all(micros > 0 for micros in found.values())
