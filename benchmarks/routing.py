"""Measures how much least outstanding and late binding reduce P99 latency, compared with random routing.

Uses the published pairs of users and instances (20/5, 40/10, 60/15, 80/20). Users send the next request as soon as the
last one is answered. Instances take one request at a time, with lognormal service times (cv 0.5; the mean of 100 ms is
long enough that two shared cores do not decide the result). Requests are real HTTP through the real proxy:

    random             SageMaker's default
    least_outstanding  LEAST_OUTSTANDING_REQUESTS
    late_binding       the same with a queue at the proxy: each instance gets one request at a time, and the others wait
                       for the first free instance

The table also has simulations of random, least outstanding, and one central queue, which is the optimum. A row with
5 ms shows requests that are hardly longer than the machine's noise. 1,000 instances, and the time to choose among them,
are simulated with the proxy's strategies.

Least outstanding also runs in 2 and 4 proxy processes, each with its own counts; there, each request uses its own
connection, so any process may get it. `p99_gain_kept_2` and `_4` are the share of the one-process reduction of P99 that
remains, in the worst row.

P99 is computed over all rounds together, because with random routing long queues are too rare for a single round.
`least` and `most` are the smallest and largest reductions of a round, relative to random in the same round. `p99_cut_*`
and `throughput_gain_*` are those of late_binding.

    make bench NAME=routing [QUICK=1]
    python -m benchmarks.routing [--quick] [--rounds 6] [--save]
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.report import parse_options, print_report
from benchmarks.routing_simulation import Run, simulate, time_to_choose
from benchmarks.routing_stage import ARMS, PROCESSES, Results, Row, ask, stage, undisturbed

PUBLISHED = [Row(users, instances, 0.1) for users, instances in ((20, 5), (40, 10), (60, 15), (80, 20))]
SHORT = Row(20, 5, 0.005)
SIMULATED = ("random", "least_outstanding", "central_queue")
DURATION_S, QUICK_S = 30.0, 2.0
WARM_UP_S, QUICK_WARM_UP_S = 2.0, 0.5
PROCESS_SHARE = 0.4  # of that time, for each arm with several processes
LARGE = (4000, 1000)  # users, instances; simulated

Simulated = dict[tuple[int, int], dict[str, Run]]
Processes = dict[Row, dict[tuple[str, int], list[Run]]]  # by arm and number of processes


def main() -> None:
    options = parse_options(__doc__, quick=f"one round of {QUICK_S:.0f} s per arm", rounds=6)
    duration_s, warm_up_s = (QUICK_S, QUICK_WARM_UP_S) if options.quick else (DURATION_S, WARM_UP_S)
    measured: dict[Row, dict[str, list[Run]]] = {row: {arm: [] for arm in ARMS} for row in (*PUBLISHED, SHORT)}
    processes: Processes = {row: {} for row in PUBLISHED}
    with undisturbed() as is_ahead, stage([*PUBLISHED, SHORT]) as ports:
        for round_number in range(options.rounds):
            for rows in (PUBLISHED, [SHORT]):
                for arm in ARMS:
                    share = 0.25 if rows == [SHORT] else 1.0  # short requests need less time
                    runs = ask(
                        ports[1], rows, arm, seed=round_number, duration_s=share * duration_s, warm_up_s=warm_up_s
                    )
                    for row, run in runs.items():
                        measured[row][arm].append(run)
            for arm, number in ("random", 1), *((ARMS[1], number) for number in PROCESSES):
                share_s = PROCESS_SHARE * duration_s
                runs = ask(
                    ports[number],
                    PUBLISHED,
                    arm,
                    seed=round_number,
                    duration_s=share_s,
                    warm_up_s=warm_up_s,
                    is_roaming=True,
                )
                for row, run in runs.items():
                    processes[row].setdefault((arm, number), []).append(run)
            print(f"round {round_number + 1} of {options.rounds}", flush=True)
    num_requests = 10_000 if options.quick else 200_000
    simulated: Simulated = {
        (users, instances): {arm: simulate(arm, users, instances, num_requests=num) for arm in SIMULATED}
        for users, instances, num in (
            *((row.users, row.instances, num_requests) for row in PUBLISHED),
            (*LARGE, 2 * num_requests),
        )
    }
    choosing = {number: time_to_choose(number) for number in (10, 100, 1000)}
    ratios = ratios_of(measured, simulated) | gains_kept(processes)
    for strategy, micros in choosing[1000].items():
        ratios[f"choose_us_1000_{strategy.lower()}"] = round(micros, 2)
    print_report(
        "routing",
        rows_of(measured, simulated) + rows_of_processes(processes),
        ratios,
        options,
        duration_s=duration_s,
        service="lognormal, cv 0.5, one request at a time an instance",
        is_ahead_of_other_processes=is_ahead,
        choose_us={
            str(number): {name: round(us, 2) for name, us in found.items()} for number, found in choosing.items()
        },
    )


def together(runs: Sequence[Run]) -> Run:
    """Return several rounds as one."""
    return Run([latency for run in runs for latency in run.latencies_s], median([run.throughput for run in runs]))


def p99_cut(run: Run, baseline: Run) -> float:
    """Return the reduction of P99 as a share of the baseline's P99."""
    return 1 - run.percentile(0.99) / baseline.percentile(0.99)


