"""Formats the results of gpu_report.py as a page of Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any


def as_page(results: Sequence[Mapping[str, Any]], about: str) -> str:
    """Return the page: a heading per phase, and its figures as a table. about: the title."""
    parts = [f"# GPU report: {about}\n"]
    for result in results:
        parts.append(f"## {result['phase']} ({result['seconds']} s)\n")
        figures = {key: value for key, value in result.items() if key not in ("phase", "seconds", "rows")}
        parts.append(_table(["figure", "value"], [[key, _cell(value)] for key, value in figures.items()]))
        if isinstance(rows := result.get("rows"), list):
            parts.append(_table(list(rows[0]), [[_cell(value) for value in row.values()] for row in rows]))
    return "\n".join(parts)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")
