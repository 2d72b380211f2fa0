"""Change one expression at a time in the modules that hold the product together, and run their unit tests.

make mutants [NAME=session_ids] [EVERY=5] runs it. It prints each mutant for which no test fails, with its line: either
the tests miss a rule there, or the change has no effect. Files stay unchanged: each mutant is imported in a process of
its own.
"""

import argparse
import ast
import copy
import importlib
import importlib.machinery
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import pytest

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 120  # for the tests of one mutant, which may loop without end


@dataclass(frozen=True)
class Subject:
    """Modules to change. tests: pytest's arguments for the tests that must detect the changes."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


UNIT = "tests/unit/torchmoor"
HANDLERS = "tests/unit/handlers"
SUBJECTS = {
    "session_ids": Subject(
        ("torchmoor/wire/session_ids.py",),
        (f"{UNIT}/test_session_ids.py", f"{UNIT}/test_config.py", f"{HANDLERS}/test_session_id_minter.py"),
    ),
    "routing": Subject(
        (
            "torchmoor/proxy/routing/session_failover.py",
            "torchmoor/proxy/routing/strategy.py",
            "torchmoor/proxy/routing/least_outstanding.py",
            "torchmoor/proxy/routing/kv_aware.py",
            "torchmoor/proxy/routing/prefix_aware.py",
            "torchmoor/proxy/routing/pool.py",
            "torchmoor/proxy/routing/waiting.py",
        ),
        (f"{UNIT}/routing",),
    ),
    "journal": Subject(
        (
            "handlers/journal/event.py",
            "handlers/journal/directory.py",
            "handlers/journal/directory_files.py",
            "handlers/journal/budget.py",
            "handlers/journal/bounded.py",
        ),
        (
            f"{HANDLERS}/test_journal_budget.py",
            f"{HANDLERS}/test_journal_contract.py",
            f"{HANDLERS}/test_shared_images.py",
            f"{HANDLERS}/test_journal_poison.py",
            f"{HANDLERS}/test_journal_faults.py",
            f"{HANDLERS}/test_journal.py",
            *("-m", "not redis and not s3"),
        ),
    ),
    "event_stream": Subject(("torchmoor/proxy/http/eventstream.py",), (f"{UNIT}/test_eventstream.py",)),
    "outbound": Subject(
        ("torchmoor/async_inference/objects/outbound.py", "torchmoor/wire/public_addresses.py"),
        (f"{UNIT}/async_inference/test_https_store.py",),
    ),
    "pictures": Subject(
        ("handlers/chat/images/schemes.py", "handlers/chat/images/http.py"),
        (f"{HANDLERS}/test_image_schemes.py", f"{HANDLERS}/test_chat_intake.py"),
    ),
    "http": Subject(
        (
            "torchmoor/proxy/http/fields.py",
            "torchmoor/proxy/http/head.py",
            "torchmoor/proxy/http/message.py",
            "torchmoor/proxy/http/reader.py",
            "torchmoor/proxy/http/chunks.py",
        ),
        (f"{UNIT}/http", "tests/fuzz", "tests/proxy/test_strictness.py"),
    ),
}
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.BitAnd: ast.BitOr},
}


@dataclass(frozen=True)
class Mutant:
    module: str
    line: int
    change: str
    tree: ast.Module

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.change}"


def make_mutants(module: str) -> Iterator[Mutant]:
    """Make each mutant of a module, with another comparison, operator, number, condition, return or raise."""
    original = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    for number, node in enumerate(ast.walk(original)):
        for variant in range(_num_changes(node)):
            tree = copy.deepcopy(original)
            changed = next(each for place, each in enumerate(ast.walk(tree)) if place == number)
            before = ast.unparse(node)
            _change(changed, variant)
            after = ast.unparse(changed)
            if before != after:
                yield Mutant(
                    module, node.lineno, f"{_short(before)} -> {_short(after)}", ast.fix_missing_locations(tree)
                )


def _num_changes(node: ast.AST) -> int:
    """Return the number of possible changes of a node."""
    if isinstance(node, ast.Compare):
        return len(node.ops)
    if isinstance(node, ast.BoolOp | ast.IfExp | ast.Raise):
        return 1
    if isinstance(node, ast.If | ast.While):
        return 1
    if isinstance(node, ast.BinOp):
        return type(node.op) in SWAPPED
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, bool)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return isinstance(node, ast.Return) and node.value is not None


def _change(node: ast.AST, variant: int) -> None:
    """Apply one of a node's changes in place."""
    if isinstance(node, ast.Compare):
        node.ops[variant] = SWAPPED[type(node.ops[variant])]()
    elif isinstance(node, ast.BoolOp | ast.BinOp):
        node.op = SWAPPED[type(node.op)]()
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else int(node.value) + 1
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Return):
        node.value = ast.Constant(None)
    elif isinstance(node, ast.Raise):
        node.__class__ = ast.Pass
    elif isinstance(node, ast.Expr):
        node.value = ast.Constant(None)


