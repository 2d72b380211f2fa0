"""Who may import whom: the table in CONTRIBUTING, walked over the source."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# (module prefix, prefixes that it must never import)
NEVER = [
    ("torchmoor", {"torch", "transformers", "ts", "handlers", "scripts", "benchmarks", "tests"}),
    ("handlers", {"torchmoor", "scripts", "benchmarks", "tests"}),
    ("handlers.journal", {"ts", "torch", "transformers", "handlers.adapter", "handlers.chat", "handlers.engine"}),
    ("handlers.engine", {"ts", "handlers.adapter", "handlers.chat", "handlers.many", "http.server", "aiohttp"}),
    ("handlers.engine", {"handlers.journal"}),
    ("handlers.chat", {"ts", "handlers.adapter", "http.server", "aiohttp"}),
    ("handlers.many", {"ts", "handlers.adapter", "http.server", "aiohttp"}),
    ("handlers.models", {"handlers.journal", "ts", "handlers.chat", "handlers.engine", "handlers.adapter"}),
    ("torchmoor.routing", {"socket", "asyncio", "time", "datetime", "pathlib", "os", "io", "aiohttp", "httptools"}),
    ("torchmoor.http", {"torchmoor.routing", "torchmoor.fleet", "torchmoor.api", "torchmoor.app", "aiohttp"}),
    ("torchmoor.fleet", {"torchmoor.api", "torchmoor.app", "torchmoor.admin", "torchmoor.commands", "torchmoor.http"}),
    ("torchmoor.api", {"torchmoor.app", "torchmoor.admin", "torchmoor.commands", "aiohttp", "asyncio"}),
    ("torchmoor.clients", {"torchmoor.api", "torchmoor.fleet", "torchmoor.http", "torchmoor.app", "aiohttp"}),
    (
        "torchmoor.async_inference",
        {"torchmoor.api", "torchmoor.app", "torchmoor.admin", "torchmoor.cli", "torchmoor.commands"},
    ),
    ("torchmoor.settings", {"torchmoor.api", "torchmoor.fleet", "torchmoor.http", "torchmoor.routing"}),
]
# Packages that may import only the standard library, these, and themselves.
ONLY = {
    "torchmoor.routing": set[str](),
    "torchmoor.http": {"uvloop"},
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> list[Path]:
    return sorted(path for package in ("torchmoor", "handlers") for path in (ROOT / package).rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Absolute names of all that a file imports, at any depth of nesting."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def is_within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_module_imports_only_what_it_may(path: Path) -> None:
    """One direction between packages, and no program knows the other."""
    module, imports = module_name(path), imports_of(path)

    for package, banned in NEVER:
        if is_within(module, package):
            assert sorted(name for name in imports if any(is_within(name, prefix) for prefix in banned)) == []
    for package, allowed in ONLY.items():
        if is_within(module, package):
            roots = {name.partition(".")[0] for name in imports} - sys.stdlib_module_names - allowed
            assert roots <= {"torchmoor"}
            ours = {name for name in imports if is_within(name, "torchmoor")}
            assert all(is_within(name, package) for name in ours)


def test_nothing_imports_the_scripts_benchmarks_or_tests() -> None:
    """They are leaves."""
    leaves = {"scripts", "benchmarks", "tests"}

    for path in sources():
        assert not leaves & {name.partition(".")[0] for name in imports_of(path)}, path
