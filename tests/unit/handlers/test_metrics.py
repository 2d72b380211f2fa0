"""The table of metrics, and how they are sent to TorchServe."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handlers.chat.metrics import CHAT_METRICS
from handlers.torchserve.metrics_publisher import PREFIX, MetricsPublisher, enable_metric_lines
from handlers.worker.counters import COUNTER, HISTOGRAM, MAX_TIMES, Counters
from tests.torchserve.drawings import data_url
from tests.waiting import wait_until

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"
# TorchServe's pattern for a worker's line (its Metric.java); other lines are lost.
LINE = re.compile(
    r"\[METRICS\]\s*([\w\s]+)\.([\w\s]+):([0-9\-,.e]+)\|#([^|]*)(\|#type:([^|,]+))?\|#hostname:([^,]+),([^,]+)"
)
SPEAKER = "ts.metrics.caching_metric"


class Told(logging.Handler):
    """A value written for TorchServe, parsed: (name, labels) and value."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        found = LINE.fullmatch(record.getMessage())
        assert found, record.getMessage()
        self.lines.append((found[1], found[4], float(found[3])))

    def take(self) -> list[tuple[str, str, float]]:
        lines, self.lines = self.lines, []
        return lines


@pytest.fixture
def told(kept_loggers: None) -> Iterator[Told]:
    """Capture the output of TorchServe's own metric objects, configured as by the entry file."""
    speaker, handler = logging.getLogger(SPEAKER), Told()
    speaker.addHandler(handler)
    enable_metric_lines()
    yield handler
    speaker.removeHandler(handler)


def numbers(**changes: dict[str, int]) -> dict[str, dict[str, int]]:
    """Return every number of the table, zero except for the changes."""
    found: dict[str, dict[str, int]] = {}
    for metric in CHAT_METRICS:
        if metric.kind == HISTOGRAM:
            continue
        values = metric.label[1] if metric.label else (metric.source[1],)
        found.setdefault(metric.source[0], {}).update(dict.fromkeys(values, 0))
    for group, values_of in changes.items():
        found[group].update(values_of)
    return found


def publisher(metrics_cache: Any, current: dict[str, Any], counters: Counters | None = None) -> MetricsPublisher:
    return MetricsPublisher(metrics_cache, "llava", lambda: current, (counters or Counters()).drain, CHAT_METRICS)


def test_every_number_of_the_table_is_one_of_the_service(client: Any) -> None:
    """Every row has a source, since a missing one would stop all metrics."""
    found = client.service.numbers()

    for metric in CHAT_METRICS:
        if metric.kind != HISTOGRAM:
            for value in metric.label[1] if metric.label else ("",):
                at: Any = found
                for step in (*metric.source, *([value] if value else [])):
                    at = at[step]
                assert isinstance(at, int), metric.name


def test_names_are_such_as_prometheus_wants() -> None:
    """Names are unique, counters end in _total, and times are in seconds."""
    names = [metric.name for metric in CHAT_METRICS]

    assert len(set(names)) == len(names)
    for metric in CHAT_METRICS:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", metric.name)
        assert metric.name.endswith("_total") is (metric.kind == COUNTER)
        assert metric.name.endswith("_seconds") is (metric.unit == "s")


def test_the_documentation_has_every_metric() -> None:
    """The table in docs/metrics.md, which operators read, is complete."""
    text = DOCS.read_text()

    assert [m.name for m in CHAT_METRICS if f"`{PREFIX}{m.name}`" not in text] == []


def test_first_everything_is_told_then_only_what_changes(metrics_cache: Any, told: Told) -> None:
    """Gauges send their value, counters their growth; an idle worker sends nothing."""
    current = numbers(turns={"finished": 3, "running": 1})
    metrics = publisher(metrics_cache, current)

    metrics.publish()
    first = told.take()
    metrics.publish()
    silence = told.take()
    current["turns"].update(finished=5, running=0)
    metrics.publish()
    changed = told.take()

    assert {name for name, _, _ in first} == {PREFIX + m.name for m in CHAT_METRICS if m.kind != HISTOGRAM}
    assert ("torchmoor_turns_total", "ModelName:llava,Outcome:finished", 3.0) in first
    assert ("torchmoor_turns_total", "ModelName:llava,Outcome:failed", 0.0) in first
    assert silence == []
    assert sorted(changed) == [
        ("torchmoor_turns_running", "ModelName:llava", 0.0),
        ("torchmoor_turns_total", "ModelName:llava,Outcome:finished", 2.0),
    ]


