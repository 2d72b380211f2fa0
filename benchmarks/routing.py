"""How much sooner is the slowest answer when requests go where there is room?

The published table of users and instances (20/5, 40/10, 60/15, 80/20): users who send their next request as soon as
the last is answered, instances that take one request at a time, lognormal service times (cv 0.5, mean 100 ms so that
two shared cores are not what is measured), over real HTTP through the real proxy:

    random             SageMaker's default
    least_outstanding  LEAST_OUTSTANDING_REQUESTS
    late_binding       the same with a queue at the proxy: an instance gets one request, the rest wait for the first
                       that is free

Beside them what a simulation says of random, least outstanding, and one central queue, which is the optimum. A row of
5 ms shows what is left where service is about as short as the machine's own noise. Then, simulated with this project's
own strategies: 1,000 instances, and the time to choose.

P99 of all rounds together; `p99_cut_*` and `throughput_gain_*` are late_binding's against random.

    python benchmarks/routing.py [--quick] [--rounds 6] [--save]
"""

from typing import Any

from report import parse_options, print_report
from routing_simulation import Run, simulate, time_to_choose
from routing_stage import ARMS, Results, Row, ask, cut, pooled, stage

PUBLISHED = [Row(users, instances, 0.1) for users, instances in ((20, 5), (40, 10), (60, 15), (80, 20))]
SHORT = Row(20, 5, 0.005)
DURATION_S = 20.0
LARGE = (4000, 1000)  # users, instances; simulated


def main() -> None:
    options = parse_options(__doc__, quick="one round of 6 s an arm", rounds=6)
    duration_s = 6.0 if options.quick else DURATION_S
    measured: dict[Row, dict[str, list[Run]]] = {row: {arm: [] for arm in ARMS} for row in (*PUBLISHED, SHORT)}
    with stage([*PUBLISHED, SHORT]) as port:
        for round_number in range(options.rounds):
            for rows in (PUBLISHED, [SHORT]):
                for arm in ARMS:
                    share = 0.25 if rows == [SHORT] else 1.0  # as many requests in less time
                    runs = ask(port, rows, arm, seed=round_number, duration_s=share * duration_s)
                    for row, run in runs.items():
                        measured[row][arm].append(run)
            print(f"round {round_number + 1} of {options.rounds}", flush=True)
    num_requests = 30_000 if options.quick else 200_000
    ideal = {
        (row.users, row.instances): {
            arm: simulate(arm, row.users, row.instances, num_requests=num_requests)
            for arm in ("random", "least_outstanding", "central_queue")
        }
        for row in PUBLISHED
    }
    large = {
        arm: simulate(arm, *LARGE, num_requests=2 * num_requests)
        for arm in ("random", "least_outstanding", "central_queue")
    }
    choosing = {number: time_to_choose(number) for number in (10, 100, 1000)}
    ratios = ratios_of(measured, ideal)
    ratios["p99_cut_simulated_4000_1000"] = cut(large["least_outstanding"], large["random"], 0.99)
    ratios["p99_cut_central_queue_4000_1000"] = cut(large["central_queue"], large["random"], 0.99)
    for strategy, micros in choosing[1000].items():
        ratios[f"choose_us_1000_{strategy.lower()}"] = round(micros, 2)
    print_report(
        "routing",
        rows_of(measured, ideal),
        ratios,
        save=options.save,
        rounds=options.rounds,
        duration_s=duration_s,
        choose_us={
            str(number): {name: round(us, 2) for name, us in found.items()} for number, found in choosing.items()
        },
        service="lognormal, cv 0.5, one request at a time an instance",
    )


def rows_of(measured: Results, ideal: dict[tuple[int, int], dict[str, Run]]) -> list[dict[str, Any]]:
    """One row for each arm of each pair of users and instances, simulated ones after the measured."""
    rows = []
    for row, arms in measured.items():
        baseline = pooled(arms["random"])
        found = {arm: pooled(runs) for arm, runs in arms.items()}
        for arm, run in found.items():
            cuts = [cut(one, other, 0.99) for one, other in zip(arms[arm], arms["random"], strict=True)]
            rows.append(
                _row(row, arm, run, baseline, scale=1000.0)
                | {"p99_cut_rounds": f"{min(cuts):.2f}..{max(cuts):.2f}" if arm != "random" else "-"}
            )
        simulated = ideal.get((row.users, row.instances)) if row is not SHORT else None
        for arm, run in (simulated or {}).items():
            # The simulation's mean service time is 1: told in the row's milliseconds.
            line = _row(row, f"simulated {arm}", run, simulated["random"], scale=1000.0 * row.mean_s)  # type: ignore[index]
            rows.append(line | {"per_s": run.throughput / row.mean_s, "p99_cut_rounds": "-"})
    return rows


def _row(row: Row, arm: str, run: Run, baseline: Run, *, scale: float) -> dict[str, Any]:
    return {
        "users/instances": f"{row.users}/{row.instances}" + (" short" if row is SHORT else ""),
        "arm": arm,
        "p50_ms": run.percentile(0.5) * scale,
        "p99_ms": run.percentile(0.99) * scale,
        "per_s": run.throughput,
        "p99_cut": cut(run, baseline, 0.99),
        "throughput_gain": run.throughput / baseline.throughput - 1,
    }


def ratios_of(measured: Results, ideal: dict[tuple[int, int], dict[str, Run]]) -> dict[str, float]:
    """The keys of docs/benchmarks.md."""
    ratios: dict[str, float] = {}
    gaps = []
    for row in PUBLISHED:
        name = f"{row.users}_{row.instances}"
        arms = {arm: pooled(runs) for arm, runs in measured[row].items()}
        best = ideal[row.users, row.instances]
        ratios[f"p99_cut_{name}"] = cut(arms["late_binding"], arms["random"], 0.99)
        ratios[f"throughput_gain_{name}"] = arms["late_binding"].throughput / arms["random"].throughput - 1
        ratios[f"p99_cut_least_outstanding_{name}"] = cut(arms["least_outstanding"], arms["random"], 0.99)
        ratios[f"throughput_gain_least_outstanding_{name}"] = (
            arms["least_outstanding"].throughput / arms["random"].throughput - 1
        )
        gaps.append(cut(best["central_queue"], best["random"], 0.99) - ratios[f"p99_cut_{name}"])
    ratios["p99_gap_to_central_queue"] = max(gaps)
    short = {arm: pooled(runs) for arm, runs in measured[SHORT].items()}
    for arm in ("least_outstanding", "late_binding"):
        ratios[f"p99_cut_short_{arm}"] = cut(short[arm], short["random"], 0.99)
    return ratios


if __name__ == "__main__":
    main()
