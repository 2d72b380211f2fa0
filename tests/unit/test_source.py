"""Rules of the source that no tool checks: unique class names, short modules, packages without dependencies."""

import ast
import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("handlers", "torchmoor")
MAX_LINES = 400
# Packages that import the standard library, the modules listed here, and nothing else.
ONLY = {
    "torchmoor/errors.py": (),
    "torchmoor/fault_log.py": (),
    "torchmoor/wire": ("torchmoor.wire",),
    "torchmoor/proxy/routing": ("torchmoor.proxy.routing", "torchmoor.wire"),
    "torchmoor/proxy/http": (
        *("torchmoor.proxy.http", "torchmoor.config", "torchmoor.fault_log", "torchmoor.wire"),
        *("uvloop", "websockets"),
    ),
}
# Names of other libraries that begin with an underscore, and that the tests read or replace.
FOREIGN = {
    "_replace",  # named tuples
    "_exit",  # os
    "_dynamo",  # torch
    "_attn_implementation",  # transformers
    *("_access_key", "_action", "_get_action", "_get_param", "_raise_access_denied"),  # moto
    "_authenticate_and_authorize_normal_action",  # moto
}
SETTERS = ("getattr", "setattr", "delattr")
WITH_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
PERHAPS_PRIVATE = re.compile(r"\._[a-zA-Z]|attr\(")


def modules(*folders: str) -> list[Path]:
    """Return the Python files of folders, and files that are named themselves."""
    paths = [ROOT / folder for folder in folders]
    return sorted(file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py")))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def statements(path: Path) -> list[ast.stmt]:
    """Return a module's statements, at any depth of nesting."""
    found: list[ast.stmt] = []
    waiting: list[ast.AST] = [parse(path)]
    while waiting:
        inner = [node for node in ast.iter_child_nodes(waiting.pop()) if isinstance(node, WITH_STATEMENTS)]
        found += [node for node in inner if isinstance(node, ast.stmt)]
        waiting += inner
    return found


def imports(path: Path) -> set[str]:
    """Return the absolute names of everything that a module imports, at any depth of nesting."""
    found: set[str] = set()
    for node in statements(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno}: relative import"
            found.add(str(node.module))
    return found


def test_class_names_are_unique() -> None:
    """A class name means one thing in both programs."""
    places = defaultdict(list)
    for path in modules(*PACKAGES):
        for node in statements(path):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{name(path)}:{node.lineno}")

    shared = {each: where for each, where in places.items() if len(where) > 1}
    assert shared == {}


def test_modules_are_short() -> None:
    """A module has one concept, so that it stays short."""
    lengths = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in modules(*PACKAGES)}

    assert {each: n for each, n in lengths.items() if n > MAX_LINES} == {}


@pytest.mark.parametrize("package", ONLY)
def test_package_imports_nothing_but_the_standard_library(package: str) -> None:
    """import-linter (pyproject.toml) forbids what is named; this forbids everything that is not."""
    for path in modules(package):
        assert {
            each
            for each in imports(path)
            if each.partition(".")[0] not in sys.stdlib_module_names
            and not any(each == allowed or each.startswith(allowed + ".") for allowed in ONLY[package])
        } == set(), name(path)


def test_no_module_imports_relatively() -> None:
    """Imports are absolute, because an archive's entry file is a top-level module."""
    for path in modules(*PACKAGES):
        imports(path)


def private_names(path: Path) -> list[str]:
    """Return the private names of other objects that a module reads, or sets by their names, with their lines."""
    found = []
    for node in ast.walk(parse(path)) if PERHAPS_PRIVATE.search(path.read_text(encoding="utf-8")) else ():
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            names = [] if is_own else [node.attr]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in SETTERS:
            texts = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            names = [text.rpartition(".")[2] for text in texts[:1]]
        found += [
            f"{name(path)}:{node.lineno}: {each}"
            for each in names
            if each.startswith("_") and not each.startswith("__") and each not in FOREIGN
        ]
    return found


def test_tests_read_no_private_names() -> None:
    """Tests use public names only, so that a module's internals can change."""
    assert [each for path in modules("tests") for each in private_names(path)] == []
