"""What the project wants to reach, as one table: each ratio that a benchmark prints, and its goal.

A goal is a limit on a ratio within one run, never on a time; where no benchmark measures a goal yet, it stands here
all the same, and reports say so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Verdict(Enum):
    REACHED = "reached"
    MISSED = "not reached"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One ratio of one benchmark.

    least, most: between which it must be, both included; None: no limit on that side.
    wants: what it must be, for what is yes or no.
    needs_whole_run: a quick run is too small to say anything about it.
    """

    benchmark: str
    ratio: str
    means: str
    least: float | None = None
    most: float | None = None
    wants: bool | None = None
    needs_whole_run: bool = False

    def __post_init__(self) -> None:
        if self.least is self.most is self.wants is None:
            raise ValueError(f"goal {self.benchmark}.{self.ratio} has no limit")

    def judge(self, report: Mapping[str, Any] | None) -> Verdict:
        """report: what the benchmark printed last, None if it did not get that far."""
        value = None if report is None else report["ratios"].get(self.ratio)
        if report is None or value is None or (self.needs_whole_run and is_quick(report)):
            return Verdict.NOT_RUN
        if self.wants is not None:
            return Verdict.REACHED if value is self.wants else Verdict.MISSED
        is_within = (self.least is None or value >= self.least) and (self.most is None or value <= self.most)
        return Verdict.REACHED if is_within else Verdict.MISSED

    @property
    def limit(self) -> str:
        """The goal as people write it."""
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
    """Whether a report is of a shortened run."""
    return bool(report.get("settings", {}).get("quick"))


def _none(benchmark: str, ratio: str, means: str) -> Goal:
    return Goal(benchmark=benchmark, ratio=ratio, means=means, least=0, most=0)


ROWS = ("20_5", "40_10", "60_15", "80_20")  # users and instances of the published table

