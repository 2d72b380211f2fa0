"""`torchmoor serve`: parses and prints; what it does is in torchmoor.run.serve."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click
import uvloop

from torchmoor.cli.progress import report_progress, report_warning
from torchmoor.run.serve import check as check_config
from torchmoor.run.serve import run


@click.command()
@click.option(
    "--config",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Endpoints, instances and settings; docs/routing.md has an example.",
)
@click.option("--no-auth", is_flag=True, help="Allow an address other than loopback although anybody may come in.")
@click.option(
    "--processes", type=click.IntRange(1, 64), help="Proxy processes that share the port (default: what the file says)."
)
@click.option("--check", is_flag=True, help="Say whether the file and all that it names can be served, and end.")
@click.option("--log-level", default="warning", type=click.Choice(["debug", "info", "warning", "error"]))
def serve(config: Path, no_auth: bool, check: bool, processes: int | None, log_level: str) -> None:
    """Run the front proxy before TorchServe instances that run already, until Ctrl-C.

    One line of JSON on standard output says where it listens. Session ids are verified with the keys in
    TORCHMOOR_SESSION_KEYS, which the instances must have too.

    \b
    Examples:
      torchmoor serve --config torchmoor.yaml
      torchmoor serve --config torchmoor.yaml --processes 4
      torchmoor serve --config torchmoor.yaml --check    exit status 1 and the reason, if it would not start
    """
    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    try:
        if check:
            click.echo(check_config(config, processes=processes, is_open=no_auth, warn=report_warning))
            return
        uvloop.run(run(config, processes=processes, is_open=no_auth, report=report_progress, announce=click.echo))
    except OSError as error:
        raise click.ClickException(f"cannot listen: {error.strerror or error}") from error
