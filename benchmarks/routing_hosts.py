"""Simulates least outstanding in several proxies that do not see each other's requests.

The proxies run on different hosts, in front of the same 20 instances, which take one request at a time (lognormal
service times, cv 0.5). Requests arrive at random (Poisson), each at a random proxy. In a closed loop, separate counts
would cost nothing: a user stays with one proxy, so every answer makes room in that proxy's counts for the next request.
The arms differ in what a proxy knows of the requests of the others:

    shared       everything, in common counts
    apart        nothing: it chooses by its own counts, and among equals at random
    two choices  nothing: it draws two instances at random and chooses the better one by its own counts
    polled       the number of running requests when each instance was last polled; the number is the interval, in mean
                 service times
    in answers   the number of running requests when the instance last answered this proxy
    late binding nothing: each proxy has a queue, and an instance gets one request at a time from each

Prints by how much the mean latency exceeds that of shared counts, and the share of their reduction of P99 that remains.

    python -m benchmarks.routing_hosts [--quick] [--save]
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

from benchmarks.report import parse_options, print_report
from benchmarks.routing_simulation import Run, service_time

KNOWN = (
    "random",
    "shared",
    "apart",
    "two choices",
    "polled 0.1",
    "polled 1",
    "polled 10",
    "in answers",
    "late binding",
)
INSTANCES = 20
LOADS = (0.7, 0.9)  # share of the instances' capacity
HOSTS = (2, 4, 8)
ARRIVAL, POLL = -1, -2  # events; other numbers are the ends of an instance's requests


@dataclass(eq=False)
class HostProxy:
    """A proxy. own, others: by instance, its own running requests, and the known ones of other proxies.

    waiting: with late binding, arrivals of requests without an instance.
    """

    own: list[int]
    others: list[int]
    waiting: deque[float] = field(default_factory=deque)


def choose(knows: str, rng: Random, proxy: HostProxy, total: list[int]) -> int | None:
    """Return the number of an instance; None if late binding finds none free."""
    every = range(len(total))
    if knows == "random":
        return rng.randrange(len(total))
    if knows == "two choices":
        return min(rng.sample(every, 2), key=lambda at: proxy.own[at])
    if knows == "late binding":
        free = [at for at in every if not proxy.own[at]]
        return rng.choice(free) if free else None
    load = total if knows == "shared" else [own + other for own, other in zip(proxy.own, proxy.others, strict=True)]
    least = min(load)
    return rng.choice([at for at in every if load[at] == least])


def simulate_hosts(knows: str, load: float, hosts: int, *, num_requests: int) -> Run:
    """Simulate requests with a mean service time of 1. load: share of the instances' capacity."""
    rng, arrivals = Random(1), Random(2)
    proxies = [HostProxy([0] * INSTANCES, [0] * INSTANCES) for _ in range(hosts)]
    total = [0] * INSTANCES
    queues: list[deque[tuple[int, float]]] = [deque() for _ in range(INSTANCES)]  # proxy, arrival
    events: list[tuple[float, int]] = [(arrivals.expovariate(load * INSTANCES), ARRIVAL)]  # moment, kind
    latencies: list[float] = []
    interval = float(knows.split()[1]) if knows.startswith("polled") else 0.0
    if interval:
        heapq.heappush(events, (interval, POLL))

    def send(now: float, host: int, arrived: float, at: int) -> None:
        proxies[host].own[at] += 1
        total[at] += 1
        queues[at].append((host, arrived))
        if len(queues[at]) == 1:
            heapq.heappush(events, (now + service_time(rng, 1.0), at))

    while len(latencies) < num_requests:
        now, at = heapq.heappop(events)
        if at == POLL:
            for proxy in proxies:
                proxy.others = [everyone - own for everyone, own in zip(total, proxy.own, strict=True)]
            heapq.heappush(events, (now + interval, POLL))
        elif at == ARRIVAL:
            heapq.heappush(events, (now + arrivals.expovariate(load * INSTANCES), ARRIVAL))
            host = arrivals.randrange(hosts)
            chosen = choose(knows, rng, proxies[host], total)
            if chosen is None:
                proxies[host].waiting.append(now)
            else:
                send(now, host, now, chosen)
        else:
            host, arrived = queues[at].popleft()
            latencies.append(now - arrived)
            proxy = proxies[host]
            proxy.own[at] -= 1
            total[at] -= 1
            if knows == "in answers":
                proxy.others[at] = total[at] - proxy.own[at]
            if queues[at]:
                heapq.heappush(events, (now + service_time(rng, 1.0), at))
            if proxy.waiting and not proxy.own[at]:
                send(now, host, proxy.waiting.popleft(), at)
    return Run(latencies[num_requests // 10 :], load * INSTANCES)


def mean(run: Run) -> float:
    return sum(run.latencies_s) / len(run.latencies_s)


def main() -> None:
    options = parse_options(__doc__, quick="a tenth of the requests", rounds=None)
    num_requests = 20_000 if options.quick else 200_000
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for load in LOADS:
        for hosts in HOSTS:
            runs = {knows: simulate_hosts(knows, load, hosts, num_requests=num_requests) for knows in KNOWN}
            random, best = runs["random"], runs["shared"]
            for knows, run in runs.items():
                name = f"{knows.replace(' ', '_')}_{load:.0%}_{hosts}".replace("%", "")
                above = mean(run) / mean(best) - 1
                kept = (random.percentile(0.99) - run.percentile(0.99)) / (
                    random.percentile(0.99) - best.percentile(0.99)
                )
                ratios[f"mean_above_shared_{name}"] = above
                ratios[f"p99_gain_kept_{name}"] = kept
                rows.append(
                    {
                        "load": load,
                        "hosts": hosts,
                        "knows": knows,
                        "mean": mean(run),
                        "p99": run.percentile(0.99),
                        "mean_above_shared": above,
                        "p99_gain_kept": kept,
                    }
                )
    settings = {"num_requests": num_requests, "instances": INSTANCES, "service": "lognormal, cv 0.5"}
    print_report("routing_hosts", rows, ratios, options, **settings)


if __name__ == "__main__":
    main()
