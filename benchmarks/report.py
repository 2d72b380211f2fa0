"""Parses the options that all benchmarks share, and prints their results: a table, then one line of JSON."""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "benchmarks"  # shown in docs/benchmarks.md; plot.py reads it
SHOW_BUILD = """import platform, sysconfig
print(platform.python_version(), "deb_system" in sysconfig.get_scheme_names(), sysconfig.get_config_var("CONFIG_ARGS"))
"""
PACKAGES = ("torch", "transformers", "torchserve", "uvloop", "httptools")


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of all values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def parse_options(description: str | None, *, quick: str, rounds: int | None = 5) -> argparse.Namespace:
    """Parse `--quick`, `--rounds` and `--save`; a quick run has one round by default.

    rounds: None for a benchmark without rounds, which has no such option.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, help=f"number of rounds; default: {rounds}, with --quick 1")
    parser.add_argument("--save", action="store_true", help="save the result in docs/benchmarks/ and draw its chart")
    options = parser.parse_args()
    if rounds is not None:
        if options.rounds is None:
            options.rounds = 1 if options.quick else rounds
        if options.rounds < 1:
            parser.error(f"--rounds must be at least 1, not {options.rounds}")
    if options.save and options.quick:
        parser.error("--save needs a whole run, not --quick")
    return options


def print_report(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    ratios: Mapping[str, Any],
    options: argparse.Namespace,
    **settings: Any,
) -> None:
    """Print a table of the rows, the ratios, and the report as one line of JSON.

    rows: all with the same keys; ratios: explained in docs/benchmarks.md, None if not measured. options: of
    `parse_options`; with --save, the report is also written to docs/benchmarks/NAME.json. settings: further ones.
    """
    for line in as_table(rows):
        print(line)
    for key, value in ratios.items():
        print(f"{key} = {_cell(value)}")
    chosen = {key: value for key, value in vars(options).items() if key != "save"}
    report = {
        "benchmark": name,
        "rows": list(rows),
        "ratios": dict(ratios),
        **about(),
        "settings": {**chosen, **settings},
    }
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
        subprocess.run([sys.executable, "-m", "benchmarks.plot", name], cwd=ROOT, check=True, timeout=60)
    print(json.dumps(report))


def about() -> dict[str, Any]:
    """Return date, commit, machine and versions of the run."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=10
    )
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "versions": {
            "python": describe_python(sys.executable),
            **{package: version(package) for package in PACKAGES},
        },
    }


def as_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format rows as lines with aligned columns, after a line of column names."""
    columns = list(rows[0])
    table = [columns, *([_cell(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in table]


def describe_python(python: str) -> str:
    """Return an interpreter's version, and whether it was compiled with PGO and LTO, which make it faster.

    Debian and Ubuntu enable both in debian/rules, so configure's arguments do not show them.
    """
    shown = subprocess.run([python, "-c", SHOW_BUILD], capture_output=True, text=True, check=True, timeout=30)
    number, is_debian, arguments = shown.stdout.split(" ", 2)
    if is_debian == "True":
        return f"{number}, with PGO and LTO (Debian)"
    pgo = "with PGO" if "--enable-optimizations" in arguments else "without PGO"
    return f"{number}, {pgo}" + (" and LTO" if "--with-lto" in arguments else "")


def _processor() -> str:
    """Return the processor's name on Linux, elsewhere its architecture."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
