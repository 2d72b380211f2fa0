"""What is least outstanding to proxies that cannot see each other's counts? A simulation.

Several proxies on different hosts before the same 20 instances (one request at a time each, lognormal service, cv
0.5). Requests arrive at random (Poisson), each at any proxy: in a closed loop, where a user stays with one proxy, every
answer makes room in that proxy's own counts for the next request, and nothing is lost. What a proxy knows of the
others' requests:

    shared       everything, as processes of one host do
    apart        nothing: it chooses by its own counts, among equals at random
    two choices  nothing: the better of two random instances, by its own counts
    polled       what each instance had running when it was last asked, at an interval of service times
    in answers   what the instance had running when it last answered this proxy
    late binding nothing: a queue a proxy, an instance gets one request at a time of each

Printed is by how much the mean is above that of shared counts, and what is left of their gain against random in P99.

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
LOADS = (0.7, 0.9)  # of what the instances can do
HOSTS = (2, 4, 8)
ARRIVAL, POLL = -1, -2  # events that are no instance's


@dataclass(eq=False)
class HostProxy:
    """A proxy's own counts, what it believes of the others', and, for late binding, who waits."""

    own: list[int]
    others: list[int]
    waiting: deque[float] = field(default_factory=deque)


def choose(knows: str, rng: Random, proxy: HostProxy, total: list[int]) -> int | None:
    """An instance's number."""
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
    """Requests that arrive at random, with a mean service time of 1."""
    rng, arrivals = Random(1), Random(2)
    proxies = [HostProxy([0] * INSTANCES, [0] * INSTANCES) for _ in range(hosts)]
    total = [0] * INSTANCES
    queues: list[deque[tuple[int, float]]] = [deque() for _ in range(INSTANCES)]  # proxy, arrival
    events: list[tuple[float, int]] = [(arrivals.expovariate(load * INSTANCES), ARRIVAL)]  # when, whose end
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
    print_report("routing_hosts", rows, ratios, save=options.save, quick=options.quick, **settings)


if __name__ == "__main__":
    main()
