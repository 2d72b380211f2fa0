"""What commands say on standard error while they work."""

from __future__ import annotations

import click


def report_progress(line: str) -> None:
    """A step that was done or begun."""
    click.echo(f"torchmoor: {line}", err=True)


def report_warning(line: str) -> None:
    """What goes on, and is probably not meant."""
    click.echo(f"Warning: {line}", err=True)
