"""Every benchmark runs from end to end, as `make bench` starts it; its times are not checked."""

import json
from typing import Any

import pytest

from benchmarks.goals import GOALS
from benchmarks.report_all import known_benchmarks
from tests.documented.as_user import ROOT, make
from tests.tools import missing

LONG = ("async_inference", "engine", "followup", "many_models", "soak", "forgotten")  # minutes each, even shortened
PEERS = ("cpu_vs_vllm_router", "cpu_vs_sglang_router")  # not measured where these are not installed
long = pytest.mark.long
slow = pytest.mark.slow

pytestmark = [pytest.mark.torchserve, pytest.mark.timeout(900)]


def quick_run(name: str) -> Any:
    """Return the last line of a quick run; the other lines are shown if a test fails."""
    said = make("bench", f"NAME={name}", "QUICK=1")
    print(said)
    return json.loads(said.splitlines()[-1])


@slow
@pytest.mark.needs("nginx", "wrk")
def test_proxy_runs() -> None:
    """Every ratio with a goal is measured, except against routers that are not installed."""
    check_ratios("proxy", quick_run("proxy"), absent=PEERS)


@slow
@pytest.mark.parametrize("name", sorted({*known_benchmarks()} - {*LONG, "proxy", "failover"}))
def test_benchmark_runs(name: str) -> None:
    """Every ratio with a goal is measured."""
    check_ratios(name, quick_run(name))


def check_ratios(name: str, report: Any, absent: tuple[str, ...] = ()) -> None:
    wanted = {goal.ratio for goal in GOALS if goal.benchmark == name} - {*absent}
    assert report["benchmark"] == name
    assert report["rows"]
    assert {ratio for ratio in wanted if report["ratios"].get(ratio) is None} == set()


@long
def test_followup_runs() -> None:
    """All ways to ask a follow-up question give the same greedy answer, and no session is lost under pressure."""
    found = quick_run("followup")

    ratios = found["ratios"]
    arms = {"kv", "features", "stateless", "rebuild", "pixels, in process", "stateless, in process"}
    assert arms == {row["arm"] for row in found["rows"]}
    assert ratios["greedy_equal"] is True
    assert tuple(ratios[f"sessions_{key}"] for key in ("vs_one_a_worker", "lost", "wrong")) == (100, 0, 0)
    assert 1.0 == ratios["features_bytes_vs_formula"] == ratios["host_bytes_vs_formula"]
    assert 1.0 <= ratios["kv_bytes_vs_formula"] <= 1.05


@long
def test_engine_runs() -> None:
    """Answers of any number of streams, of follow-ups and of the served engine equal those of generate."""
    if not (ROOT / "models" / "smollm2" / "config.json").is_file():
        missing("there is no models/smollm2; scripts/make_smollm2.py makes it")

    found = quick_run("engine")

    assert {1, 4, 8, 16} == {row["streams"] for row in found["rows"] if row["arm"] == "torchmoor"}
    assert found["ratios"]["greedy_equal"] is True
    assert found["settings"]["answers_compared"] == 38


@slow
def test_failover_runs() -> None:
    """When one instance of three fails, no session and no acknowledged turn is lost, and no stream breaks."""
    ratios = quick_run("failover")["ratios"]

    assert (ratios["sessions_lost"], ratios["turns_lost"], ratios["failed_before_first_byte"]) == (0, 0, 0)
    assert (ratios["failed_after_first_byte"], ratios["long_answers_broken"]) == (0, 0)
    assert ratios["detect_s"] is not None


@long
def test_many_models_runs() -> None:
    """Two hundred models on a worker with memory for twenty give correct answers, also after a kill."""
    if not (ROOT / "models" / "minilm" / "config.json").is_file():
        missing("there is no models/minilm; scripts/make_minilm.py makes it")

    ratios = quick_run("many_models")["ratios"]

    assert (ratios["models"], ratios["resident"], ratios["wrong"]) == (200, 20, 0)
    assert all(ratios[key] > 0 for key in ("warm_vs_alone", "cold_vs_read", "memory_vs_process_a_model"))


@long
def test_async_inference_runs() -> None:
    """Each request has exactly one result whichever process is killed, 1 GB passes with little memory, one wakes."""
    found = quick_run("async_inference")

    ratios, (row,) = found["ratios"], found["rows"]
    assert (ratios["submitted"], ratios["missing"], ratios["duplicated"]) == (300, 0, 0)
    assert row["killed_proxy"] == 1
    assert ratios["rss_growth_mb_1gb"] <= 64
    assert ratios["wake_vs_start"] > 0


@long
def test_soak_runs() -> None:
    """Beside hostile clients and a kill, good clients lose nothing, and nothing is left in flight."""
    if not (ROOT / "models" / "minilm" / "config.json").is_file():
        missing("there is no models/minilm; scripts/make_minilm.py makes it")

    ratios = quick_run("soak")["ratios"]

    names = ("sessions_lost", "turns_lost", "async_lost", "wrong", "left_over")
    assert {name: ratios[name] for name in names} == dict.fromkeys(names, 0)


@long
def test_forgotten_runs() -> None:
    """Sessions that are never closed refuse no opening, and each of them can be asked again, also after a kill."""
    ratios = quick_run("forgotten")["ratios"]

    assert (ratios["refused"], ratios["lost"], ratios["wrong"]) == (0, 0, 0)
