"""Renders the tables of metrics in docs/metrics.md."""

from __future__ import annotations

from handlers.chat.metrics import CHAT_METRICS
from handlers.torchserve.metrics_publisher import PREFIX
from torchmoor.admin.collectors import METRICS


def render_proxy() -> str:
    """Return the table of the proxy's metrics."""
    lines = ["| metric | type | labels | unit | what |", "|---|---|---|---|---|"]
    for each in METRICS:
        labels = ", ".join(f"`{label}`" for label in each.labels)
        lines.append(f"| `{each.name}` | {each.type.value} | {labels} | {each.unit} | {each.help} |")
    return "\n".join(lines).replace("|  |", "| |").replace("|  |", "| |")


def render_workers() -> str:
    """Return the table of a chat worker's metrics."""
    lines = ["| metric | type | label | what |", "|---|---|---|---|"]
    for row in CHAT_METRICS:
        label = "" if row.label is None else f"`{row.label[0]}`: {', '.join(row.label[1])}"
        lines.append(f"| `{PREFIX}{row.name}` | {row.kind} | {label} | {row.help} |".replace("|  |", "| |"))
    return "\n".join(lines)
