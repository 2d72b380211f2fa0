"""Defines the project's goals: limits for ratios that benchmarks print.

Each ratio is measured within one run, because times differ between machines. The report lists goals without a
measurement as not run.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Any


class Verdict(Enum):
    REACHED = "reached"
    MISSED = "not reached"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit for one ratio of one benchmark.

    least, most: inclusive limits; None: no limit on that side.
    wants: the required value of a ratio that is yes or no.
    needs_whole_run: a quick run is too short to judge this goal.
    """

    benchmark: str
    ratio: str
    means: str
    _: KW_ONLY
    least: float | None = None
    most: float | None = None
    wants: bool | None = None
    needs_whole_run: bool = False

    def __post_init__(self) -> None:
        if self.least is self.most is self.wants is None:
            raise ValueError(f"goal {self.benchmark}.{self.ratio} has no limit")

    def judge(self, report: Mapping[str, Any] | None) -> Verdict:
        """Judge the benchmark's report; None is a benchmark without a report."""
        value = None if report is None else report["ratios"].get(self.ratio)
        if report is None or value is None or (self.needs_whole_run and is_quick(report)):
            return Verdict.NOT_RUN
        if self.wants is not None:
            return Verdict.REACHED if value is self.wants else Verdict.MISSED
        is_within = (self.least is None or value >= self.least) and (self.most is None or value <= self.most)
        return Verdict.REACHED if is_within else Verdict.MISSED

    @property
    def limit(self) -> str:
        """The limit for display."""
        if self.wants is not None:
            return "yes" if self.wants else "no"
        if self.least == self.most:
            return f"{self.most:,g}"
        if self.least is not None and self.most is not None:
            return f"{self.least:,g} to {self.most:,g}"
        return (
            f"\N{LESS-THAN OR EQUAL TO}\N{NO-BREAK SPACE}{self.most:,.3g}"
            if self.most is not None
            else f"\N{GREATER-THAN OR EQUAL TO}\N{NO-BREAK SPACE}{self.least:,.6g}"
        )


def is_quick(report: Mapping[str, Any]) -> bool:
    """Return whether the report is from a shortened run."""
    return bool(report.get("settings", {}).get("quick"))


def _none(benchmark: str, ratio: str, means: str) -> Goal:
    return Goal(benchmark, ratio, means, least=0, most=0)


