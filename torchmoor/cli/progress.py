"""What commands say on standard error while they work."""

from __future__ import annotations

import click


def report_progress(line: str) -> None:
    """Print a step that has begun or ended."""
    click.echo(f"torchmoor: {line}", err=True)


def report_warning(line: str) -> None:
    """Print a warning: the command goes on."""
    click.echo(f"Warning: {line}", err=True)
