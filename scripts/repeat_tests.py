"""Run `make test` several times beside busy processes, and count the failures of each test.

make test-repeat [N=10] runs it. It exits with 1 if a run had a failure. After each run it prints how long the remaining
ones will take.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NUM_BUSY = 4
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends when this process has ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=int, help="number of runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments for pytest")
    options = parser.parse_args()
    failures: Counter[str] = Counter()
    num_failed_runs = 0
    with busy_processes(), tempfile.TemporaryDirectory() as folder:
        for number in range(1, options.runs + 1):
            report, started = Path(folder) / f"{number}.xml", time.monotonic()
            failed = run_tests(report, options.arguments)
            num_failed_runs += bool(failed)
            failures.update(failed)
            minutes, num_left = (time.monotonic() - started) / 60, options.runs - number
            rest = f"; the remaining {num_left} take about {num_left * minutes:.0f} min" if num_left else ""
            print(
                f"run {number} of {options.runs}: {', '.join(failed) or 'no failure'}, {minutes:.1f} min{rest}",
                flush=True,
            )
    print(f"{num_failed_runs} of {options.runs} runs had failures")
    for test, count in failures.most_common():
        print(f"{count:4} {test}")
    return 1 if failures else 0


@contextmanager
def busy_processes() -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(NUM_BUSY)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_tests(report: Path, arguments: list[str]) -> list[str]:
    """Run the tests once; return the names of those that failed."""
    done = subprocess.run(["make", "test", f"ARGS={shlex.join([*arguments, f'--junitxml={report}'])}"], cwd=ROOT)
    failed = failed_tests(report) if report.exists() else []
    return failed or ([f"(make test exited with {done.returncode})"] if done.returncode else [])


def failed_tests(report: Path) -> list[str]:
    """Return the distinct tests with a failure or an error in a JUnit report."""
    cases = ET.parse(report).iter("testcase")
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return list(dict.fromkeys(f"{case.get('classname')}::{case.get('name')}" for case in failed))


if __name__ == "__main__":
    sys.exit(main())
