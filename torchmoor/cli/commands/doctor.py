"""`torchmoor doctor`: prints the findings of torchmoor.doctor."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from torchmoor.cli.exit_status import ExitStatus
from torchmoor.cli.options import admin_keys_option, admin_url_option, find_admin_token, url_option
from torchmoor.cli.setting_option import given_settings, named_by_options, setting
from torchmoor.config.up import UpSettings
from torchmoor.wire.handler_variables import JOURNAL_URL

if TYPE_CHECKING:  # the import takes a while
    from torchmoor.doctor.finding import Finding, FleetPlan

COLORS = {"ok": "green", "warning": "yellow", "problem": "red"}
FOLDER = click.Path(path_type=Path, file_okay=False)
option = partial(setting, UpSettings)


@click.command()
@option("endpoints", "--endpoint", metavar="NAME", help="An endpoint to run here, as for `up`. Repeatable.")
@option("instances", "--instances", default=1, show_default=True, help="Instances per endpoint; 0: only the proxy.")
@option("listen.host", "--host")
@option("listen.port", "--port")
@option("listen.admin_host", "--admin-host")
@option("listen.admin_port", "--admin-port")
@option("launch.model_store", "--model-store", type=FOLDER, default=None, show_default=False)
@option("launch.run_dir", "--run-dir", type=FOLDER, help="As for `up`.")
@option("journal", "--journal", metavar="URL", envvar=JOURNAL_URL, show_envvar=True, help="As for `up`.")
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Configuration file of `serve`, which names the ports, stores and instances. With it no instance runs here, "
    "unless --instances is given.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one object with all findings.")
@url_option
@admin_url_option
@admin_keys_option
@click.pass_context
def doctor(
    context: click.Context, config: Path | None, as_json: bool, url: str, admin_url: str, keys_file: Path | None
) -> None:
    """Find problems that would keep a fleet from running on this machine, with remedies; check a running fleet too.

    Changes nothing. The exit status is 1 if there is a problem; warnings do not count.

    \b
    Examples:
      torchmoor doctor
      torchmoor doctor --instances 4 --endpoint llava --journal redis://10.0.0.5:6379/0
      torchmoor doctor --config torchmoor.yaml --json | jq -r '.findings[] | select(.level != "ok") | .remedy'
    """
    from torchmoor.doctor.checks import examine
    from torchmoor.doctor.finding import counted

    found = []
    for finding in examine(_make_plan(context, config, url, admin_url, keys_file)):
        found.append(finding)
        if not as_json:
            _print(finding)
    levels = [finding.level.value for finding in found]
    if as_json:
        click.echo(json.dumps({"ok": "problem" not in levels, "findings": [asdict(each) for each in found]}))
    else:
        problems, warnings = (counted(levels.count(level), level) for level in ("problem", "warning"))
        click.echo(f"{problems}, {warnings}, {levels.count('ok')} ok")
    if "problem" in levels:
        raise click.exceptions.Exit(ExitStatus.FAILED)


def _make_plan(
    context: click.Context, config: Path | None, url: str, admin_url: str, keys_file: Path | None
) -> FleetPlan:
    """Return the fleet that the options describe, or the configuration file. Raises ConfigError."""
    from torchmoor.doctor.finding import FleetPlan
    from torchmoor.run.launching import find_model_store

    given = given_settings()
    with named_by_options():
        settings = UpSettings.read(given)
    endpoints, listen, num_instances = settings.endpoints, settings.listen, given.get("instances", 1)
    model_store, configuration = find_model_store(settings.launch), None
    is_admin_named = context.get_parameter_source("admin_url") is not ParameterSource.DEFAULT
    if config is not None:
        from torchmoor.run.serve import read

        configuration = read(config, given={}, is_open=True)
        listen, num_instances = configuration.proxy.listen, given.get("instances", 0)
        endpoints = tuple(endpoint.name for endpoint in configuration.proxy.endpoints)
        if "model_store" not in settings.launch.model_fields_set:
            model_store = Path(configuration.launch.model_store).resolve()
        if listen.admin_port and not is_admin_named:
            admin_url = listen.admin_url(listen.admin_port)
        if listen.port and context.get_parameter_source("url") is ParameterSource.DEFAULT:
            url = listen.runtime_url(listen.port)
    return FleetPlan(
        endpoints=endpoints,
        num_instances=num_instances * len(endpoints),
        model_store=model_store,
        has_built_in=config is None and "model_store" not in settings.launch.model_fields_set,
        # Without --run-dir, a path as long as the generated one.
        run_dir=Path(settings.launch.run_dir or f"{tempfile.gettempdir()}/torchmoor-xxxxxxxx").resolve(),
        journal=settings.journal or "",
        listen=listen,
        url=url,
        admin_url=admin_url,
        admin_token=find_admin_token(keys_file),
        is_admin_named=is_admin_named,
        configuration=configuration,
    )


def _print(finding: Finding) -> None:
    level = finding.level.value
    click.echo(f"{click.style(f'{level:<8}', fg=COLORS[level])} {finding.check}: {finding.found}")
    if finding.remedy:
        click.echo(f"         -> {finding.remedy}")
