"""The commands `torchmoor async ...`. Parse and print; what they do is in torchmoor.async_requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import click

from torchmoor.access.credentials import ADMIN_TOKEN
from torchmoor.async_inference.request import State
from torchmoor.async_requests import AsyncRequests, describe_list, describe_status
from torchmoor.errors import TorchmoorError


@click.group(name="async")
@click.option("--admin-url", default="http://127.0.0.1:9080", show_default=True, help="Where the admin plane listens.")
@click.option("--token", envvar=ADMIN_TOKEN, default="", help=f"The admin plane's token; better as {ADMIN_TOKEN}.")
@click.pass_context
def async_(context: click.Context, admin_url: str, token: str) -> None:
    """Look after asynchronous requests: list them, see one, cancel one, fetch a result.

    \b
    Examples:
      torchmoor async list --state failed
      torchmoor async status ID
      torchmoor async get ID -o answer.json
    """
    try:
        context.obj = AsyncRequests(admin_url, token)
    except TorchmoorError as error:
        raise click.ClickException(str(error)) from error


def _show(
    ask: Callable[[], dict[str, Any]], describe: Callable[[dict[str, Any]], Iterable[str]], as_json: bool
) -> None:
    try:
        found = ask()
    except TorchmoorError as error:
        raise click.ClickException(str(error)) from error
    for line in [json.dumps(found)] if as_json else describe(found):
        click.echo(line)


_json_option = click.option("--json", "as_json", is_flag=True, help="One line of JSON.")


@async_.command("list")
@click.option("--endpoint", metavar="NAME", help="The endpoint; may be left out where there is one.")
@click.option("--state", type=click.Choice([each.value for each in State], case_sensitive=False), help="Only these.")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1, 1000), help="The most that are listed.")
@_json_option
@click.pass_obj
def list_(requests: AsyncRequests, endpoint: str | None, state: str | None, limit: int, as_json: bool) -> None:
    """Requests of an endpoint, oldest first."""
    _show(lambda: requests.list(endpoint, state, limit), describe_list, as_json)


@async_.command()
@click.argument("inference_id")
@_json_option
@click.pass_obj
def status(requests: AsyncRequests, inference_id: str, as_json: bool) -> None:
    """What became of INFERENCE_ID."""
    _show(lambda: requests.status(inference_id), describe_status, as_json)


@async_.command()
@click.argument("inference_id")
@_json_option
@click.pass_obj
def cancel(requests: AsyncRequests, inference_id: str, as_json: bool) -> None:
    """Cancel INFERENCE_ID, unless it has ended."""
    _show(lambda: requests.cancel(inference_id), lambda found: [f"{found['inference_id']}: {found['state']}"], as_json)


@async_.command()
@click.argument("inference_id")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where the result goes (default: standard output).",
)
@click.option("--json", "as_json", is_flag=True, help="One line of JSON about the file; needs --output.")
@click.pass_obj
def get(requests: AsyncRequests, inference_id: str, output: Path | None, as_json: bool) -> None:
    """The result of INFERENCE_ID."""
    if as_json and output is None:
        raise click.UsageError("--json needs --output: standard output is the result's own")
    num_bytes = 0
    try:
        pieces = requests.get(inference_id)
        first = next(pieces, b"")  # before a file is made
        with click.open_file("-" if output is None else str(output), "wb") as file:
            for piece in chain((first,), pieces):
                num_bytes += file.write(piece)
            file.flush()
    except (TorchmoorError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps({"inference_id": inference_id, "path": str(output), "bytes": num_bytes}))