def test_each_time_is_told_once(metrics_cache: Any, told: Told) -> None:
    """A histogram gets each value once, in a form that TorchServe can parse, however small."""
    counters = Counters()
    metrics = publisher(metrics_cache, numbers(), counters)
    metrics.publish()
    told.take()

    counters.observe("ttft", 0.25)
    counters.observe("ttft", 0.0000004)
    counters.observe("queue", 12.3456789)
    metrics.publish()

    assert sorted(told.take()) == [
        ("torchmoor_queue_seconds", "ModelName:llava", 12.345679),
        ("torchmoor_time_to_first_token_seconds", "ModelName:llava", 0.0),
        ("torchmoor_time_to_first_token_seconds", "ModelName:llava", 0.25),
    ]
    metrics.publish()
    assert told.take() == []


def test_numbers_beyond_what_a_float_spells_out_are_read_right(metrics_cache: Any, told: Told) -> None:
    """Terabytes are written as an integer, because TorchServe cannot parse 1e+16."""
    metrics = publisher(metrics_cache, numbers(memory={"kv_capacity_bytes": 10**17}))

    metrics.publish()

    assert ("torchmoor_kv_capacity_bytes", "ModelName:llava", 1e17) in told.take()


def test_torchserve_s_own_metric_of_each_step_stays_silent(metrics_cache: Any, told: Told) -> None:
    """PredictionTime with every request's id, at every step, would cost more than the step."""
    metrics_cache.model_name, metrics_cache.request_ids = "llava", {0: "a"}

    metrics_cache.add_time("PredictionTime", 1.5)

    assert told.take() == []


def test_publisher_tells_the_last_changes_when_it_stops(metrics_cache: Any, told: Told) -> None:
    """The publisher's thread reports without requests, and once more when it stops."""
    current = numbers()
    metrics = publisher(metrics_cache, current)

    metrics.start()
    wait_until(lambda: told.lines, "the first values are written")
    current["turns"]["finished"] = 1
    metrics.stop()

    assert ("torchmoor_turns_total", "ModelName:llava,Outcome:finished", 1.0) in told.take()


def test_publisher_survives_a_number_that_fails(
    metrics_cache: Any, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception is logged, and the next interval tries again."""
    metrics = MetricsPublisher(metrics_cache, "llava", lambda: {}, Counters().drain, CHAT_METRICS)

    metrics.start()
    metrics.stop()

    assert "metrics could not be published" in caplog.text


def test_times_that_nobody_reads_are_bounded() -> None:
    """Values that are not read are limited; beyond the limit the oldest are dropped."""
    counters = Counters()

    for number in range(MAX_TIMES + 5):
        counters.observe("ttft", float(number))

    assert counters.drain("ttft") == [float(number) for number in range(5, MAX_TIMES + 5)]
    assert counters.drain("ttft") == []


def test_turn_is_counted_with_its_times(client: Any, red: Any) -> None:
    """A turn adds one value per kind; cached tokens count as reused, and the queue time is included."""
    sid = client.open(data_url(red))

    answers = [client.ask(sid, text, parameters={"max_new_tokens": 8}).wait() for text in ("one", "two")]

    times = {name: client.service.counters.drain(name) for name in ("queue", "ttft", "inter_token")}
    tokens = client.service.numbers()["tokens"]
    assert len(times["queue"]) == len(times["ttft"]) == 2
    assert all(0 <= queue <= ttft for queue, ttft in zip(times["queue"], times["ttft"], strict=True))
    assert 1 <= len(times["inter_token"]) <= 2
    headers = [answer.headers for answer in answers]
    assert tokens["prefilled"] == sum(int(h["x-torchmoor-prefill-tokens"]) for h in headers)
    assert tokens["reused"] == sum(int(h["x-torchmoor-context-tokens"]) for h in headers) - tokens["prefilled"] > 0
    assert tokens["generated"] == sum(int(h["x-torchmoor-generated-tokens"]) for h in headers)
    assert all(float(h["x-torchmoor-queue-ms"]) <= float(h["x-torchmoor-ttft-ms"]) for h in headers)
