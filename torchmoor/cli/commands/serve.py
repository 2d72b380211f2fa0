"""The command `torchmoor serve`: its options and output. torchmoor.run.serve does the work."""

from __future__ import annotations

from pathlib import Path

import click
import uvloop

from torchmoor.cli.options import log_level_option, no_auth_option, report_warning
from torchmoor.cli.setting_option import given_settings, setting
from torchmoor.config.settings import ProxySettings
from torchmoor.run.log import announcer, report, start_log
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
@no_auth_option
@setting(
    ProxySettings,
    "listen.processes",
    "--processes",
    default=None,
    show_default=False,
    help="Proxy processes that share the port (default: the file's listen.processes).",
)
@click.option("--check", is_flag=True, help="Check the file and everything that it names, then exit.")
@log_level_option
def serve(config: Path, no_auth: bool, check: bool, log_level: str) -> None:
    """Run the front proxy for TorchServe instances that already run, until Ctrl-C.

    One line of JSON on standard output has its addresses. Session ids are verified with the keys in
    TORCHMOOR_SESSION_KEYS, which the instances must have too.

    \b
    Examples:
      torchmoor serve --config torchmoor.yaml
      torchmoor serve --config torchmoor.yaml --processes 4
      torchmoor serve --config torchmoor.yaml --check    why it would not start, with exit status 1 or 2
    """
    start_log(log_level.upper())
    if check:
        click.echo(check_config(config, given=given_settings(), is_open=no_auth, warn=report_warning))
        return
    uvloop.run(run(config, given=given_settings(), is_open=no_auth, report=report, announce=announcer()))
