"""The simulation of proxies that cannot see each other's counts, the basis of docs/decisions/0018-replicas.md."""

from benchmarks import routing_hosts


def test_who_knows_more_waits_less() -> None:
    """Latency falls from no counts to own counts, to counts from the last answer, to all counts."""
    means = [
        routing_hosts.mean(routing_hosts.simulate_hosts(knows, 0.7, 4, num_requests=5_000))
        for knows in ("shared", "in answers", "apart", "random")
    ]

    assert means == sorted(means)
    assert means[0] > 1.0  # the service time itself


def test_one_proxy_has_nothing_to_learn() -> None:
    """For one proxy, its own counts are all counts."""
    shared, apart = (routing_hosts.simulate_hosts(knows, 0.7, 1, num_requests=2_000) for knows in ("shared", "apart"))

    assert shared.latencies_s == apart.latencies_s