GOALS: tuple[Goal, ...] = (
    Goal(benchmark="proxy", ratio="cpu_vs_nginx", means="processor time a request, of nginx's", most=1.5),
    Goal(benchmark="proxy", ratio="cpu_vs_vllm_router", means="the same, of vllm-router's", most=0.45),
    Goal(benchmark="proxy", ratio="cpu_vs_sglang_router", means="the same, of sglang-router's", most=0.33),
    Goal(benchmark="proxy", ratio="token_cpu_vs_nginx", means="processor time a streamed token, of nginx's", most=1.25),
    Goal(benchmark="proxy", ratio="ttfb_vs_nginx", means="time added to a stream's first byte, of nginx's", most=2),
    Goal(benchmark="proxy", ratio="upload_rss_mb", means="memory that an upload of 100 MB adds, MB", most=4),
    Goal(benchmark="proxy", ratio="upload_mbs_vs_nginx", means="speed of that upload, of nginx's", least=1.0),
    Goal(
        benchmark="proxy", ratio="framed_token_cpu_vs_plain", means="a token in AWS's framing, of a plain one", most=1.3
    ),
    Goal(
        benchmark="routing",
        ratio="p99_gap_to_central_queue",
        means="P99 cut, behind the simulated optimum's, in the worst row",
        most=0.05,
    ),
    *(
        Goal(
            benchmark="routing",
            ratio=f"throughput_gain_{row}",
            means=f"throughput above random's, {row.replace('_', ' users, ')} instances",
            least=0.14,
        )
        for row in ROWS
    ),
    *(
        Goal(
            benchmark="routing",
            ratio=f"p99_gain_kept_{number}",
            means=f"part of least outstanding's gain in P99 that {number} proxy processes keep",
            least=0.85,
        )
        for number in (2, 4)
    ),
    Goal(
        benchmark="routing",
        ratio="choose_us_1000_least_outstanding_requests",
        means="time to choose among 1,000 instances, microseconds",
        most=5,
    ),
    Goal(
        benchmark="followup",
        ratio="ttft_kv_vs_stateless",
        means="time to first token with a kept KV cache, of a stateless turn's",
        most=0.05,
    ),
    Goal(
        benchmark="followup",
        ratio="ttft_features_vs_stateless",
        means="the same with kept picture features",
        most=0.55,
    ),
    Goal(
        benchmark="followup",
        ratio="ttft_turn20_vs_turn2",
        means="time to first token of turn 20, of turn 2's",
        most=1.3,
    ),
    Goal(
        benchmark="followup",
        ratio="rebuild_vs_stateless",
        means="a session's turn on another instance, of a stateless turn",
        most=1.15,
    ),
    Goal(
        benchmark="followup",
        ratio="sessions_vs_one_a_worker",
        means="open sessions a worker, of the AWS sample's one",
        least=100,
    ),
    _none("followup", "sessions_lost", "of them lost before their time"),
    *(
        Goal(
            benchmark="followup",
            ratio=f"{tier}_bytes_vs_formula",
            means=f"bytes of a session in the {tier} tier, of the formula's",
            least=0.95,
            most=1.05,
        )
        for tier in ("kv", "features", "host")
    ),
    Goal(benchmark="followup", ratio="greedy_equal", means="greedy tokens equal the stateless ones", wants=True),
    Goal(
        benchmark="engine",
        ratio="cpu_token_8_vs_sequential",
        means="processor time a token of 8 streams, of one after the other",
        most=1 / 3.7,
    ),
    Goal(benchmark="engine", ratio="cpu_token_16_vs_sequential", means="the same of 16 streams", most=1 / 5.1),
    Goal(
        benchmark="engine",
        ratio="cpu_token_8_vs_vllm",
        means="8 streams in bfloat16, of vLLM's on the same processor",
        most=1,
    ),
    Goal(
        benchmark="engine",
        ratio="cpu_token_followup_8_vs_vllm",
        means="follow-ups of 8 sessions, of vLLM's with prefix hits",
        most=1,
    ),
    Goal(
        benchmark="engine",
        ratio="long_prompt_gap",
        means="longest gap between tokens while a prompt of 4,000 comes in, of the usual",
        most=2,
    ),
    Goal(
        benchmark="engine",
        ratio="served_added_cpu_ms",
        means="what TorchServe and proxy add a token, ms of processor time",
        most=0.25,
    ),
    Goal(benchmark="engine", ratio="greedy_equal", means="greedy tokens, batched and alone, are equal", wants=True),
    Goal(benchmark="many_models", ratio="models", means="models in one worker", least=200),
    Goal(benchmark="many_models", ratio="resident", means="of them in memory at a time", most=20),
    Goal(
        benchmark="many_models",
        ratio="memory_vs_process_a_model",
        means="memory a model, of a worker process a model",
        most=1 / 8,
    ),
    Goal(benchmark="many_models", ratio="warm_vs_alone", means="warm, of the same model served alone", most=1.05),
    Goal(benchmark="many_models", ratio="cold_vs_read", means="cold, of reading the file and one pass", most=2),
    _none("many_models", "wrong", "requests lost or wrongly answered"),
    Goal(
        benchmark="async_inference",
        ratio="submitted",
        means="requests under random kill -9",
        least=10_000,
        needs_whole_run=True,
    ),
    _none("async_inference", "missing", "of them without a result"),
    _none("async_inference", "duplicated", "of them done twice"),
    Goal(
        benchmark="async_inference",
        ratio="rss_growth_mb_1gb",
        means="memory that 1 GB in and out adds to the proxy, MB",
        most=64,
    ),
    Goal(
        benchmark="async_inference",
        ratio="submit_vs_insert",
        means="a submit, of a durable insert into SQLite",
        most=3,
    ),
    Goal(
        benchmark="async_inference",
        ratio="wake_vs_start",
        means="waking from no instance, of an instance's start",
        most=1.1,
    ),
    _none("failover", "sessions_lost", "sessions lost with one of three instances"),
    _none("failover", "turns_lost", "acknowledged turns lost"),
    _none("failover", "failed_before_first_byte", "requests that failed before a byte of their answer"),
    Goal(
        benchmark="failover", ratio="detect_s", means="until a killed instance gets no more requests, seconds", most=1
    ),
    _none("scale", "turns_unserved", "questions for which there was no instance"),
    _none("scale", "proxies_disagree", "questions that two proxies would have sent to different instances"),
    _none("scale", "strays", "questions of unharmed sessions that were sent elsewhere"),
)
