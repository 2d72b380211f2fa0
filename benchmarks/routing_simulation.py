"""Simulates the closed loop of routing.py without a network, and measures the time to choose an instance."""

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from random import Random
from time import thread_time

from benchmarks.report import percentile
from torchmoor.proxy.routing.kv_aware import KvAware
from torchmoor.proxy.routing.least_outstanding import LeastOutstanding
from torchmoor.proxy.routing.pool import Pool
from torchmoor.proxy.routing.prefix_aware import PrefixAware
from torchmoor.proxy.routing.random import RandomChoice
from torchmoor.proxy.routing.strategy import FIRST_ATTEMPT, Strategy, StrategyRequest

CV = 0.5  # of service times: standard deviation / mean


@dataclass(frozen=True)
class Run:
    """The results of a run. throughput: requests per second."""

    latencies_s: list[float]
    throughput: float

    def percentile(self, share: float) -> float:
        return percentile(self.latencies_s, share)


@dataclass(eq=False)
class SimulatedInstance:
    """An instance as the strategies see it. waiting: its queue of user, arrival and service time."""

    name: str
    capacity: int
    outstanding: int = 0
    session_room: int | None = None
    is_ready: bool = True
    share: float = 1.0
    waiting: deque[tuple[int, float, float]] = field(default_factory=deque)

    @property
    def load(self) -> int:
        return self.outstanding


def service_time(rng: Random, mean_s: float) -> float:
    """Return a random service time: lognormal, with the coefficient of variation CV."""
    variance = math.log(1 + CV * CV)
    return rng.lognormvariate(math.log(mean_s) - variance / 2, math.sqrt(variance))


def simulate(arm: str, users: int, instances: int, *, slots: int = 1, num_requests: int = 200_000) -> Run:
    """Simulate users who send the next request as soon as the last one is answered; the mean service time is 1.

    arm: random or least_outstanding, with the proxy's strategies; or central_queue, which assigns a request when an
    instance is free: the optimum unless service times are known in advance. slots: concurrent requests per instance.
    """
    rng = Random(1)
    is_central = arm == "central_queue"
    strategy: Strategy = RandomChoice(rng) if arm == "random" else LeastOutstanding()
    fleet = [SimulatedInstance(f"i{number}", slots if is_central else users + 1) for number in range(instances)]
    pool = Pool(fleet)
    central: deque[tuple[int, float, float]] = deque()
    ends: list[tuple[float, int, int, float, SimulatedInstance]] = []
    latencies: list[float] = []
    number = 0

    def start(now: float, job: tuple[int, float, float], instance: SimulatedInstance) -> None:
        nonlocal number
        number += 1
        user, began, service_s = job
        heapq.heappush(ends, (now + service_s, number, user, began, instance))

    def arrive(now: float, user: int) -> None:
        job = (user, now, service_time(rng, 1.0))
        pick = strategy.choose(FIRST_ATTEMPT, pool)
        if pick is None:
            central.append(job)
            return
        instance = pick.instance
        instance.outstanding += 1
        pool.update(instance)
        if instance.outstanding <= slots:
            start(now, job, instance)
        else:
            instance.waiting.append(job)

    for user in range(users):
        arrive(0.0, user)
    warm_up = num_requests // 10
    warm_at = now = 0.0
    while len(latencies) < num_requests:
        now, _, user, began, instance = heapq.heappop(ends)
        latencies.append(now - began)
        if len(latencies) == warm_up:
            warm_at = now
        queue = central if is_central else instance.waiting
        if not is_central or not queue:
            instance.outstanding -= 1
            pool.update(instance)
        if queue:
            start(now, queue.popleft(), instance)
        arrive(now, user)
    return Run(latencies[warm_up:], (num_requests - warm_up) / (now - warm_at))


def time_to_choose(instances: int, *, num_choices: int = 20_000) -> dict[str, float]:
    """Measure, for each strategy, the processor time in us to choose among `instances` at about 70 % load.

    It includes the update of the order of the instances when requests begin and end.
    """
    strategies: dict[str, Strategy] = {
        "RANDOM": RandomChoice(Random(1)),
        "LEAST_OUTSTANDING_REQUESTS": LeastOutstanding(),
        "PREFIX_AWARE": PrefixAware(prefix_length=1024, concurrency_threshold=8),
        "KV_AWARE": KvAware(
            max_prompt_bytes=65_536, block_bytes=512, bytes_per_request=8_192, max_blocks_per_instance=8_192
        ),
    }
    rng = Random(2)
    prompts = [StrategyRequest(prefix=rng.randbytes(2048)) for _ in range(500)]
    found = {}
    for name, strategy in strategies.items():
        fleet = [SimulatedInstance(f"i{number}", 16) for number in range(instances)]
        pool = Pool(fleet)
        running: deque[SimulatedInstance] = deque()
        order = [rng.randrange(len(prompts)) for _ in range(num_choices)]
        began = thread_time()
        for at in order:
            pick = strategy.choose(prompts[at], pool)
            if pick is not None:
                instance = pick.instance
                instance.outstanding += 1
                pool.update(instance)
                running.append(instance)
                strategy.note_sent(prompts[at], instance.name, body_bytes=2048)
            if len(running) > 0.7 * instances:
                ended = running.popleft()
                ended.outstanding -= 1
                pool.update(ended)
        found[name] = (thread_time() - began) / num_choices * 1e6
    return found