def _short(source: str) -> str:
    text = source.splitlines()[0]
    return text if len(text) <= 60 else text[:57] + "..."


def run_tests(tests: tuple[str, ...], mutant: Mutant | None, report: int | None = None) -> int:
    """Run tests in a process of their own, which imports the mutant, and return its exit status.

    report: a file descriptor that gets the names of the imported modules. SIGALRM ends the process after TIMEOUT_S.
    """
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 3
    try:
        signal.alarm(TIMEOUT_S)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nowhere, number)
        if mutant is not None:
            _import_instead(ROOT / mutant.module, mutant.tree)
        status = int(pytest.main(["-x", "-q", "-n0", "--assert=plain", "-p", "no:cacheprovider", *tests]))
        if report is not None:
            os.write(report, "\n".join(sys.modules).encode())
    finally:
        os._exit(status)


def _import_instead(path: Path, tree: ast.Module) -> None:
    loader = importlib.machinery.SourceFileLoader
    get_code = loader.get_code

    def get(self: importlib.machinery.SourceFileLoader, name: str) -> object:
        return compile(tree, path, "exec") if Path(self.path) == path else get_code(self, name)

    loader.get_code = get


def import_libraries(subject: Subject) -> None:
    """Run the tests once without a mutant, and import the libraries that they use, so that mutants need not do so."""
    own = ("torchmoor", "handlers", "tests", "scripts", "benchmarks", "__main__")
    with TemporaryFile() as report:
        check(subject, report.fileno())
        report.seek(0)
        for name in report.read().decode().split("\n"):
            if name.partition(".")[0] not in own:
                with suppress(Exception):
                    importlib.import_module(name)
    check(subject)


def is_detected(subject: Subject, mutant: Mutant) -> bool:
    """Return whether a test fails, cannot be imported, or does not end."""
    status = run_tests(subject.tests, mutant)
    if status > pytest.ExitCode.INTERRUPTED and status != pytest.ExitCode.USAGE_ERROR:
        raise SystemExit(f"{mutant}: pytest ended with {status}")
    return status != 0


def check(subject: Subject, report: int | None = None) -> None:
    """Raise SystemExit unless the tests pass without a mutant."""
    if status := run_tests(subject.tests, None, report):
        raise SystemExit(f"the tests end with {status} without a mutant: {' '.join(subject.tests)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", default=list(SUBJECTS), help=f"subjects; default: all of {', '.join(SUBJECTS)}"
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="run only every Nth mutant")
    options = parser.parse_args()
    if unknown := set(options.names) - SUBJECTS.keys():
        parser.error(f"unknown subject {', '.join(sorted(unknown))}; known: {', '.join(SUBJECTS)}")
    if options.every < 1:
        parser.error(f"--every must be at least 1, not {options.every}")
    os.chdir(ROOT)
    num_left = 0
    for name in options.names:
        subject = SUBJECTS[name]
        import_libraries(subject)
        mutants = [each for module in subject.modules for each in make_mutants(module)][:: options.every]
        num_missed = 0
        for mutant in mutants:
            if not is_detected(subject, mutant):
                num_missed += 1
                print(mutant, flush=True)
        print(f"{name}: {len(mutants) - num_missed} of {len(mutants)} mutants were detected", flush=True)
        num_left += num_missed
    return 1 if num_left else 0


if __name__ == "__main__":
    sys.exit(main())
