"""Runs every benchmark, shortened, and writes one HTML page that compares the results with the goals.

    make report                         run all (several minutes each), then write build/report/index.html
    make report FROM=docs/benchmarks    write the page from saved results, without running a benchmark

A failing benchmark does not stop the others; the page shows its last line of output. The exit status is 1 if all
fail. The results are saved next to the page, so that FROM can read them again.
"""

import argparse
import ast
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.fleet import unwound_by_signals
from benchmarks.goals import is_quick
from benchmarks.page import Result, render
from benchmarks.report import ROOT

BENCHMARKS = ROOT / "benchmarks"
END_TIMEOUT_S = 90.0  # for an interrupted benchmark to stop its processes


def main() -> None:
    options = parse()
    folder: Path = options.output.parent
    folder.mkdir(parents=True, exist_ok=True)
    names = options.names or known_benchmarks()
    if options.source is not None:
        results = read_results(options.source, names)
    else:
        results = []
        with unwound_by_signals():
            for number, name in enumerate(names, 1):
                say(f"{name}: {number} of {len(names)}")
                results.append(run(name, timeout_s=options.timeout_s))
                say(f"{name}: {results[-1].failure or 'done'}")
                keep(results[-1], folder)
    options.output.write_text(render(results), encoding="utf-8")
    for result in results:
        if result.report is None:
            say(f"no result of {result.name}: {result.failure}")
    print(options.output)
    if all(result.report is None for result in results):
        sys.exit("there is no result at all")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks; default: all")
    parser.add_argument("--from", dest="source", type=Path, help="read saved results from this folder, and run none")
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "build" / "report" / "index.html",
        help="the page; default: build/report/index.html",
    )
    parser.add_argument("--timeout-s", type=float, default=900.0, help="stop a benchmark after this time; default: 900")
    options = parser.parse_args()
    if options.source is not None and not options.source.is_dir():
        parser.error(f"{options.source} is not a folder; --from needs a folder of NAME.json files")
    unknown = set(options.names) - set(known_benchmarks())
    if unknown:
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}; known: {', '.join(known_benchmarks())}")
    return options


def known_benchmarks() -> list[str]:
    """List the modules that contain their own `make bench` command, as the Makefile does."""
    files = BENCHMARKS.glob("*.py")
    return sorted(path.stem for path in files if command_of(path.stem) in path.read_text(encoding="utf-8"))


def summary_of(name: str) -> str:
    """Return the first line of the benchmark's docstring, without its command."""
    doc = ast.get_docstring(ast.parse((BENCHMARKS / f"{name}.py").read_text(encoding="utf-8"))) or name
    return doc.splitlines()[0].partition(" `make")[0]


def command_of(name: str, *, quick: bool = False) -> str:
    return f"make bench NAME={name}" + (" QUICK=1" if quick else "")


def read_results(folder: Path, names: Sequence[str]) -> list[Result]:
    """Read the saved results; a missing one becomes a result without a report."""
    results = []
    for name in names:
        path = folder / f"{name}.json"
        report: dict[str, Any] | None = None
        failure = f"there is no {path.name} in {folder}"
        if path.is_file():
            report = find_report(name, [path.read_text(encoding="utf-8", errors="replace").replace("\n", " ")])
            failure = f"{path.name} is not a result of {name}"
        command = command_of(name, quick=report is not None and is_quick(report))
        results.append(
            Result(
                name=name,
                summary=summary_of(name),
                command=command,
                report=report,
                failure="" if report is not None else failure,
            )
        )
    return results


def run(name: str, *, timeout_s: float) -> Result:
    """Run one benchmark with --quick, forward its output, and kill the processes that it leaves."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", f"{BENCHMARKS.name}.{name}", "--quick"],
        cwd=BENCHMARKS.parent,  # the folder of the package
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    lines: list[str] = []
    is_late, is_over = threading.Event(), threading.Event()

    def watch() -> None:
        if not is_over.wait(timeout_s):
            is_late.set()
            _interrupt(process.pid, is_over)

    threading.Thread(target=watch, daemon=True).start()
    with process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if is_late.is_set():  # output of the interruption, not of the run
                    continue
                lines.append(line.rstrip())
                if not line.startswith("{"):
                    say(f"  {lines[-1]}")
            status = process.wait()
        except (KeyboardInterrupt, SystemExit):
            threading.Thread(target=_interrupt, args=(process.pid, is_over), daemon=True).start()
            process.communicate()
            raise
        finally:
            is_over.set()
            _signal_group(process.pid, signal.SIGKILL)
    report = find_report(name, lines) if status == 0 else None
    return Result(
        name=name,
        summary=summary_of(name),
        command=command_of(name, quick=True),
        report=report,
        failure="" if report is not None else _failure(status, lines, timeout_s if is_late.is_set() else None),
        notes=[line for line in lines if "not installed" in line],
    )


def find_report(name: str, lines: Sequence[str]) -> dict[str, Any] | None:
    """Return the benchmark's report, which is the last such line; None if there is none."""
    for line in reversed(lines):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict) and found.get("benchmark") == name:
                return found
    return None


def keep(result: Result, folder: Path) -> None:
    """Save the report for `--from`. If the run failed, delete the report of an earlier run."""
    path = folder / f"{result.name}.json"
    if result.report is None:
        path.unlink(missing_ok=True)
    else:
        path.write_text(json.dumps(result.report, indent=1) + "\n", encoding="utf-8")


def _failure(status: int, lines: Sequence[str], timeout_s: float | None) -> str:
    last = next((line for line in reversed(lines) if line.strip()), "no output")
    if timeout_s is not None:
        return f"stopped after {timeout_s:.0f} s; --timeout-s gives it more. Last output: {last}"
    return f"ended with {status}: {last}" if status else f"ended without a report: {last}"


def _interrupt(pid: int, is_over: threading.Event) -> None:
    """Interrupt a benchmark as Ctrl-C does, so that it stops its processes. Kill it if it does not end."""
    _signal_group(pid, signal.SIGINT)
    if not is_over.wait(END_TIMEOUT_S):
        _signal_group(pid, signal.SIGKILL)


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
