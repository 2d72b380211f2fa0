"""Measures the cost of 1,000 instances and 1,000,000 open sessions, with simulated instances. `make bench NAME=scale`

The parts of such a fleet are measured separately, each with the product's code:

    choosing   Clients open 1,000,000 sessions through 8 proxies that share no state, on 1,000 instances that report
               their free room every 50 s. A minute of questions follows, during which 50 instances are lost at the same
               moment and come back later. Ids, registry and chooser are the product's; instances and clock are
               simulated.
    counting   A closed loop of requests without a session shows the cost of separate counts in each proxy.
    journal    Real conversations show the round trips to a real Valkey and a real SeaweedFS, and the bytes there.

Expected: a proxy keeps no memory per session, because the id contains everything. Only sessions of lost instances move,
they spread over the others, and all proxies agree on their new instances. The cost of an ordinary turn does not grow
with the number of instances.

    sessions_most_vs_mean      sessions of the fullest instance / mean, after the openings
    turns_unserved             questions without an instance; must be 0
    proxies_disagree           questions that two proxies would have sent to different instances; must be 0
    strays                     questions of sessions whose instance works, sent to another one; must be 0
    moved_most_vs_mean         questions of moved sessions at the survivor with most of them / mean
    p99_lost_vs_before         P99 of turns while instances are gone / before
    proxy_bytes_a_session      memory that a proxy keeps for a session that it has routed
    id_mint_us, id_verify_us, choose_turn_us, choose_failover_us, choose_opening_us     processor time
    counts_apart_p99           P99 of the closed loop with 8 proxies / with one
    redis_trips_a_turn, redis_bytes_a_session, s3_requests_a_turn, s3_bytes_a_session   bytes without the image
"""

import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from time import thread_time
from typing import Any

from benchmarks.report import parse_options, print_report
from benchmarks.scale_fleet import ENDPOINT, EXPIRES_AT, KEYS, Fleet, Outcome, Plan
from benchmarks.scale_journal import NUM_TURNS, JournalCost, measure_redis, measure_s3
from handlers.chat.sessions.session_id_minter import SessionIdMinter
from handlers.requests.incoming import Caller
from torchmoor.proxy.instances.instance import InstanceState
from torchmoor.wire.session_ids import verify

LARGE = Plan(num_instances=1_000, num_sessions=1_000_000)
SMALL = Plan(num_instances=40, num_sessions=8_000, room=300, slots=16, num_lost=2, status_interval_s=2.0)
USERS_PER_INSTANCE, SLOTS = 4, 4  # of the closed loop, which keeps the instances fully busy


def main() -> None:
    options = parse_options(__doc__, quick="40 instances, 8,000 sessions", rounds=None)
    plan = SMALL if options.quick else LARGE
    fleet = Fleet(plan, seed=1)
    print(f"opening {plan.num_sessions:,} sessions on {plan.num_instances:,} instances", flush=True)
    fleet.open_sessions()
    times = time_choices(fleet)
    num_bytes = bytes_per_session(fleet)
    print("requests without a session, with separate counts", flush=True)
    apart = counts_apart(fleet, num_requests=10_000 if options.quick else 400_000)
    print(f"{plan.duration_s:.0f} s of questions", flush=True)
    outcome = fleet.run()
    print("journals", flush=True)
    num_chats = 3 if options.quick else 20
    costs = [measure_redis(num_chats), measure_s3(num_chats)]
    redis, s3 = costs
    before, lost = outcome.phases["before"], outcome.phases["lost"]
    survivors = plan.num_instances - plan.num_lost
    ratios: dict[str, Any] = {
        "sessions_most_vs_mean": max(outcome.sessions.values()) / (plan.num_sessions / plan.num_instances),
        "turns_unserved": sum(phase.num_unserved for phase in outcome.phases.values()),
        "proxies_disagree": outcome.num_disagreements,
        "strays": outcome.num_strays,
        "moved_most_vs_mean": max(outcome.moved.values()) / (outcome.moved.total() / survivors),
        "p99_lost_vs_before": lost.percentile(0.99) / before.percentile(0.99),
        "proxy_bytes_a_session": num_bytes,
        **times,
        "counts_apart_p99": apart,
        "redis_trips_a_turn": redis.turn,
        "redis_bytes_a_session": redis.session_bytes,
        "s3_requests_a_turn": s3.turn,
        "s3_bytes_a_session": s3.session_bytes,
    }
    print_report(
        "scale",
        rows_of(plan, outcome, costs),
        ratios,
        options,
        plan=asdict(plan),
        turns_a_session=NUM_TURNS,
        journals=[asdict(cost) for cost in costs],
    )


