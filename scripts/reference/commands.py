"""Renders the help of every command, for docs/command-line.md."""

from __future__ import annotations

from collections.abc import Iterator

import click

from torchmoor.cli.main import main

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
