"""What the documents name is there: pages, headings, modules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = ("deploy", "docs", "examples", "models/tiny-llava", "model_store")
PACKAGES = ("handlers", "torchmoor")
KINDS = (".py", ".js", ".html", ".css")
ENTRIES = ("__init__.py", "__main__.py")  # of packages: they have nothing of their own


def files_in(folder: Path) -> set[Path]:
    """All but what running leaves there."""
    return {path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__"}


def prose(path: Path) -> str:
    """A page without its code, where brackets are no links and # is no heading."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", lambda code: re.sub(r"[\[\]()]", "", code[0]), text)


def links(path: Path) -> Iterator[tuple[str, str]]:
    """A page's links within the repository: path, which may be empty for the page itself, and heading."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if not re.match(r"[a-z]+:", target):
            where, _, heading = target.partition("#")
            yield where, heading


def headings(path: Path) -> set[str]:
    """The names by which GitHub knows a page's headings."""
    found = re.findall(r"^#+ +(.*?) *$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in found}


def test_links_lead_somewhere() -> None:
    """A page or a heading that was renamed takes its links along."""
    pages = [*ROOT.glob("*.md"), *(page for folder in PAGES for page in (ROOT / folder).rglob("*.md"))]
    dead = []
    for page in pages:
        for where, heading in links(page):
            target = (page.parent / where).resolve() if where else page
            if not target.exists() or (heading and target.suffix == ".md" and heading not in headings(target)):
                dead.append(f"{page.relative_to(ROOT)}: {where}#{heading}")

    assert len(pages) > 40
    assert dead == []


def named_in_table(package: str) -> set[str]:
    """Names of the module table of a package, as paths. One without a folder is in that of the file before it."""
    text = ARCHITECTURE.read_text(encoding="utf-8")
    table = re.search(rf"^{package}/.*?(?=^\w+/|\Z)", text, re.DOTALL | re.MULTILINE)
    assert table is not None
    found = set()
    for row in re.findall(r"^\| (`.*?) \|", table[0], re.MULTILINE):
        folder = ""
        for name in re.findall(r"`([^`]+)`", row):
            if name.endswith("/"):
                found.add(name + "**/*")
                continue
            folder = name.rpartition("/")[0] or folder
            found.add(f"{folder}/{name.rpartition('/')[2]}".lstrip("/"))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_the_module_table_is_the_tree(package: str) -> None:
    """docs/architecture.md has a line for each module, and none for one that is gone."""
    there = {path for path in files_in(ROOT / package) if path.suffix in KINDS and path.name not in ENTRIES}
    named = {name: set((ROOT / package).glob(name)) for name in named_in_table(package)}

    assert len(there) > 50
    assert {str(path.relative_to(ROOT)) for path in there.difference(*named.values())} == set()
    assert {name for name, files in named.items() if not files} == set()
