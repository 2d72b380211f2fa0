"""Replay conversations over instances with caches, behind proxies that count only their own requests."""

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tests.unit.torchmoor.routing.candidates import FakeCandidate, change, pool_of
from torchmoor.proxy.routing.pool import Pool
from torchmoor.proxy.routing.strategy import Pick, StrategyRequest

TURN_TOKENS = 100  # new in each turn
ANSWER_COST = 20  # in tokens of prefill

Choose = Callable[[StrategyRequest, Pool[FakeCandidate]], Pick[FakeCandidate] | None]


@dataclass
class Outcome:
    """Turns after each conversation's first, those that found their prefix, tokens, and the last turn's end."""

    num_turns: int = 0
    num_found: int = 0
    num_computed: int = 0
    num_least: int = 0  # computed by one instance with all caches
    ended_at: int = 0
    most_loaded: int = 0  # requests at one instance

    @property
    def found(self) -> float:
        return self.num_found / self.num_turns


@dataclass
class Server:
    """An instance: the time when it is free, its cache of each conversation, and its requests."""

    free_at: int = 0
    num_requests: int = 0
    held: dict[int, int] = field(default_factory=lambda: defaultdict(int))


def replay(
    choose: Choose,
    *,
    num_instances: int = 4,
    num_conversations: int = 100,
    num_turns: int = 10,
    think_time: int = 0,
    seed: int = 1,
) -> Outcome:
    """Run each conversation's turns in order, each over a random proxy; an instance serves one request at a time."""
    rng, outcome = Random(seed), Outcome()
    names = [f"llava-{number}" for number in range(num_instances)]
    pools = [pool_of(*(FakeCandidate(name, capacity=64) for name in names)) for _ in range(2)]
    servers = {name: Server() for name in names}
    events: list[tuple[int, float, int, int]] = [
        (rng.randrange(think_time + 1), rng.random(), number, 0) for number in range(num_conversations)
    ]
    running: dict[tuple[int, int], tuple[Pool[FakeCandidate], FakeCandidate]] = {}
    heapq.heapify(events)
    while events:
        now, _, conversation, turn = heapq.heappop(events)
        if (conversation, turn) in running:  # end of this turn
            pool, instance = running.pop((conversation, turn))
            change(pool, instance, outstanding=instance.outstanding - 1)
            servers[instance.name].num_requests -= 1
            outcome.ended_at = now
            if turn + 1 < num_turns:
                heapq.heappush(events, (now + rng.randrange(think_time + 1), rng.random(), conversation, turn + 1))
            continue
        pool = rng.choice(pools)
        key = Random(conversation).getrandbits(64)
        pick = choose(StrategyRequest(affinity=key, prefix=b"conversation %d" % conversation), pool)
        instance, server = pick.instance, servers[pick.instance.name]
        change(pool, instance, outstanding=instance.outstanding + 1)
        running[conversation, turn] = (pool, instance)
        num_tokens, num_held = (turn + 1) * TURN_TOKENS, server.held[conversation]
        server.held[conversation] = num_tokens
        server.num_requests += 1
        outcome.most_loaded = max(outcome.most_loaded, server.num_requests)
        outcome.num_turns += turn > 0
        outcome.num_found += turn > 0 and num_held == num_tokens - TURN_TOKENS
        outcome.num_computed += num_tokens - num_held
        outcome.num_least += TURN_TOKENS
        server.free_at = max(now, server.free_at) + num_tokens - num_held + ANSWER_COST
        heapq.heappush(events, (server.free_at, rng.random(), conversation, turn))
    return outcome
