"""Write deploy/observability/grafana/dashboard.json from the panels below. A test compares them.

python scripts/make_grafana_dashboard.py
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "deploy" / "observability" / "grafana" / "dashboard.json"
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT, COLUMNS = 8, 7, 24
BY_ENDPOINT = 'endpoint=~"$endpoint"'
PROXIES = "{job=~'torchmoor.*|.+/torchmoor-proxies'}"  # the second one in Kubernetes, in any namespace


@dataclass(frozen=True)
class Panel:
    """A graph. queries: pairs of expression and legend. unit: one of Grafana's units."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    description: str = ""


def rate(metric: str, by: str) -> str:
    """Return the sum of a counter's rate by labels."""
    return f"sum by ({by}) (rate({metric}{{{BY_ENDPOINT}}}[$__rate_interval]))"


def quantile(share: float, histogram: str) -> str:
    """Return a quantile of a histogram by endpoint."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', 'endpoint, le')})"


def total(metric: str, by: str) -> str:
    return f"sum by ({by}) ({metric}{{{BY_ENDPOINT}}})"


def seen(metric: str, by: str) -> str:
    """Return a gauge that each proxy reports whole, such as the backlog: a sum over two proxies would double it."""
    return f"max by ({by}) ({metric}{{{BY_ENDPOINT}}})"


def share(used: str, capacity: str) -> str:
    """Return one gauge divided by another, by instance."""
    return f"{total(used, 'instance')} / {total(capacity, 'instance')}"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Requests",
        (
            Panel("Requests per second", "reqps", ((rate("Invocations_total", "endpoint"), "{{endpoint}}"),)),
            Panel(
                "Errors per second",
                "reqps",
                (
                    (rate("Invocation4XXErrors_total", "endpoint"), "{{endpoint}} 4xx"),
                    (rate("Invocation5XXErrors_total", "endpoint"), "{{endpoint}} 5xx"),
                    (rate("MidStreamErrors_total", "endpoint"), "{{endpoint}} broken streams"),
                    (rate("NoCapacityInvocationFailures_total", "endpoint"), "{{endpoint}} no capacity"),
                ),
            ),
            Panel(
                "First part of streams",
                "s",
                (
                    (quantile(0.5, "FirstChunkLatency"), "{{endpoint}} P50"),
                    (quantile(0.99, "FirstChunkLatency"), "{{endpoint}} P99"),
                ),
                "From the head of a request to the first byte of its streamed answer.",
            ),
            Panel(
                "Whole answers",
                "s",
                (
                    (quantile(0.5, "ModelLatency"), "{{endpoint}} P50"),
                    (quantile(0.99, "ModelLatency"), "{{endpoint}} P99"),
                ),
                "From sending a request to an instance to the end of its answer.",
            ),
            Panel(
                "Overhead of the proxy",
                "s",
                (
                    (quantile(0.5, "OverheadLatency"), "{{endpoint}} P50"),
                    (quantile(0.99, "OverheadLatency"), "{{endpoint}} P99"),
                ),
            ),
            Panel(
                "Why an instance was chosen",
                "reqps",
                ((rate("RoutingDecisions_total", "reason"), "{{reason}}"),),
            ),
        ),
    ),
    (
        "Instances",
        (
            Panel(
                "Ready",
                "short",
                ((f"sum by (endpoint) ({seen('InstanceReady', 'endpoint, instance')})", "{{endpoint}}"),),
            ),
            Panel(
                "Outstanding and waiting requests",
                "short",
                (
                    (total("OutstandingInvocations", "instance"), "{{instance}}"),
                    (total("WaitingInvocations", "endpoint"), "{{endpoint}} waiting"),
                ),
            ),
            Panel("Breakers", "short", ((seen("InstanceBreaker", "instance"), "{{instance}}"),), "2 is open."),
            Panel("Bodies in flight", "bytes", ((total("InflightBodyBytes", "instance"), "{{instance}}"),)),
            Panel(
                "Retries per second",
                "reqps",
                (
                    (rate("Retries_total", "endpoint"), "{{endpoint}} sent again"),
                    (rate("RetriesRefused_total", "endpoint"), "{{endpoint}} refused"),
                ),
            ),
            Panel(
                "The proxy's process",
                "short",
                (
                    (f"rate(process_cpu_seconds_total{PROXIES}[$__rate_interval])", "CPU cores"),
                    (f"process_open_fds{PROXIES}", "open files"),
                    (f"WebSocketConnections{PROXIES}", "WebSocket connections"),
                ),
            ),
        ),
    ),
    (
        "Sessions and the engine",
        (
            Panel("Open sessions", "short", ((total("torchmoor_sessions_open", "instance"), "{{instance}}"),)),
            Panel("Sessions per second", "ops", ((rate("torchmoor_sessions_total", "Event"), "{{Event}}"),)),
            Panel("Turns per second", "ops", ((rate("torchmoor_turns_total", "Outcome"), "{{Outcome}}"),)),
            Panel(
                "Tokens per second",
                "short",
                ((rate("torchmoor_tokens_total", "Kind"), "{{Kind}}"),),
                "Reused tokens were in the KV cache and are not computed.",
            ),
            Panel(
                "Time to first token",
                "s",
                (
                    (quantile(0.5, "torchmoor_time_to_first_token_seconds"), "{{endpoint}} P50"),
                    (quantile(0.99, "torchmoor_time_to_first_token_seconds"), "{{endpoint}} P99"),
                ),
            ),
            Panel("Time between tokens", "s", ((quantile(0.99, "torchmoor_inter_token_seconds"), "{{endpoint}} P99"),)),
            Panel(
                "KV cache in use",
                "percentunit",
                (
                    (
                        share("torchmoor_kv_bytes", "torchmoor_kv_capacity_bytes"),
                        "{{instance}}",
                    ),
                ),
            ),
            Panel("Image features", "bytes", ((total("torchmoor_features_bytes", "instance"), "{{instance}}"),)),
            Panel(
                "Rows in the batch and in its queue",
                "short",
                (
                    (total("torchmoor_batch_rows", "instance"), "{{instance}}"),
                    (total("torchmoor_queued_sequences", "instance"), "{{instance}} queued"),
                ),
            ),
        ),
    ),
    (
        "Asynchronous requests",
        (
            Panel("Backlog", "short", ((seen("ApproximateBacklogSize", "endpoint"), "{{endpoint}}"),)),
            Panel(
                "Age of the oldest request",
                "s",
                ((seen("ApproximateAgeOfOldestRequest", "endpoint"), "{{endpoint}}"),),
            ),
            Panel(
                "Ended per second",
                "ops",
                (
                    (rate("InvocationsProcesssed_total", "endpoint"), "{{endpoint}} with a result"),
                    (rate("InvocationFailures_total", "endpoint"), "{{endpoint}} failed"),
                ),
            ),
        ),
    ),
    (
        "Many models",
        (
            Panel("Models in memory", "short", ((seen("LoadedModelCount", "instance"), "{{instance}}"),)),
            Panel(
                "Found in memory",
                "percentunit",
                (
                    (
                        f"{rate('ModelCacheHit_total', 'endpoint')} / {rate('ModelInvocations_total', 'endpoint')}",
                        "{{endpoint}}",
                    ),
                ),
            ),
            Panel("Wait for a model", "s", ((quantile(0.99, "ModelLoadingWaitTime"), "{{endpoint}} P99"),)),
        ),
    ),
)


def render() -> str:
    """Return the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": _at(0, y, COLUMNS, 1),
            }
        )
        y += 1
        for index, panel in enumerate(row):
            column = index * WIDTH % COLUMNS
            panels.append(
                _graph(panel, len(panels) + 1, _at(column, y + index * WIDTH // COLUMNS * HEIGHT, WIDTH, HEIGHT))
            )
        y += -(-len(row) * WIDTH // COLUMNS) * HEIGHT
    return (
        json.dumps(
            {
                "uid": "torchmoor",
                "title": "torchmoor",
                "tags": ["torchmoor"],
                "schemaVersion": 39,
                "version": 1,
                "editable": True,
                "refresh": "10s",
                "time": {"from": "now-30m", "to": "now"},
                "timepicker": {},
                "annotations": {"list": []},
                "templating": {"list": [_source_variable(), _endpoint_variable()]},
                "panels": panels,
            },
            indent=1,
        )
        + "\n"
    )


def _at(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _graph(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _endpoint_variable() -> dict[str, Any]:
    query = "label_values(Invocations_total, endpoint)"
    return {
        "name": "endpoint",
        "label": "Endpoint",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "endpoint"},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(render())


if __name__ == "__main__":
    main()