GOALS: tuple[Goal, ...] = (
    Goal("proxy", "same_rate_cpu_vs_nginx", "processor time per request at the same rate, relative to nginx", most=1.5),
    Goal("proxy", "same_rate_cpu_vs_nginx_boto3", "the same with the header lines of boto3", most=1.6),
    Goal("proxy", "same_rate_cpu_vs_nginx_by_load", "the same without a session", most=1.8),
    Goal("proxy", "cpu_vs_nginx", "processor time per request in a closed loop, relative to nginx", most=1.8),
    Goal("proxy", "cpu_vs_nginx_boto3", "the same with the header lines of boto3", most=2.1),
    Goal("proxy", "cpu_vs_nginx_by_load", "the same without a session", most=2.3),
    Goal("proxy", "cpu_vs_vllm_router", "processor time per request, relative to vllm-router", most=0.45),
    Goal("proxy", "cpu_vs_sglang_router", "processor time per request, relative to sglang-router", most=0.33),
    Goal("proxy", "token_cpu_vs_nginx", "processor time per streamed token, relative to nginx", most=1.25),
    Goal("proxy", "ttfb_vs_nginx", "latency added to a stream's first byte, relative to nginx", most=2),
    Goal("proxy", "upload_rss_mb", "memory that a 100 MB upload adds, MB", most=4),
    Goal("proxy", "upload_mbs_vs_nginx", "speed of that upload, relative to nginx", least=1.0),
    Goal("proxy", "framed_token_cpu_vs_plain", "token in an AWS event stream, relative to a plain stream", most=1.3),
    Goal("stream", "cpu_ms_a_token_8", "processor time beside the engine, ms per token of 8 streams", most=0.25),
    Goal("stream", "cpu_ms_a_token_64", "the same with 64 streams", most=0.10),
    Goal(
        "stream", "tokens_per_s_64", "tokens per second of 64 streams, with an engine that takes no time", least=10_000
    ),
    Goal("stream", "tokens_per_s_demo_64", "tokens per second of 64 streams of the demo model", least=4_000),
    Goal(
        "grammar",
        "cpu_vs_free_greedy",
        "processor time per token with a schema, 8 greedy rows, relative to no schema",
        most=1.1,
    ),
    Goal("grammar", "cpu_vs_free_sampled", "the same with sampled rows", most=1.1),
    _none("grammar", "invalid", "answers that violate their schema, of 10,000 schemas"),
    _none("forgotten", "refused", "openings refused while sessions are forgotten"),
    _none("forgotten", "lost", "forgotten sessions that did not answer another question"),
    _none("forgotten", "wrong", "forgotten sessions that gave a wrong answer"),
    Goal(
        "forgotten",
        "rss_growth_after_full",
        "memory of a worker with a full table, end relative to start",
        most=1.05,
        needs_whole_run=True,
    ),
    Goal(
        "forgotten",
        "opening_p99_vs_empty",
        "P99 of openings with a full table, relative to an empty one",
        most=1.5,
        needs_whole_run=True,
    ),
    _none("soak", "sessions_lost", "sessions lost beside hostile clients and kills"),
    _none("soak", "turns_lost", "answered turns lost or duplicated"),
    _none("soak", "async_lost", "asynchronous requests lost"),
    _none("soak", "wrong", "wrong answers of many models"),
    _none("soak", "left_over", "turns, rows and requests in flight after all clients have left"),
    Goal("soak", "proxy_growth", "memory of the proxy, end relative to start", most=1.02, needs_whole_run=True),
    Goal("soak", "jvm_growth", "the same of an instance's JVM", most=1.02, needs_whole_run=True),
    Goal("soak", "worker_growth", "the same of a worker", most=1.02, needs_whole_run=True),
    Goal("soak", "threads_growth", "threads, end relative to start", most=1.02, needs_whole_run=True),
    Goal("soak", "descriptors_left", "the proxy's open files after all clients have left, relative to calm", most=1.02),
    Goal("soak", "p99_vs_calm", "good clients' P99 beside hostile ones", most=1.5, needs_whole_run=True),
    Goal("soak", "p99_vs_sink", "the same, relative to hostile clients at a sink", most=1.5, needs_whole_run=True),
    Goal(
        "routing",
        "p99_gap_to_central_queue",
        "reduction of P99: distance from the simulated optimum, worst row",
        most=0.05,
    ),
    Goal("routing", "throughput_gain_20_5", "throughput gain over random, 20 users, 5 instances", least=0.14),
    Goal("routing", "throughput_gain_40_10", "throughput gain over random, 40 users, 10 instances", least=0.14),
    Goal("routing", "throughput_gain_60_15", "throughput gain over random, 60 users, 15 instances", least=0.14),
    Goal("routing", "throughput_gain_80_20", "throughput gain over random, 80 users, 20 instances", least=0.14),
    Goal("routing", "p99_gain_kept_2", "share of least outstanding's P99 gain kept by 2 processes", least=0.85),
    Goal("routing", "p99_gain_kept_4", "share of least outstanding's P99 gain kept by 4 processes", least=0.85),
    Goal(
        "routing",
        "choose_us_1000_least_outstanding_requests",
        "time to choose among 1,000 instances, microseconds",
        most=5,
    ),
    Goal(
        "followup", "ttft_kv_vs_stateless", "time to first token with a kept KV cache, relative to stateless", most=0.05
    ),
    Goal("followup", "ttft_responses_vs_stateless", "the same over the Responses API", most=0.05),
    Goal("followup", "ttft_features_vs_stateless", "the same with kept image features", most=0.55),
    Goal("followup", "ttft_turn20_vs_turn2", "time to first token of turn 20, relative to turn 2", most=1.3),
    Goal("followup", "rebuild_vs_stateless", "a session's turn on another instance, relative to stateless", most=1.15),
    Goal("followup", "rebuild_stored_vs_stateless", "the same with the KV cache in the journal", most=0.2),
    Goal("followup", "sessions_vs_one_a_worker", "open sessions per worker; the AWS sample has one", least=100),
    _none("followup", "sessions_lost", "sessions lost before they expire"),
    Goal(
        "followup",
        "kv_bytes_vs_formula",
        "bytes of a session in the kv tier, relative to the formula",
        least=0.95,
        most=1.05,
    ),
    Goal(
        "followup",
        "features_bytes_vs_formula",
        "bytes of a session in the features tier, relative to the formula",
        least=0.95,
        most=1.05,
    ),
    Goal(
        "followup",
        "host_bytes_vs_formula",
        "bytes of a session in the host tier, relative to the formula",
        least=0.95,
        most=1.05,
    ),
    Goal("followup", "greedy_equal", "greedy tokens equal those of stateless turns", wants=True),
    Goal(
        "engine",
        "cpu_token_8_vs_sequential",
        "processor time per token, 8 streams, relative to sequential",
        most=1 / 3.7,
    ),
    Goal("engine", "cpu_token_16_vs_sequential", "the same with 16 streams", most=1 / 5.1),
    Goal("engine", "cpu_token_8_vs_vllm", "8 streams in bfloat16, relative to vLLM on the same processor", most=1),
    Goal(
        "engine", "cpu_token_followup_8_vs_vllm", "follow-ups of 8 sessions, relative to vLLM with prefix hits", most=1
    ),
    Goal("engine", "long_prompt_gap", "longest token gap beside a prompt of 4,000, relative to the usual gap", most=2),
    Goal("engine", "served_added_cpu_ms", "processor time that TorchServe and proxy add per token, ms", most=0.25),
    Goal("engine", "greedy_equal", "greedy tokens of batched and single runs are equal", wants=True),
    Goal("many_models", "models", "models in one worker", least=200),
    Goal("many_models", "resident", "models in memory at a time", most=20),
    Goal("many_models", "memory_vs_process_a_model", "memory per model, relative to a process per model", most=1 / 8),
    Goal("many_models", "warm_vs_alone", "warm request, relative to the same model served alone", most=1.05),
    Goal("many_models", "cold_vs_read", "cold request, relative to reading the file and one pass", most=2),
    _none("many_models", "wrong", "requests lost or answered wrongly"),
    Goal("async_inference", "submitted", "requests under random kill -9", least=10_000, needs_whole_run=True),
    _none("async_inference", "missing", "requests without a result"),
    _none("async_inference", "duplicated", "requests processed twice"),
    Goal("async_inference", "rss_growth_mb_1gb", "memory that 1 GB in and out adds to the proxy, MB", most=64),
    Goal("async_inference", "submit_vs_insert", "submit, relative to a durable insert into SQLite", most=3),
    Goal(
        "async_inference",
        "wake_vs_start",
        "scale-out from zero, relative to an instance's start",
        most=1.1,
        needs_whole_run=True,
    ),
    _none("failover", "sessions_lost", "sessions lost when one of three instances fails"),
    _none("failover", "turns_lost", "answered turns lost"),
    _none("failover", "failed_before_first_byte", "requests that failed before their first response byte"),
    _none("failover", "failed_after_first_byte", "turns that failed after their first response byte"),
    _none("failover", "long_answers_broken", "long streamed answers with an error or another text"),
    Goal("failover", "longest_gap_s", "seconds between two pieces of a stream whose instance was killed", most=3),
    Goal("failover", "detect_s", "seconds until a killed instance receives no more requests", most=1),
    _none("scale", "turns_unserved", "questions without an instance to answer them"),
    _none("scale", "proxies_disagree", "questions that two proxies route to different instances"),
    _none("scale", "strays", "questions of intact sessions routed to another instance"),
)


def most(benchmark: str, ratio: str) -> float:
    """Return the upper limit of a ratio. Raises ValueError if there is none."""
    (limit,) = [goal.most for goal in GOALS if (goal.benchmark, goal.ratio) == (benchmark, ratio)]
    if limit is None:
        raise ValueError(f"goal {benchmark}.{ratio} has no upper limit")
    return limit
