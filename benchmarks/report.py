"""What every benchmark prints: a table for people, then one line of JSON for programs."""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

PACKAGES = ("torch", "transformers", "torchserve", "uvloop", "httptools")


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def print_report(name: str, rows: Sequence[Mapping[str, Any]], ratios: Mapping[str, Any], **settings: Any) -> None:
    """Print rows as a table and the whole as the last line.

    rows: all with the same keys; ratios: the keys that docs/benchmarks.md explains, None where not measured.
    """
    columns = list(rows[0])
    table = [columns, *([_cell(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    for key, value in ratios.items():
        print(f"{key} = {_cell(value)}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {package: version(package) for package in PACKAGES},
        "settings": settings,
    }
    print(json.dumps({"benchmark": name, "rows": list(rows), "ratios": dict(ratios), **about}))


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