def throughput_gain(run: Run, baseline: Run) -> float:
    return run.throughput / baseline.throughput - 1


def rows_of(measured: Results, simulated: Simulated) -> list[dict[str, Any]]:
    """Return a row for each pair of users and instances and each arm; simulated arms follow the measured ones."""
    rows = []
    for row, arms in measured.items():
        name = f"{row.users}/{row.instances}" + (" short" if row is SHORT else "")
        rows += [_row(name, arm, runs, arms["random"], unit_s=1.0) for arm, runs in arms.items()]
        if row is not SHORT:
            found = simulated[row.users, row.instances]
            for arm, run in found.items():  # simulated with a mean service time of 1
                rows.append(_row(name, f"simulated {arm}", [run], [found["random"]], unit_s=row.mean_s))
    large = simulated[LARGE]
    for arm, run in large.items():
        rows.append(_row("{}/{}".format(*LARGE), f"simulated {arm}", [run], [large["random"]], unit_s=0.1))
    return rows


def _row(name: str, arm: str, runs: Sequence[Run], baselines: Sequence[Run], *, unit_s: float) -> dict[str, Any]:
    run, baseline = together(runs), together(baselines)
    cuts = [p99_cut(*pair) for pair in zip(runs, baselines, strict=True)]
    return {
        "users/instances": name,
        "arm": arm,
        "p50_ms": 1000 * unit_s * run.percentile(0.5),
        "p99_ms": 1000 * unit_s * run.percentile(0.99),
        "per_s": run.throughput / unit_s,
        "p99_cut": p99_cut(run, baseline),
        "least": min(cuts),
        "most": max(cuts),
        "throughput_gain": throughput_gain(run, baseline),
    }


def rows_of_processes(processes: Processes) -> list[dict[str, Any]]:
    """Return a row for each arm and number of processes."""
    return [
        _row(f"{row.users}/{row.instances} roaming", f"{arm}, {number}", runs, arms["random", 1], unit_s=1.0)
        for row, arms in processes.items()
        for (arm, number), runs in arms.items()
    ]


def gains_kept(processes: Processes) -> dict[str, float]:
    """Return the share of one process's reduction of P99 that several processes keep, in the worst row."""
    kept: dict[str, list[float]] = {}
    for arms in processes.values():
        p99 = {key: together(runs).percentile(0.99) for key, runs in arms.items()}
        gain = p99["random", 1] - p99[ARMS[1], 1]
        for number in PROCESSES[1:]:
            share = (p99["random", 1] - p99[ARMS[1], number]) / gain
            kept.setdefault(f"p99_gain_kept_{number}", []).append(share)
    return {key: min(shares) for key, shares in kept.items()}


def ratios_of(measured: Results, simulated: Simulated) -> dict[str, float]:
    """Return the ratios that docs/benchmarks.md explains."""
    ratios: dict[str, float] = {}
    gaps = []
    for row in PUBLISHED:
        name = f"{row.users}_{row.instances}"
        arms = {arm: together(runs) for arm, runs in measured[row].items()}
        for arm, key in (("late_binding", name), ("least_outstanding", f"least_outstanding_{name}")):
            ratios[f"p99_cut_{key}"] = p99_cut(arms[arm], arms["random"])
            ratios[f"throughput_gain_{key}"] = throughput_gain(arms[arm], arms["random"])
        best = simulated[row.users, row.instances]
        gaps.append(p99_cut(best["central_queue"], best["random"]) - ratios[f"p99_cut_{name}"])
    ratios["p99_gap_to_central_queue"] = max(gaps)
    short = {arm: together(runs) for arm, runs in measured[SHORT].items()}
    for arm in ("least_outstanding", "late_binding"):
        ratios[f"p99_cut_short_{arm}"] = p99_cut(short[arm], short["random"])
    large = simulated[LARGE]
    for arm in SIMULATED[1:]:
        ratios[f"p99_cut_simulated_4000_1000_{arm}"] = p99_cut(large[arm], large["random"])
    return ratios


if __name__ == "__main__":
    main()
