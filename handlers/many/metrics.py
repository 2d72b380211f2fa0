"""The metrics of models and adapters that are loaded on demand: their tables, and their numbers."""

from collections.abc import Mapping
from typing import Any

from handlers.chat.images.decoding_budget import DecodingBudget
from handlers.chat.metrics import COMMON_METRICS, count_common
from handlers.worker.counters import COUNTER, GAUGE, HISTOGRAM, Counters, Metric

TIERS = ("device", "host", "disk")

ADAPTER_METRICS = (
    Metric(
        "models",
        GAUGE,
        "count",
        "Models, or adapters of one, by where they are: LoadedModelCount is those on the device and the host.",
        ("models",),
        ("Tier", (*TIERS, "loading", "broken")),
    ),
    Metric("model_bytes", GAUGE, "B", "Bytes that models take, by tier.", ("memory",), ("Tier", TIERS)),
    Metric("model_capacity_bytes", GAUGE, "B", "What they may take.", ("capacity",), ("Tier", TIERS)),
    Metric(
        "model_events_total",
        COUNTER,
        "count",
        "Requests that found their model on the device (ModelCacheHit) or not, loads, moves between device and host, "
        "evictions, failed loads.",
        ("events",),
        ("Event", ("hits", "misses", "loads", "promotions", "demotions", "evictions", "failures")),
    ),
    Metric("model_waiting_requests", GAUGE, "count", "Requests that wait for their model.", ("waiting",)),
    Metric(
        "model_download_seconds", HISTOGRAM, "s", "ModelDownloadingTime: from the source to the disk.", ("download",)
    ),
    Metric("model_load_seconds", HISTOGRAM, "s", "ModelLoadingTime: from the disk to memory.", ("load",)),
    Metric("model_unload_seconds", HISTOGRAM, "s", "ModelUnloadingTime: out of memory.", ("unload",)),
    Metric("model_wait_seconds", HISTOGRAM, "s", "ModelLoadingWaitTime: how long they waited.", ("wait",)),
)

MANY_METRICS = (
    *ADAPTER_METRICS,
    Metric(
        "model_requests_total",
        COUNTER,
        "count",
        "Requests that ended; a refused one did not get its model.",
        ("requests",),
        ("Outcome", ("answered", "refused", "failed", "cancelled")),
    ),
    *COMMON_METRICS,
    Metric("model_latency_seconds", HISTOGRAM, "s", "From a request's arrival to its whole answer.", ("latency",)),
)


def count_models(counters: Counters, status: Mapping[str, Any], decoding: DecodingBudget) -> dict[str, Any]:
    """Return the numbers by group and name. status: the registry's. Any thread."""
    return {
        **counters.read(MANY_METRICS),
        **count_memory(counters, status),
        **count_common(decoding),
    }


def count_memory(counters: Counters, status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of ADAPTER_METRICS. status: the registry's. Any thread."""
    tiers = [model["tier"] for model in status["models"]]
    return {
        **counters.read(ADAPTER_METRICS),
        "models": {tier: tiers.count(tier) for tier in (*TIERS, "loading", "broken")},
        "memory": {name: budget["used"] for name, budget in status["budgets"].items()},
        "capacity": {name: budget["max"] for name, budget in status["budgets"].items()},
        "waiting": status["waiting"],
    }
