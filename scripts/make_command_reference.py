"""Write the help of every command into docs/command-line.md, between its two markers. A test compares them.

python scripts/make_command_reference.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import click

from torchmoor.cli.main import main

PAGE = Path(__file__).resolve().parents[1] / "docs" / "command-line.md"
BEGIN, END = "<!-- made by scripts/make_command_reference.py -->", "<!-- end -->"
COLUMNS = 100


def walk(command: click.Command, parent: click.Context | None, name: str) -> Iterator[tuple[str, str]]:
    """Yield the full name and the help of a command and of its subcommands."""
    settings = {**command.context_settings, "terminal_width": COLUMNS}
    context = click.Context(command, parent, info_name=name, **settings)
    yield context.command_path, context.get_help()
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            assert found is not None
            yield from walk(found, context, each)


def render() -> str:
    """Return all commands as Markdown."""
    return "\n".join(f"### {path}\n\n```text\n{text}\n```\n" for path, text in walk(main, None, "torchmoor"))


def insert(page: str, reference: str) -> str:
    """Return the page with a new reference between its markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"the page needs both {BEGIN} and {END}")
    return f"{before}{begin}\n\n{reference}\n{end}{after}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(insert(PAGE.read_text(), render()))
