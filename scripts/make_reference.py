"""Write the pages of docs/ that follow from the code: settings, commands, metrics, routes and modules.

python scripts/make_reference.py            write the pages
python scripts/make_reference.py --check    exit with 1 if a page is out of date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # handlers are not an installed package

from scripts.reference import commands, metrics, modules, routes, settings  # noqa: E402

DOCS = ROOT / "docs"
WHOLE: Mapping[str, Callable[[], str]] = {
    "api.md": routes.render,
    "configuration.md": settings.render,
    "modules.md": modules.render,
}
SECTIONS: Mapping[str, Mapping[str, Callable[[], str]]] = {  # of pages that are written by hand, by name
    "command-line.md": {"commands": commands.render},
    "container.md": {"variables": settings.render_variables},
    "metrics.md": {"metrics": metrics.render_proxy, "workers": metrics.render_workers},
}


def make_page(name: str) -> str:
    """Return the up-to-date text of a page."""
    if name in WHOLE:
        return WHOLE[name]()
    page = (DOCS / name).read_text(encoding="utf-8")
    for section, render in SECTIONS[name].items():
        begin, end = f"<!-- {section}: written by scripts/make_reference.py -->\n", f"<!-- end of {section} -->\n"
        before, has_begin, rest = page.partition(begin)
        _, has_end, after = rest.partition(end)
        if not (has_begin and has_end):
            raise SystemExit(f"{name} needs both {begin.strip()} and {end.strip()}")
        page = f"{before}{begin}\n{render().rstrip()}\n\n{end}{after}"
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check whether the pages are up to date")
    is_check = parser.parse_args().check
    late = []
    for name in (*WHOLE, *SECTIONS):
        path, page = DOCS / name, make_page(name)
        if not is_check:
            path.write_text(page, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != page:
            late.append(name)
    if late:
        print(f"out of date: {', '.join(late)}; run python scripts/make_reference.py", file=sys.stderr)
    return 1 if late else 0


if __name__ == "__main__":
    raise SystemExit(main())
