"""Renders docs/modules.md, a table of every module, from the modules' docstrings."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("handlers", "torchmoor")
HEAD = """# Modules

Each package, and the first sentence of each module's docstring or of each script's first comment.
`scripts/make_reference.py` writes this page.
[architecture.md](architecture.md) follows a request and a token through these packages.
The [last table](#settings) says which module has which setting.
"""
SETTINGS = (
    *sorted(ROOT.glob("torchmoor/config/*.py")),
    ROOT / "torchmoor" / "container" / "environment.py",
    *sorted(ROOT.glob("handlers/settings/*.py")),
)
SETTINGS_HEAD = """## Settings

Each limit, time-out, interval and default that operators may set, by the class and module that define it.
[configuration.md](configuration.md) has the defaults.

| module | class | settings |
|---|---|---|
"""


def first_sentence(path: Path) -> str:
    """Return the first line of a module's docstring without its full stop. Raises SystemExit if it has none."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not docstring:
        raise SystemExit(f"{path.relative_to(ROOT)} has no docstring")
    first = docstring.splitlines()[0]
    if not first.endswith("."):
        raise SystemExit(f"{path.relative_to(ROOT)}: the docstring's first line must be a sentence")
    return first.removesuffix(".").replace("|", "\\|")


def first_comment(path: Path) -> str:
    """Return the first sentence of the comment that a script begins with, without its full stop."""
    lines = itertools.takewhile(lambda line: line.startswith("// "), path.read_text(encoding="utf-8").splitlines())
    comment = " ".join(line.removeprefix("// ") for line in lines)
    return comment.split(". ")[0].removesuffix(".")


def make_section(folder: Path) -> str:
    """Return a package's heading, its docstring, and a row for each of its modules and of the scripts of its page."""
    name = folder.relative_to(ROOT)
    modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    rows = [f"| `{path.name}` | {first_sentence(path)} |" for path in modules]
    scripts = sorted(path for path in folder.glob("**/*.js") if find_package(path) == folder)
    rows += [f"| `{path.relative_to(folder)}` | {first_comment(path)} |" for path in scripts if first_comment(path)]
    table = ["", "| module | purpose |", "|---|---|", *rows] if rows else []
    return "\n".join([f"## {name}/", "", f"{first_sentence(folder / '__init__.py')}.", *table])


def find_package(path: Path) -> Path:
    """Return the innermost package that a file is in."""
    return next(folder for folder in path.parents if (folder / "__init__.py").is_file())


def make_settings_rows(path: Path) -> Iterator[str]:
    """Yield a row for each settings class of a module that has fields."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.bases:
            fields = [
                f"`{each.target.id}`"
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            ]
            if fields:
                yield f"| `{path.relative_to(ROOT)}` | `{node.name}` | {', '.join(fields)} |\n"


def render() -> str:
    """Return the page."""
    folders = [
        folder
        for package in PACKAGES
        for folder in (ROOT / package, *sorted((ROOT / package).rglob("*/")))
        if (folder / "__init__.py").is_file()
    ]
    rows = [row for path in SETTINGS for row in make_settings_rows(path)]
    return "\n\n".join([HEAD.rstrip(), *map(make_section, folders), SETTINGS_HEAD + "".join(rows)])
