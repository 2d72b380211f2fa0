"""References in the documents exist: pages, headings, modules."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("deploy", "docs", "examples", "models/tiny-llava", "model_store")


def prose(path: Path) -> str:
    """Return a page without its code, where brackets are not links and # is not a heading."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", lambda code: re.sub(r"[\[\]()]", "", code[0]), text)


def links(path: Path) -> Iterator[tuple[str, str]]:
    """Return a page's links within the repository: path, empty for the page itself, and heading."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if not re.match(r"[a-z]+:", target):
            where, _, heading = target.partition("#")
            yield where, heading


def headings(path: Path) -> set[str]:
    """Return GitHub's anchors for a page's headings."""
    found = re.findall(r"^#+ +(.*?) *$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in found}


def test_links_lead_somewhere() -> None:
    """Links to renamed pages and headings are found."""
    pages = [*ROOT.glob("*.md"), *(page for folder in PAGES for page in (ROOT / folder).rglob("*.md"))]
    dead = []
    for page in pages:
        for where, heading in links(page):
            target = (page.parent / where).resolve() if where else page
            if not target.exists() or (heading and target.suffix == ".md" and heading not in headings(target)):
                dead.append(f"{page.relative_to(ROOT)}: {where}#{heading}")

    assert len(pages) > 40
    assert dead == []


def test_modules_that_the_architecture_names_exist() -> None:
    """docs/architecture.md sends readers to modules that exist; a bare name may be in any folder."""
    named = set(re.findall(r"`([\w/]+\.(?:py|js))`", (ROOT / "docs/architecture.md").read_text(encoding="utf-8")))
    modules = [path for package in ("torchmoor", "handlers") for path in (ROOT / package).rglob("*.*")]
    paths = [f"/{path.relative_to(ROOT)}" for path in modules]
    missing = [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in paths)]

    assert len(named) > 60
    assert missing == []


def has_own(module: Path, name: str) -> bool:
    """Return whether a module has a name that it does not import."""
    text = module.read_text(encoding="utf-8")
    if not re.search(rf"\b{name}\b", text):
        return False
    nodes = ast.walk(ast.parse(text)) if module.suffix == ".py" else ()
    return name not in {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_names_are_in_the_modules_that_the_architecture_names() -> None:
    """docs/architecture.md says "`name` in `module.py`" and "`module.py` (`name`)" of modules that have the name."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    pairs = [(module, name) for name, module in re.findall(r"`([\w.]+)` in `([\w/]+\.(?:py|js))`", text)]
    for module, names in re.findall(r"`([\w/]+\.(?:py|js))` \((`\w+`(?:, `\w+`)*)\)", text):
        pairs += [(module, name) for name in names.replace("`", "").split(", ")]
    modules = [path for package in ("torchmoor", "handlers") for path in (ROOT / package).rglob("*.*")]
    missing = [
        (module, name)
        for module, name in pairs
        if not any(str(path).endswith(f"/{module}") and has_own(path, name.rpartition(".")[2]) for path in modules)
    ]

    assert len(pairs) > 40
    assert missing == []


def test_pages_and_docstrings_name_modules_that_exist() -> None:
    """Pages, docstrings and comments name existing paths, such as handlers/requests/reply.py."""
    sources = [path for folder in ("docs", "handlers", "torchmoor") for path in (ROOT / folder).rglob("*.*")]
    texts = [path.read_text(encoding="utf-8") for path in sources if path.suffix in (".md", ".py")]
    named = {name for text in texts for name in re.findall(r"(?<![\w/.])(?:handlers|torchmoor)/[\w/]+\.py\b", text)}

    assert len(named) > 60
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_page_is_listed() -> None:
    """The index of the documentation and the site's navigation list each page, the index of decisions each decision."""
    index, navigation = (ROOT / "docs/index.md").read_text(encoding="utf-8"), (ROOT / "mkdocs.yml").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    decisions = (ROOT / "docs/decisions/index.md").read_text(encoding="utf-8")

    assert {page for page in pages if f"]({page})" not in index or page not in navigation} == set()
    assert [path.name for path in (ROOT / "docs/decisions").glob("0*.md") if f"]({path.name})" not in decisions] == []


def test_no_page_repeats_another() -> None:
    """No two pages share a run of 20 words; pages that scripts write repeat docstrings and help."""
    written = {"api.md", "command-line.md", "configuration.md", "metrics.md", "modules.md"}
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name not in written]
    first: dict[tuple[str, ...], Path] = {}
    repeated = set()
    for page in pages:
        words = re.findall(r"[\w'/.-]+", prose(page).lower())
        for start in range(len(words) - 19):
            other = first.setdefault(tuple(words[start : start + 20]), page)
            if other != page:
                repeated.add(f"{page.name} and {other.name}: {' '.join(words[start : start + 20])}")

    assert repeated == set()


def test_every_page_opens_with_its_purpose() -> None:
    """Below the title is a sentence, not another heading, a list or a table."""
    pages = list((ROOT / "docs").glob("*.md"))
    bare = [page.name for page in pages if not re.match(r"# .+\n\n[\w`*\[]", page.read_text(encoding="utf-8"))]

    assert len(pages) > 25
    assert bare == []
