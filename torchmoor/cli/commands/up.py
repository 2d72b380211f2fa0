"""`torchmoor up`: parses and prints; what it does is in torchmoor.run.up."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click
import uvloop

from torchmoor.cli.options import DEFAULT_ENDPOINT, Number, default_store
from torchmoor.cli.progress import report_progress
from torchmoor.config.dialects import ChatPageSettings
from torchmoor.config.listen import ListenSettings
from torchmoor.config.observe import ObserveSettings
from torchmoor.config.scaling import ScalingSettings, StepScaling, TargetTracking
from torchmoor.fleet.launcher import DEFAULT_CAPACITY
from torchmoor.fleet.torchserve import DEFAULT_BODY_MIB, DEFAULT_HEAP_MIB
from torchmoor.proxy.access.credentials import ACCESS_KEYS, KEYS_FILE, TOKENS
from torchmoor.proxy.routing.strategies import DEFAULT_STRATEGY, STRATEGIES
from torchmoor.run.up import JOURNAL_URL, UpOptions, run


@click.command()
@click.option(
    "--endpoint",
    "endpoints",
    multiple=True,
    default=[DEFAULT_ENDPOINT],
    show_default=True,
    metavar="NAME",
    help="An endpoint to serve: the name of an archive, without .mar. Repeatable.",
)
@click.option(
    "--instances",
    type=click.IntRange(0, 64),
    help="TorchServe instances of each endpoint; where their number changes, at the start "
    "(default: --min-instances, or 1).",
)
@click.option(
    "--min-instances",
    type=click.IntRange(0, 64),
    help="Go down to this number when there is nothing to do, and up again when there is; 0 is allowed "
    "(docs/autoscaling.md).",
)
@click.option(
    "--max-instances",
    type=click.IntRange(1, 64),
    help="Go up to this number when there is much to do (default: --instances, or 1).",
)
@click.option(
    "--backlog-per-instance",
    default=TargetTracking().target,
    show_default=True,
    type=Number(min=0, min_open=True),
    metavar="REQUESTS",
    help="That wait or run; with more, there shall be more instances.",
)
@click.option(
    "--scale-in-cooldown",
    default=TargetTracking().scale_in_cooldown_s,
    show_default=True,
    type=Number(min=0),
    metavar="SECONDS",
    help="For how long fewer instances must have been enough before one goes.",
)
@click.option(
    "--max-hold",
    default=ScalingSettings().max_hold_s,
    show_default=True,
    type=Number(min=0, min_open=True),
    metavar="SECONDS",
    help="How long a request that finds no instance waits for one to start.",
)
@click.option("--port", default=8080, show_default=True, help="Port of the runtime API; 0 takes any free one.")
@click.option("--admin-port", default=9080, show_default=True, help="Port of the admin plane; 0 takes any free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the runtime API.")
@click.option("--admin-host", default="127.0.0.1", show_default=True, help="Address of the admin plane.")
@click.option(
    "--keys",
    "keys_file",
    metavar="FILE",
    envvar=KEYS_FILE,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Access keys and tokens that requests must come with; docs/access.md has the form. "
    f"Also read from {ACCESS_KEYS} and {TOKENS}.",
)
@click.option("--tls-cert", metavar="FILE", default="", help="The runtime API's certificate; SIGHUP reads it again.")
@click.option("--tls-key", metavar="FILE", default="", help="Its private key.")
@click.option("--no-auth", is_flag=True, help="Allow an address other than loopback although anybody may come in.")
@click.option("--model-store", type=click.Path(path_type=Path, file_okay=False), help="Where the .mar archives are.")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the instances' folders and logs go while they run (default: a temporary directory).",
)
@click.option(
    "--journal",
    metavar="URL",
    envvar=JOURNAL_URL,
    help="Where sessions are recorded so that another instance can take them over: file:///a/directory, "
    "redis://host:port/db, rediss://..., s3://bucket/prefix, or off (default: a directory for as long as the fleet "
    f"runs). A URL with a password better comes in the environment, as {JOURNAL_URL}.",
)
@click.option(
    "--allow-async-input",
    "async_inputs",
    multiple=True,
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="A directory below which InputLocation may name files, as file:///a/path. Repeatable.",
)
@click.option(
    "--max-body-mib",
    default=DEFAULT_BODY_MIB,
    show_default=True,
    type=click.IntRange(1, 2047),
    help="The longest request or answer of an instance. Asynchronous ones may have 1024.",
)
@click.option(
    "--heap-mib",
    default=DEFAULT_HEAP_MIB,
    show_default=True,
    type=click.IntRange(128),
    help="Memory of an instance's JVM, through which every body passes, several times over.",
)
@click.option(
    "--models",
    metavar="DIR|S3URL",
    default="",
    help="Where the models of --endpoint many are: a directory, or s3://bucket/prefix.",
)
@click.option(
    "--strategy",
    type=click.Choice(tuple(STRATEGIES)),
    default=DEFAULT_STRATEGY,
    show_default=True,
    help="How an instance is chosen for requests that belong to no session.",
)
@click.option(
    "--capacity",
    type=click.IntRange(1, 100_000),
    help=f"Requests that an instance is sent at a time (default: {DEFAULT_CAPACITY}).",
)
@click.option(
    "--late-binding",
    is_flag=True,
    help="Requests beyond the capacity wait at the proxy for whichever instance is free first, instead of being "
    "refused; only as good as --capacity, which it needs (docs/routing.md).",
)
@click.option(
    "--allow-image-host",
    multiple=True,
    metavar="HOST",
    help="A host name, address or CIDR block that images may be fetched from although it is private. Repeatable.",
)
@click.option(
    "--start-timeout",
    default=180.0,
    show_default=True,
    type=Number(min=1),
    metavar="SECONDS",
    help="How long an instance may take to load its model; more where a large checkpoint is downloaded first.",
)
@click.option(
    "--processes",
    default=1,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Proxy processes that share the port; one carries about 10,000 requests a second.",
)
@click.option(
    "--access-log", metavar="FILE", default="", help="One line of JSON for each request goes there; or to stderr."
)
@click.option(
    "--traces-url", metavar="URL", default="", help="Where spans go, as OTLP: http://127.0.0.1:4318/v1/traces."
)
@click.option("--no-chat-page", is_flag=True, help="Without the page for people at /chat (docs/chat-page.md).")
@click.option("--log-level", default="warning", type=click.Choice(["debug", "info", "warning", "error"]))
def up(
    endpoints: tuple[str, ...],
    instances: int | None,
    min_instances: int | None,
    max_instances: int | None,
    backlog_per_instance: float,
    scale_in_cooldown: float,
    max_hold: float,
    port: int,
    admin_port: int,
    host: str,
    admin_host: str,
    keys_file: Path | None,
    tls_cert: str,
    tls_key: str,
    no_auth: bool,
    model_store: Path | None,
    run_dir: Path | None,
    journal: str | None,
    async_inputs: tuple[Path, ...],
    max_body_mib: int,
    heap_mib: int,
    models: str,
    strategy: str,
    capacity: int | None,
    late_binding: bool,
    allow_image_host: tuple[str, ...],
    start_timeout: float,
    processes: int,
    access_log: str,
    traces_url: str,
    no_chat_page: bool,
    log_level: str,
) -> None:
    """Start TorchServe instances and the front proxy on this machine, and serve until Ctrl-C.

    Progress goes to standard error. When all is ready, one line of JSON on standard output says where.

    \b
    Examples:
      torchmoor up --instances 2
      torchmoor up --endpoint llava --endpoint llm
      torchmoor up --endpoint many --models ./models
      torchmoor up --min-instances 0 --max-instances 2    none while nobody asks anything
      torchmoor up --port 0 --admin-port 0        any free ports; the JSON line has them
      torchmoor up --allow-image-host 127.0.0.1   images may come from a web server on this machine
      torchmoor up --capacity 8 --late-binding    one queue before all instances
      torchmoor up --host 0.0.0.0 --keys keys.txt --tls-cert cert.pem --tls-key key.pem
    """
    if late_binding and capacity is None:
        raise click.UsageError("--late-binding needs --capacity: how many requests an instance does at full speed")
    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    scaling = _make_scaling(instances, min_instances, max_instances, backlog_per_instance, scale_in_cooldown, max_hold)
    listen = ListenSettings(
        host=host,
        port=port,
        admin_host=admin_host,
        admin_port=admin_port,
        tls_certificate=tls_cert,
        tls_key=tls_key,
        processes=processes,
    )
    observe = ObserveSettings(access_log=access_log, traces_url=traces_url)
    options = UpOptions(
        endpoints=endpoints,
        num_instances=1 if instances is None else instances,
        scaling=scaling,
        listen=listen,
        keys_file=keys_file,
        model_store=(model_store or default_store()).resolve(),
        run_dir=None if run_dir is None else run_dir.resolve(),
        journal=journal,
        strategy=strategy,
        capacity=capacity or DEFAULT_CAPACITY,
        is_late_binding=late_binding,
        allowed_image_hosts=allow_image_host,
        start_timeout_s=start_timeout,
        is_open=no_auth,
        async_inputs=tuple(folder.resolve() for folder in async_inputs),
        max_body_mib=max_body_mib,
        heap_mib=heap_mib,
        models=models,
        observe=observe,
        chat_page=ChatPageSettings(is_on=not no_chat_page),
    )
    try:
        uvloop.run(run(options, report_progress, click.echo))
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host}: {error.strerror or error}") from error


def _make_scaling(
    initial: int | None, least: int | None, most: int | None, target: float, scale_in_s: float, max_hold_s: float
) -> ScalingSettings | None:
    """The limits and policies for `up`; None if the number of instances stays. Raises ConfigError."""
    if least is None and most is None:
        if initial == 0:
            raise click.UsageError("--instances 0 needs --min-instances 0, so that an instance is started when needed")
        return None
    if least is None:
        least = 1 if initial is None else min(1, initial)
    return ScalingSettings(
        min_capacity=least,
        max_capacity=max(1, least, initial or 0) if most is None else most,
        initial_count=least if initial is None else initial,
        tracking=TargetTracking(
            target=target,
            scale_in_cooldown_s=scale_in_s,
            scale_out_cooldown_s=min(scale_in_s, TargetTracking().scale_out_cooldown_s),
        ),
        step=StepScaling(cooldown_s=min(scale_in_s, StepScaling().cooldown_s)),
        max_hold_s=max_hold_s,
    )
