"""`torchmoor doctor`: prints the findings of torchmoor.doctor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from torchmoor.cli.exit_status import Exit
from torchmoor.cli.options import (
    DEFAULT_ENDPOINT,
    admin_keys_option,
    admin_url_option,
    default_store,
    find_admin_token,
    url_option,
)

COLORS = {"ok": "green", "warning": "yellow", "problem": "red"}


@click.command()
@click.option(
    "--endpoint",
    "endpoints",
    multiple=True,
    default=[DEFAULT_ENDPOINT],
    show_default=True,
    metavar="NAME",
    help="An endpoint to run here, as for `up`. Repeatable.",
)
@click.option(
    "--instances",
    default=1,
    show_default=True,
    type=click.IntRange(0, 64),
    help="Instances per endpoint; 0: only the proxy.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the runtime API.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65_535), help="Its port.")
@click.option("--admin-host", default="127.0.0.1", show_default=True, help="Address of the admin plane.")
@click.option("--admin-port", default=9080, show_default=True, type=click.IntRange(0, 65_535), help="Its port.")
@click.option("--model-store", type=click.Path(path_type=Path, file_okay=False), help="Folder of the .mar archives.")
@click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False), help="As for `up`.")
@click.option(
    "--journal",
    metavar="URL",
    envvar="TORCHMOOR_HANDLER_JOURNAL_URL",
    show_envvar=True,
    default="",
    help="As for `up`.",
)
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Configuration file of `serve`, which has the ports, stores and instances. With it no instance runs here, "
    "unless --instances is given.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one object with all findings.")
@url_option
@admin_url_option
@admin_keys_option
@click.pass_context
def doctor(
    context: click.Context,
    endpoints: tuple[str, ...],
    instances: int,
    host: str,
    port: int,
    admin_host: str,
    admin_port: int,
    model_store: Path | None,
    run_dir: Path | None,
    journal: str,
    config: Path | None,
    as_json: bool,
    url: str,
    admin_url: str,
    keys_file: Path | None,
) -> None:
    """Find problems that would keep a fleet from running on this machine, with remedies; check a running fleet too.

    Changes nothing. The exit status is 1 if there is a problem; warnings do not count.

    \b
    Examples:
      torchmoor doctor
      torchmoor doctor --instances 4 --endpoint llava --journal redis://10.0.0.5:6379/0
      torchmoor doctor --config torchmoor.yaml --json | jq -r '.findings[] | select(.level != "ok") | .remedy'
    """
    from torchmoor.doctor.finding import FleetPlan
    from torchmoor.doctor.run import examine

    configuration: Any = None
    if config is not None:
        from torchmoor.run.serve import read

        configuration = read(config, given={}, is_open=True)
        listen = configuration.proxy.listen
        host, port, admin_host, admin_port = listen.host, listen.port, listen.admin_host, listen.admin_port
        endpoints = tuple(endpoint.name for endpoint in configuration.proxy.endpoints)
        model_store = model_store or Path(configuration.launch.model_store)
        if _is_default(context, "instances"):
            instances = 0
        if admin_port and _is_default(context, "admin_url"):
            admin_url = f"http://{admin_host}:{admin_port}"
        if port and _is_default(context, "url"):
            url = f"http://{host}:{port}"
    plan = FleetPlan(
        endpoints=endpoints,
        num_instances=instances * len(endpoints),
        model_store=(model_store or default_store()).resolve(),
        run_dir=None if run_dir is None else run_dir.resolve(),
        journal=journal,
        host=host,
        port=port,
        admin_host=admin_host,
        admin_port=admin_port,
        url=url,
        admin_url=admin_url,
        admin_token=find_admin_token(keys_file),
        is_admin_named=not _is_default(context, "admin_url"),
        configuration=configuration,
    )
    found = []
    for finding in examine(plan):
        found.append(finding)
        if not as_json:
            level = finding.level.value
            click.echo(f"{click.style(f'{level:<8}', fg=COLORS[level])} {finding.check}: {finding.found}")
            if finding.remedy:
                click.echo(f"         -> {finding.remedy}")
    levels = [finding.level.value for finding in found]
    if as_json:
        click.echo(json.dumps({"ok": "problem" not in levels, "findings": [each.describe() for each in found]}))
    else:
        click.echo(f"{levels.count('problem')} problems, {levels.count('warning')} warnings, {levels.count('ok')} ok")
    if "problem" in levels:
        raise click.exceptions.Exit(Exit.FAILED)


def _is_default(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is click.core.ParameterSource.DEFAULT
