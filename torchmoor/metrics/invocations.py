"""One variant's counts, as plain numbers, and their metrics. A field of InvocationMetrics adds a metric.

The hot path only adds to integers, because prometheus_client's own counters cost more than routing does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from torchmoor.metrics.definition import BY_VARIANT, COUNTER, HISTOGRAM, MetricDefinition, MetricType
from torchmoor.metrics.histogram import BUCKETS, Histogram

MODEL_ERROR = 424  # SageMaker's status for any error of the model


class CountGroup(Enum):
    """Which variants show a count."""

    REQUESTS = "requests"  # all
    MODELS = "models"  # those with many models
    ASYNCHRONOUS = "asynchronous"  # those of endpoints that take asynchronous requests


REQUESTS, MODELS, ASYNCHRONOUS = CountGroup


def _row(group: CountGroup, name: str, type: MetricType, unit: str, help: str, *labels: str) -> dict[str, Any]:
    return {"group": group, "metric": MetricDefinition(name, type, (*BY_VARIANT, *labels), unit, help)}


def _counter(group: CountGroup, name: str, help: str) -> Any:
    return field(default=0, metadata=_row(group, name, COUNTER, "", help))


def _counter_by(label: str, group: CountGroup, name: str, help: str) -> Any:
    return field(default_factory=lambda: defaultdict(Tally), metadata=_row(group, name, COUNTER, "", help, label))


def _histogram(group: CountGroup, name: str, help: str) -> Any:
    return field(default_factory=Histogram, metadata=_row(group, name, HISTOGRAM, "seconds", help))


class Tally:
    """The count of one value of a label."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


