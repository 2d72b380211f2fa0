"""The thread that publishes a worker's metrics to TorchServe.

TorchServe reads a worker's metrics from lines on its standard output, one per value, and serves them on its metrics
port (docs/decisions/0011-cancel-and-metrics.md). Writing them per token or step would cost too much, so the thread
writes the changed values once per interval.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ts.metrics.metric_type_enum import MetricTypes

from handlers.worker.counters import GAUGE, HISTOGRAM, Metric

logger = logging.getLogger(__name__)

PREFIX = "torchmoor_"
INTERVAL_S = 1.0


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
        table: Sequence[Metric],
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
        return cache.add_metric_to_cache(PREFIX + metric.name, metric.unit, labels, MetricTypes(metric.kind))

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
            if metric.kind == HISTOGRAM:
                for seconds in self._drain(metric.source[0]):
                    sink.add_or_update(round(seconds, 6), [self._model_name])
            else:
                for path in metric.paths:
                    label = "" if metric.label is None else path[-1]
                    self._publish_value(metric, sink, label, _find(numbers, path))

    def _publish_value(self, metric: Metric, sink: Any, label: str, value: int) -> None:
        """Publish a gauge's value or a counter's growth, unless it is unchanged."""
        published = self._published.get((metric.name, label))
        if value == published:
            return
        self._published[metric.name, label] = value
        labels = [self._model_name, label] if label else [self._model_name]
        sink.add_or_update(value if metric.kind == GAUGE else value - (published or 0), labels)


def publish_metrics(context: Any, service: Any, table: Sequence[Metric]) -> MetricsPublisher:
    """Publish a service's metrics until `stop`. context: TorchServe's. service: has `numbers` and `counters`."""
    publisher = MetricsPublisher(context.metrics, context.model_name, service.numbers, service.counters.drain, table)
    publisher.start()
    return publisher


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
