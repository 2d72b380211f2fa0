"""The command `torchmoor up`: its options and output. torchmoor.run.up does the work."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import click
import uvloop

from torchmoor.cli.background import announce, detach
from torchmoor.cli.options import log_level_option, no_auth_option
from torchmoor.cli.running_fleets import recorded
from torchmoor.cli.setting_option import given_settings, named_by_options, setting
from torchmoor.config.up import UpSettings
from torchmoor.proxy.access.credential_sources import ACCESS_KEYS, KEYS_FILE, TOKENS
from torchmoor.proxy.routing.strategies import STRATEGIES
from torchmoor.run.log import announcer, report, start_log
from torchmoor.run.up import run
from torchmoor.wire.handler_variables import JOURNAL_URL

option = partial(setting, UpSettings)
FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.argument("checkpoints", metavar="[MODEL]...", nargs=-1)
@option("names", "--name", metavar="NAME")
@option("endpoints", "--endpoint", metavar="NAME")
@option("instances", "--instances")
@option("min_instances", "--min-instances")
@option("max_instances", "--max-instances")
@option("scaling.tracking.target", "--backlog-per-instance", metavar="REQUESTS")
@option("scaling.tracking.scale_in_cooldown_s", "--scale-in-cooldown", metavar="SECONDS")
@option("scaling.max_hold_s", "--max-hold", metavar="SECONDS")
@option("listen.port", "--port")
@option("listen.admin_port", "--admin-port")
@option("listen.host", "--host")
@option("listen.admin_host", "--admin-host")
@option(
    "access.keys_file",
    "--keys",
    metavar="FILE",
    envvar=KEYS_FILE,
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of access keys and tokens, one of which each request needs; docs/access.md has the form. "
    f"Also read from {ACCESS_KEYS} and {TOKENS}.",
)
@option("listen.allowed_hosts", "--allow-host", metavar="NAME")
@option("listen.allowed_origins", "--allow-origin", metavar="ORIGIN")
@option("listen.tls_certificate", "--tls-cert", metavar="FILE")
@option("listen.tls_key", "--tls-key", metavar="FILE")
@no_auth_option
@option("launch.model_store", "--model-store", type=FOLDER, default=None, show_default=False)
@option("launch.run_dir", "--run-dir", type=FOLDER)
@option(
    "journal",
    "--journal",
    metavar="URL",
    envvar=JOURNAL_URL,
    help=f"{UpSettings.model_fields['journal'].description} Its variable is {JOURNAL_URL}.",
)
@option(
    "async_inputs",
    "--allow-async-input",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
)
@option("async_output", "--async-output", metavar="S3URL")
@option("async_failure", "--async-failure", metavar="S3URL")
@option("launch.max_body_mib", "--max-body-mib")
@option("launch.heap_mib", "--heap-mib")
@option("adapters", "--adapters", metavar="DIR|S3URL")
@option("models", "--models", metavar="DIR|S3URL")
@option("strategy", "--strategy", type=click.Choice(tuple(STRATEGIES)))
@option("launch.python", "--python", metavar="FILE")
@option("launch.gpus_per_instance", "--gpus-per-instance")
@option("launch.capacity", "--capacity", type=click.IntRange(1, 100_000))
@option("is_late_binding", "--late-binding")
@option("allowed_image_hosts", "--allow-image-host", metavar="HOST")
@option("launch.start_timeout_s", "--start-timeout", metavar="SECONDS")
@option("launch.progress_interval_s", "--progress-interval", metavar="SECONDS")
@option("listen.processes", "--processes")
@option("observe.access_log", "--access-log", metavar="FILE")
@option("observe.traces_url", "--traces-url", metavar="URL")
@option("control.is_on", "--control-plane")
@option(
    "control.model_directories", "--allow-model-dir", metavar="DIR", type=click.Path(path_type=Path, file_okay=False)
)
@option("control.own_images", "--own-image", metavar="NAME")
@option("control.max_resources", "--max-created-resources")
@option("control.max_instances", "--max-created-instances")
@option("control.max_model_bytes", "--max-model-bytes")
@option("control.drain_timeout_s", "--drain-timeout", metavar="SECONDS")
@option("control.removal_timeout_s", "--removal-timeout", metavar="SECONDS")
@option(
    "chat_page.is_on", "--no-chat-page", flag_value=False, help="Do not serve the page at /chat (docs/chat-page.md)."
)
@log_level_option
@click.option(
    "-d",
    "--detach",
    "is_detached",
    is_flag=True,
    help="Return when the fleet is ready, and leave it running in the background.",
)
def up(checkpoints: tuple[str, ...], no_auth: bool, log_level: str, is_detached: bool) -> None:
    """Start TorchServe instances and the front proxy on this machine, and serve until Ctrl-C.

    MODEL is a chat model: a checkpoint's directory, s3://bucket/prefix or hf://owner/name, with @revision for a branch,
    tag or commit. Each MODEL is an endpoint, named by its --name. Without MODEL and --endpoint, the demo model is
    served as llava.

    Progress goes to standard error. When everything is ready, one line of JSON on standard output has the addresses.
    `torchmoor status`, `logs` and `stop` find the fleet, also with -d.

    \b
    Examples:
      torchmoor up --instances 2
      torchmoor up -d                             in the background, until torchmoor stop
      torchmoor up ./my-llava --name my-llava
      torchmoor up ./my-llava --name seeing hf://org/model --name text
      torchmoor up --model-store my_store --endpoint notes    my_store/notes.mar
      torchmoor up ./my-llava --adapters ./adapters
      torchmoor up --endpoint many --models ./models
      torchmoor up --min-instances 0 --max-instances 2    no instance runs without load
      torchmoor up --port 0 --admin-port 0        any free ports; the JSON line has them
      torchmoor up --allow-image-host 127.0.0.1   images may come from a web server on this machine
      torchmoor up --capacity 8 --late-binding    one queue for all instances
      torchmoor up --control-plane --run-dir ~/.torchmoor    boto3's create_endpoint and the like work
      torchmoor up --host 0.0.0.0 --keys keys.txt --tls-cert cert.pem --tls-key key.pem
    """
    given = given_settings()
    if checkpoints:
        given = {"endpoints": (), **given, "checkpoints": checkpoints}
    elif "control" in given and given["control"].get("is_on"):
        given = {"endpoints": (), **given}
    with named_by_options():
        settings = UpSettings.read(given)
    if settings.is_late_binding and "capacity" not in given.get("launch", {}):
        raise click.UsageError(
            "--late-binding needs --capacity: the number of requests that an instance processes at full speed"
        )
    if settings.instances == 0 and settings.min_instances is None and settings.max_instances is None:
        raise click.UsageError("--instances 0 needs --min-instances 0, so that an instance is started when needed")
    if is_detached:
        detach()
    start_log(log_level.upper())
    with ExitStack() as while_running:

        def record(line: str) -> None:
            while_running.enter_context(recorded(line))

        uvloop.run(run(settings, report, record, announce if is_detached else announcer(), is_open=no_auth))
