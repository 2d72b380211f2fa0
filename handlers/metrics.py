"""A worker's metrics: a table for each kind of archive, and the thread that publishes them to TorchServe.

TorchServe reads a worker's metrics from lines on its standard output, one per value, and serves them on its metrics
port (docs/decisions/0011-cancel-and-metrics.md). Writing them per token or step would cost too much, so the thread
writes the changed values once per interval.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ts.metrics.metric_type_enum import MetricTypes

from handlers.counters import (
    GRAMMAR_EVENTS,
    IMAGE_EVENTS,
    KV_EVENTS,
    MODEL_EVENTS,
    MODEL_REQUEST_OUTCOMES,
    SESSION_EVENTS,
    TOKEN_KINDS,
    TURN_OUTCOMES,
)

logger = logging.getLogger(__name__)

PREFIX = "torchmoor_"
INTERVAL_S = 1.0
COUNTER, GAUGE, HISTOGRAM = MetricTypes.COUNTER, MetricTypes.GAUGE, MetricTypes.HISTOGRAM


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table.

    name: without the prefix; a counter ends in `_total`, which TorchServe does not add.
    unit: one of TorchServe's. source: path of the number in the service's status; for a histogram, the name of its
    series. label: its name and its values, each the last part of a path.
    """

    name: str
    kind: MetricTypes
    unit: str
    help: str
    source: tuple[str, ...]
    label: tuple[str, tuple[str, ...]] | None = None


_DECODING_METRICS = (
    Metric("decoding_bytes", GAUGE, "B", "Memory of images that are decoded.", ("decoding", "bytes")),
    Metric("decoding_capacity_bytes", GAUGE, "B", "What they may take.", ("decoding", "capacity_bytes")),
)

CHAT_METRICS = (
    Metric("sessions_open", GAUGE, "count", "Sessions that are open.", ("sessions", "open")),
    Metric("sessions_max", GAUGE, "count", "Sessions that may be open at once.", ("sessions", "max")),
    Metric(
        "sessions_total",
        COUNTER,
        "count",
        "Changes of sessions. An evicted session left this worker's memory; an adopted one was read from its journal; "
        "a damaged one was lost because its journal is not as a worker writes it.",
        ("sessions",),
        ("Event", SESSION_EVENTS),
    ),
    Metric("journal_bytes", GAUGE, "B", "The journals of all sessions, as last measured.", ("journal", "bytes")),
    Metric(
        "journal_sessions",
        GAUGE,
        "count",
        "The journal's open sessions of all workers, as last measured.",
        ("journal", "sessions"),
    ),
    Metric(
        "journal_refusals_total",
        COUNTER,
        "count",
        "Openings that were refused because the journal, or the caller's share of it, is full.",
        ("journal", "refusals"),
    ),
    Metric(
        "stored_kv_total",
        COUNTER,
        "count",
        "Parts of KV caches in the journal: written and read; not read because they are of another model or "
        "conversation, or not as a worker writes them; not written because journal.max_kv_bytes are used; failed.",
        ("stored_kv",),
        ("Event", KV_EVENTS),
    ),
    Metric("kv_bytes", GAUGE, "B", "KV blocks in use, on the device.", ("memory", "kv_bytes")),
    Metric("kv_capacity_bytes", GAUGE, "B", "KV blocks that there are.", ("memory", "kv_capacity_bytes")),
    Metric(
        "kv_evictions_total",
        COUNTER,
        "count",
        "Conversations whose KV blocks were given to others.",
        ("memory", "kv_evicted"),
    ),
    Metric("features_bytes", GAUGE, "B", "Features of images, on the device.", ("memory", "features_bytes")),
    Metric("features_capacity_bytes", GAUGE, "B", "What they may take.", ("memory", "features_capacity_bytes")),
    Metric("host_bytes", GAUGE, "B", "Encoded images in the host's memory.", ("memory", "host_bytes")),
    Metric("host_capacity_bytes", GAUGE, "B", "What they may take.", ("memory", "host_capacity_bytes")),
    *_DECODING_METRICS,
    Metric("turns_running", GAUGE, "count", "Turns that are prepared or generated.", ("turns", "running")),
    Metric("turns_waiting", GAUGE, "count", "Turns behind an earlier one of their session.", ("turns", "waiting")),
    Metric(
        "turns_total",
        COUNTER,
        "count",
        "Turns that ended; a repeated one was answered from the conversation.",
        ("turns",),
        ("Outcome", TURN_OUTCOMES),
    ),
    Metric(
        "tokens_total",
        COUNTER,
        "count",
        "Tokens of prompts that were computed, of prompts that were found in the KV cache (some of them restored from "
        "the journal), and of answers.",
        ("tokens",),
        ("Kind", TOKEN_KINDS),
    ),
    Metric(
        "images_total",
        COUNTER,
        "count",
        "Images that came with requests, were fetched from an address, went through the vision tower, were found "
        "there already, or gave their features' memory to others.",
        ("images",),
        ("Event", IMAGE_EVENTS),
    ),
    Metric(
        "grammars_total",
        COUNTER,
        "count",
        "Grammars that were compiled; that the library refused; that needed more time or memory than they may.",
        ("grammars",),
        ("Event", GRAMMAR_EVENTS),
    ),
    Metric(
        "engine_steps_total", COUNTER, "count", "Steps of the engine, each one run of the model.", ("engine", "steps")
    ),
    Metric("batch_rows", GAUGE, "count", "Sequences in the engine's batch.", ("engine", "rows")),
    Metric("queued_sequences", GAUGE, "count", "Sequences that wait for a place in it.", ("engine", "queued")),
    Metric("pump_rounds_total", COUNTER, "count", "Exchanges of rows with TorchServe.", ("pump", "rounds")),
    Metric(
        "pump_cpu_milliseconds_total",
        COUNTER,
        "ms",
        "Processor time of the thread that exchanges rows with TorchServe.",
        ("pump", "cpu_ms"),
    ),
    Metric("queue_seconds", HISTOGRAM, "s", "From a question's arrival to its turn's begin.", ("queue",)),
    Metric("time_to_first_token_seconds", HISTOGRAM, "s", "From a question's arrival to its first token.", ("ttft",)),
    Metric("inter_token_seconds", HISTOGRAM, "s", "An answer's mean time from token to token.", ("inter_token",)),
)