def time_choices(fleet: Fleet) -> dict[str, float]:
    """Measure the processor time, in us, of each thing that a proxy does for a request. Leaves the fleet unchanged."""
    proxy, ids = fleet.proxies[0], fleet.ids[:: max(1, len(fleet.ids) // 20_000)]
    minter = SessionIdMinter(KEYS, "llava-0")
    gone = [name for name in fleet.servers if int(name.rpartition("-")[2]) % 20 == 0]
    orphans = [text for text, home in zip(fleet.ids, fleet.homes, strict=True) if home in gone][:2_000]
    micros = {
        "id_mint_us": _micros(len(ids), lambda at: minter.mint(EXPIRES_AT, Caller(ENDPOINT, ""))),
        "id_verify_us": _micros(len(ids), lambda at: verify(ids[at], KEYS, endpoint=ENDPOINT)),
        "choose_turn_us": _micros(len(ids), lambda at: proxy.choose(ids[at])),
    }
    fleet.set_state(gone, InstanceState.DOWN)
    micros["choose_failover_us"] = _micros(len(orphans), lambda at: proxy.choose(orphans[at]))
    fleet.set_state(gone, InstanceState.READY)
    micros["choose_opening_us"] = _micros(2_000, lambda at: proxy.open())
    fleet.report_rooms()
    return micros


def _micros(number: int, do: Callable[[int], object]) -> float:
    began = thread_time()
    for at in range(number):
        do(at)
    return (thread_time() - began) / number * 1e6


def bytes_per_session(fleet: Fleet) -> float:
    """Return the growth of a proxy's memory per routed session, after it has routed to every instance."""
    proxy, step = fleet.proxies[-1], max(2, len(fleet.ids) // 20_000)
    for text in fleet.ids[::step]:
        proxy.choose(text)
    others = fleet.ids[1::step]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for text in others:
            proxy.choose(text)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (after - before) / len(others)


def counts_apart(fleet: Fleet, *, num_requests: int) -> float:
    """Return the P99 of requests without a session through all proxies, relative to one proxy."""
    users = USERS_PER_INSTANCE * fleet.plan.num_instances
    one, apart = (
        fleet.ask_closed_loop(num_proxies=number, num_users=users, slots=SLOTS, num_requests=num_requests)
        for number in (1, fleet.plan.num_proxies)
    )
    return apart.percentile(0.99) / one.percentile(0.99)


def rows_of(plan: Plan, outcome: Outcome, costs: list[JournalCost]) -> list[dict[str, Any]]:
    """Return a row for each part of the minute, then one for each journal with the load of the whole fleet."""
    rows: list[dict[str, Any]] = []
    for name, phase in outcome.phases.items():
        rows.append(
            {
                "part": {"before": "all there", "lost": f"{plan.num_lost} instances gone", "back": "they are back"}[
                    name
                ],
                "turns": len(phase.delays_s),
                "p50_s": phase.percentile(0.5),
                "p99_s": phase.percentile(0.99),
                "rebuilt": phase.num_rebuilt,
                "operations_per_s": None,
                "gb": None,
            }
        )
    turns_per_s = plan.num_sessions / (plan.think_s + plan.turn_s)
    for cost in costs:
        rows.append(
            {
                "part": f"journal in {cost.store}",
                "turns": None,
                "p50_s": None,
                "p99_s": None,
                "rebuilt": None,
                "operations_per_s": cost.turn * turns_per_s,
                "gb": cost.session_bytes * plan.num_sessions / 1e9,
            }
        )
    return rows


if __name__ == "__main__":
    main()
