"""Find indirect or unidiomatic wording in docstrings, comments, messages and documents.

python scripts/check_prose.py             check everything; `make check` runs it
python scripts/check_prose.py PATH...     check these files and folders

A line with `prose: allow` is not checked: for a quotation, a prompt or a term of another API.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ("handlers", "torchmoor", "scripts", "benchmarks", "tests", "docs", "deploy", "README.md", "CONTRIBUTING.md")
KINDS = {".py", ".js", ".css", ".html", ".md", ".yaml", ".yml", ".sh"}
# Records of their time, generated pages, and this list itself.
EXEMPT = ("docs/decisions/", "docs/benchmarks/", "docs/modules.md", "scripts/check_prose.py")
ALLOW = "prose: allow"
UNITS = "second|minute|hour|day|request|token|turn|step|session"
HABITS = {
    r"nobody|somebody|whoever|whomever": "name the component, client or operator",
    r"shall": "must, or will",
    r"(?<!there\s)is\s+no(?!\s+(?:longer|more)\b)": "is not a",
    r"(?<!there\s)(?-i:is\s+none)(?!\s+of)": "say what is missing",
    r"told": "say who sends what to whom",
    r"brought": "sends, contains, or carries",
    r"g[ai]ven?\s+up(?!\s+to)": "aborted, or abandoned",
    r"so\s+many": "at most",
    rf"(?:\d[\d.,]*|once|twice|times|(?<![A-Za-z]\d\s)(?<=\d\s)\w+)\s+an?\s+(?:{UNITS})": "N per second or hour",
    r"as\s+any": "like other",
    r"anew": "again",
    r"any\s+more\s+than": "say it without a comparison",
    r"any\s+more(?=[.,;:)]|$)": "no longer",
    r"for\s+ever": "forever, or without a limit",
    r"what\s+bec[ao]mes?\s+of": "the outcome, the verdict, or the result",
    r"(?:another|other)\s+makers?": "third-party, or not torchmoor's",
}
PATTERN = re.compile("|".join(rf"\b(?P<h{i}>{habit})\b" for i, habit in enumerate(HABITS)), re.IGNORECASE)
ADVICE = list(HABITS.values())


class Text(NamedTuple):
    """A piece of prose and the line on which it begins."""

    line: int
    text: str


def python_texts(source: str) -> Iterator[Text]:
    """Yield comments, with consecutive ones as one text, and string literals, which include docstrings."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != last + 1:
                yield Text(first, "\n".join(block))
                block = []
            if not block:
                first = token.start[0]
            block.append(token.string.lstrip("# "))
            last = token.start[0]
    if block:
        yield Text(first, "\n".join(block))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield Text(node.lineno, node.value)


def markdown_texts(source: str) -> Iterator[Text]:
    """Yield a document's paragraphs without code, in blocks or in the line."""
    source = re.sub(r"```.*?```", lambda match: "\n" * match[0].count("\n"), source, flags=re.DOTALL)
    yield Text(1, re.sub(r"`[^`\n]*`", "`code`", source))


def find_habits(path: Path) -> Iterator[str]:
    """Yield a message for each habit in a file."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    match path.suffix:
        case ".py":
            texts: Iterable[Text] = python_texts(source)
        case ".md":
            texts = markdown_texts(source)
        case _:
            texts = [Text(1, source)]
    found = set()
    for text in texts:
        for match in PATTERN.finditer(text.text):
            first = text.line + text.text.count("\n", 0, match.start())
            last = text.line + text.text.count("\n", 0, match.end())
            if not any(ALLOW in line for line in lines[first - 1 : last]):
                advice = ADVICE[int(str(match.lastgroup)[1:])]
                found.add((first, " ".join(match[0].split()), advice))
    for line, words, advice in sorted(found):
        yield f'{path.relative_to(ROOT)}:{line}: "{words}": {advice}'


def files(paths: Iterable[Path]) -> list[Path]:
    """Return the files of folders that hold prose, without the exempt ones."""
    every = (file for path in paths for file in ([path] if path.is_file() else path.rglob("*")))
    return sorted(
        file
        for file in every
        if file.suffix in KINDS and file.is_file() and not str(file.relative_to(ROOT)).startswith(EXEMPT)
    )


def main() -> int:
    """Print each habit with its place. Return the exit status: 1 if there is any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="check only these")
    options = parser.parse_args()
    chosen = [path.resolve() for path in options.paths] or [ROOT / each for each in CHECKED]
    for path in chosen:
        if not path.exists() or not path.is_relative_to(ROOT):
            parser.error(f"there is no {path} in this checkout")
    messages = [message for path in files(chosen) for message in find_habits(path)]
    for message in messages:
        print(message, file=sys.stderr)
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