_TIERS = ("device", "host", "disk")

MANY_METRICS = (
    Metric(
        "models",
        GAUGE,
        "count",
        "Models by where they are: LoadedModelCount is those on the device and the host.",
        ("models",),
        ("Tier", (*_TIERS, "loading", "broken")),
    ),
    Metric("model_bytes", GAUGE, "B", "Bytes that models take, by tier.", ("memory",), ("Tier", _TIERS)),
    Metric("model_capacity_bytes", GAUGE, "B", "What they may take.", ("capacity",), ("Tier", _TIERS)),
    Metric(
        "model_events_total",
        COUNTER,
        "count",
        "Requests that found their model on the device (ModelCacheHit) or not, loads, moves between device and host, "
        "evictions, failed loads.",
        ("events",),
        ("Event", MODEL_EVENTS),
    ),
    Metric(
        "model_requests_total",
        COUNTER,
        "count",
        "Requests that ended; a refused one did not get its model.",
        ("requests",),
        ("Outcome", MODEL_REQUEST_OUTCOMES),
    ),
    *_DECODING_METRICS,
    Metric("model_waiting_requests", GAUGE, "count", "Requests that wait for their model.", ("waiting",)),
    Metric(
        "model_download_seconds", HISTOGRAM, "s", "ModelDownloadingTime: from the source to the disk.", ("download",)
    ),
    Metric("model_load_seconds", HISTOGRAM, "s", "ModelLoadingTime: from the disk to memory.", ("load",)),
    Metric("model_unload_seconds", HISTOGRAM, "s", "ModelUnloadingTime: out of memory.", ("unload",)),
    Metric("model_wait_seconds", HISTOGRAM, "s", "ModelLoadingWaitTime: how long they waited.", ("wait",)),
    Metric("model_latency_seconds", HISTOGRAM, "s", "From a request's arrival to its whole answer.", ("latency",)),
)


class MetricsPublisher:
    """Publishes changed values to TorchServe once per interval. Start it once; it ends with the process or by `stop`.

    cache: TorchServe's `context.metrics`. numbers: returns the service's current numbers. drain: returns a series'
    times since the last call.
    """

    def __init__(
        self,
        cache: Any,
        model_name: str,
        numbers: Callable[[], Mapping[str, Any]],
        drain: Callable[[str], Sequence[float]],
        table: Sequence[Metric] = CHAT_METRICS,
    ) -> None:
        self._model_name = model_name
        self._numbers = numbers
        self._drain = drain
        self._sinks = {metric: self._make_sink(cache, metric) for metric in table}
        self._published: dict[tuple[str, str], int] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    @staticmethod
    def _make_sink(cache: Any, metric: Metric) -> Any:
        labels = ["ModelName"] if metric.label is None else ["ModelName", metric.label[0]]
        return cache.add_metric_to_cache(PREFIX + metric.name, metric.unit, labels, metric.kind)

    def start(self) -> None:
        """Start publishing; the first time every metric, zeros included."""
        enable_metric_lines()
        self._thread.start()

    def stop(self) -> None:
        """Publish the last changes and end the thread."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        is_last = False
        while True:
            try:
                self.publish()
            except Exception:
                logger.exception("metrics could not be published")
            if is_last:
                return
            is_last = self._stopping.wait(INTERVAL_S)

    def publish(self) -> None:
        """Publish the values that have changed since the last call."""
        numbers = self._numbers()
        for metric, sink in self._sinks.items():
            if metric.kind is HISTOGRAM:
                for seconds in self._drain(metric.source[0]):
                    sink.add_or_update(round(seconds, 6), [self._model_name])
            elif metric.label is None:
                self._publish_value(metric, sink, "", _find(numbers, metric.source))
            else:
                for value in metric.label[1]:
                    self._publish_value(metric, sink, value, _find(numbers, (*metric.source, value)))

    def _publish_value(self, metric: Metric, sink: Any, label: str, value: int) -> None:
        """Publish a gauge's value or a counter's growth, unless it is unchanged."""
        published = self._published.get((metric.name, label))
        if value == published:
            return
        self._published[metric.name, label] = value
        labels = [self._model_name, label] if label else [self._model_name]
        sink.add_or_update(value if metric.kind is GAUGE else value - (published or 0), labels)


def _find(numbers: Mapping[str, Any], path: Sequence[str]) -> int:
    found: Any = numbers
    for step in path:
        found = found[step]
    return int(found)


def enable_metric_lines() -> None:
    """Let TorchServe's logger write our metrics, but not its own per-step ones, which cost more than a step.

    The entry file has set the root logger to WARNING.
    """
    emitter = logging.getLogger("ts.metrics.caching_metric")
    emitter.setLevel(logging.INFO)
    emitter.addFilter(lambda record: str(record.msg).startswith(f"[METRICS]{PREFIX}"))