@dataclass(slots=True)
class InvocationMetrics:
    """Counts of one variant since the start: each field with its metric's name and help."""

    endpoint: str
    variant: str
    invocations: int = _counter(REQUESTS, "Invocations", "Requests sent to the endpoint.")
    client_errors: int = _counter(REQUESTS, "Invocation4XXErrors", "Requests answered with status 4xx.")
    server_errors: int = _counter(REQUESTS, "Invocation5XXErrors", "Requests answered with status 5xx.")
    model_errors: int = _counter(
        REQUESTS, "InvocationModelErrors", "Requests that the model answered with an error, or not in time."
    )
    faults: int = _counter(
        REQUESTS, "InvocationFaults", "Requests that failed, without those that were the client's mistake."
    )
    mid_stream_errors: int = _counter(REQUESTS, "MidStreamErrors", "Answers that broke off after the first byte.")
    streams_continued: int = _counter(
        REQUESTS, "StreamsContinued", "Streamed answers that another instance continued after theirs was lost."
    )
    continuations_refused: int = _counter(
        REQUESTS,
        "StreamContinuationsRefused",
        "Streamed answers that no other instance can continue: limits.max_continued_bytes or max_continued_total_bytes "
        "would be exceeded, or two instances have continued them.",
    )
    forms_refused: int = _counter(REQUESTS, "FormsRefused", "Forms with more fields than limits.max_form_fields.")
    no_capacity: int = _counter(
        REQUESTS, "NoCapacityInvocationFailures", "Requests refused because no instance could take them."
    )
    shortages: int = _counter(
        REQUESTS,
        "DescriptorShortages",
        "Requests refused because the proxy had no free file descriptor, local port or memory for a connection.",
    )
    retries: int = _counter(
        REQUESTS, "Retries", "Requests sent again, because the first instance could not take them or was lost."
    )
    retries_refused: int = _counter(
        REQUESTS, "RetriesRefused", "Requests not sent again, because the retry budget was used up."
    )
    affinity_keys_ignored: int = _counter(
        REQUESTS, "AffinityKeysIgnored", "Affinity keys that were ignored because they are too long."
    )
    decisions: defaultdict[str, Tally] = _counter_by(
        "reason", REQUESTS, "RoutingDecisions", "Instances chosen, by reason. A retry chooses again."
    )
    model_latency: Histogram = _histogram(
        REQUESTS, "ModelLatency", "Time from sending the request to an instance until its answer has ended."
    )
    overhead_latency: Histogram = _histogram(
        REQUESTS, "OverheadLatency", "Time that a request spent in the proxy, without the model's time."
    )
    queue_latency: Histogram = _histogram(
        REQUESTS,
        "QueueLatency",
        "Time from a request's last byte until an instance was free, of requests that had to wait.",
    )
    first_chunk_latency: Histogram = _histogram(
        REQUESTS, "FirstChunkLatency", "Time from a request's head to the first byte of a streamed answer's body."
    )
    first_chunk_model_latency: Histogram = _histogram(
        REQUESTS, "FirstChunkModelLatency", "The part of FirstChunkLatency after the request was sent to the instance."
    )
    first_chunk_overhead_latency: Histogram = _histogram(
        REQUESTS,
        "FirstChunkOverheadLatency",
        "The part of FirstChunkLatency before the request was sent to the instance.",
    )
    model_invocations: int = _counter(
        MODELS, "ModelInvocations", "Requests that named one of many models; ModelCacheHit is a part of them."
    )
    model_hits: int = _counter(MODELS, "ModelCacheHit", "Answered requests whose model was in the instance's memory.")
    model_loading_wait: Histogram = _histogram(
        MODELS, "ModelLoadingWaitTime", "Time that answered requests waited for their model to be loaded."
    )
    async_processed: int = _counter(
        ASYNCHRONOUS,
        "InvocationsProcesssed",
        "Asynchronous requests that ended with a result. The spelling is CloudWatch's.",
    )
    async_failures: int = _counter(ASYNCHRONOUS, "InvocationFailures", "Asynchronous requests that failed.")
    async_expired: int = _counter(
        ASYNCHRONOUS, "ExpiredRequests", "Asynchronous requests whose time to live ended before an answer."
    )
    async_cancelled: int = _counter(ASYNCHRONOUS, "CancelledRequests", "Asynchronous requests that were cancelled.")
    async_repeated: int = _counter(ASYNCHRONOUS, "RepeatedAttempts", "Failed attempts that were followed by another.")
    async_download_failures: int = _counter(ASYNCHRONOUS, "RequestDownloadFailures", "Inputs that could not be read.")
    async_upload_failures: int = _counter(ASYNCHRONOUS, "ResponseUploadFailures", "Results that could not be written.")
    async_notification_failures: int = _counter(
        ASYNCHRONOUS, "NotificationFailures", "Notifications that could not be delivered."
    )
    async_time_in_backlog: Histogram = _histogram(
        ASYNCHRONOUS, "TimeInBacklog", "Time from an asynchronous request's arrival to its first attempt."
    )
    async_total_time: Histogram = _histogram(
        ASYNCHRONOUS,
        "TotalProcessingTime",
        "Time from an asynchronous request's arrival to the publication of its result.",
    )
    async_download_latency: Histogram = _histogram(
        ASYNCHRONOUS, "RequestDownloadLatency", "Time to the first byte of an input."
    )
    async_upload_latency: Histogram = _histogram(ASYNCHRONOUS, "ResponseUploadLatency", "Time to write a result.")

    def observe(self, model_s: float, overhead_s: float) -> None:
        """Count a request's time at its instance and in the proxy. Inlines Histogram.observe, for speed."""
        model, overhead = self.model_latency, self.overhead_latency
        model.counts[bisect_left(BUCKETS, model_s)] += 1
        model.sum += model_s
        overhead.counts[bisect_left(BUCKETS, overhead_s)] += 1
        overhead.sum += overhead_s

    @property
    def num_sent(self) -> int:
        """Requests that were sent to an instance and have ended."""
        return sum(self.model_latency.counts)

    def observe_first_chunk(self, model_s: float, overhead_s: float) -> None:
        """Count the time to the first bytes of a stream."""
        self.first_chunk_latency.observe(model_s + overhead_s)
        self.first_chunk_model_latency.observe(model_s)
        self.first_chunk_overhead_latency.observe(overhead_s)

    def count_status(self, status: int, instance_status: int) -> None:
        """Count an answer's status. instance_status: the instance's own; 0 if it gave no answer."""
        if status >= 500:
            self.server_errors += 1
        elif status >= 400:
            self.client_errors += 1
        if status >= 500 or (status == MODEL_ERROR and not 400 <= instance_status < 500):
            self.faults += 1

    def count_broken(self) -> None:
        """Count an answer that broke off after its first byte."""
        self.mid_stream_errors += 1
        self.faults += 1

    def series(self, group: CountGroup) -> Iterator[tuple[str, tuple[str, ...], int | Histogram]]:
        """Yield a group's metrics: the name, the labels and the value of each time series."""
        labels = (self.endpoint, self.variant)
        for each in counted(group):
            value = getattr(self, each.field)
            if isinstance(value, dict):
                yield from ((each.name, (*labels, label), tally.count) for label, tally in value.items())
            else:
                yield each.name, labels, value

    def snapshot(self) -> dict[str, Any]:
        """Return all counts in a form for JSON; `add` reads it."""
        return {name: _to_json(getattr(self, name)) for name in _COUNTS}

    def request_counts(self) -> dict[str, int]:
        """Return the counts without a label that every variant has, by their fields."""
        found = {each.field: getattr(self, each.field) for each in counted(REQUESTS)}
        return {name: value for name, value in found.items() if isinstance(value, int)}

    def add(self, snapshot: Mapping[str, Any]) -> None:
        """Add the counts of another process."""
        for name, given in snapshot.items():
            value = getattr(self, name)
            if isinstance(value, Histogram):
                value.add(*given)
            elif isinstance(value, dict):
                for label, count in given.items():
                    value[label].count += count
            else:
                setattr(self, name, value + given)

    def reset(self) -> None:
        """Set all counts to zero."""
        fresh = InvocationMetrics(self.endpoint, self.variant)
        for name in _COUNTS:
            setattr(self, name, getattr(fresh, name))


def _to_json(value: int | Histogram | dict[str, Tally]) -> Any:
    if isinstance(value, Histogram):
        return [[*value.counts], value.sum]
    return {label: tally.count for label, tally in value.items()} if isinstance(value, dict) else value


_COUNTS = tuple(each.name for each in fields(InvocationMetrics) if each.name not in ("endpoint", "variant"))


def counted(group: CountGroup) -> tuple[MetricDefinition, ...]:
    """Return the metrics of a group's counts, in order."""
    return tuple(
        replace(each.metadata["metric"], field=each.name)
        for each in fields(InvocationMetrics)
        if each.metadata.get("group") is group
    )
