"""Write docs/modules.md, a table of every module, from the modules' docstrings.

python scripts/make_module_table.py
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "modules.md"
PACKAGES = ("handlers", "torchmoor")
HEAD = """# Modules

Each package, and the first sentence of each module's docstring. `scripts/make_module_table.py` writes this page.
[architecture.md](architecture.md) follows a request and a token through these packages.
"""


def first_sentence(path: Path) -> str:
    """Return the first line of a module's docstring without its full stop. Raises SystemExit if there is none."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not docstring:
        raise SystemExit(f"{path.relative_to(ROOT)} has no docstring")
    return docstring.splitlines()[0].removesuffix(".").replace("|", "\\|")


def make_section(folder: Path) -> str:
    """Return a package's heading, its docstring, and a row for each of its modules."""
    name = folder.relative_to(ROOT)
    modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    rows = [f"| `{path.name}` | {first_sentence(path)} |" for path in modules]
    table = ["", "| module | purpose |", "|---|---|", *rows] if rows else []
    return "\n".join([f"## {name}/", "", f"{first_sentence(folder / '__init__.py')}.", *table])


def make_page() -> str:
    """Return the whole page."""
    folders = [
        folder
        for package in PACKAGES
        for folder in (ROOT / package, *sorted((ROOT / package).rglob("*/")))
        if (folder / "__init__.py").is_file()
    ]
    return "\n\n".join([HEAD.rstrip(), *map(make_section, folders)]) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(make_page(), encoding="utf-8")
