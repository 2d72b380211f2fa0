"""`torchmoor async`: asynchronous requests. torchmoor.cli.async_requests has the calls."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import click

from torchmoor.async_inference.request import AsyncState
from torchmoor.cli.async_requests import PATH, describe_list, describe_status, open_output, path_of, read_result
from torchmoor.cli.options import admin_options, json_option, show
from torchmoor.cli.running_fleets import complete_endpoints
from torchmoor.clients.admin import AdminClient
from torchmoor.errors import TorchmoorError


@click.group(name="async")
def async_() -> None:
    """List, show or cancel asynchronous requests, or fetch a result.

    \b
    Examples:
      torchmoor async list --state failed
      torchmoor async status ID
      torchmoor async get ID -o answer.json
    """


@async_.command("list")
@click.option(
    "--endpoint",
    metavar="NAME",
    shell_complete=complete_endpoints,
    help="The endpoint; required if several accept asynchronous requests.",
)
@click.option(
    "--state",
    type=click.Choice([each.value for each in AsyncState], case_sensitive=False),
    help="List only requests in this state.",
)
@click.option(
    "--limit", default=100, show_default=True, type=click.IntRange(1, 1000), help="Maximum number of listed requests."
)
@json_option
@admin_options
def list_(admin: AdminClient, endpoint: str | None, state: str | None, limit: int, as_json: bool) -> None:
    """List the requests of an endpoint, oldest first.

    \b
    Examples:
      torchmoor async list
      torchmoor async list --endpoint llava --state failed --json
    """
    found = admin.get(PATH, {"endpoint": endpoint, "state": state, "limit": limit})
    show(found, lambda: describe_list(found), as_json=as_json)


@async_.command()
@click.argument("inference_id")
@json_option
@admin_options
def status(admin: AdminClient, inference_id: str, as_json: bool) -> None:
    """Show the state of INFERENCE_ID.

    \b
    Examples:
      torchmoor async status 5cf0ea42-8a0e-4a7c-b7c4-5d1f2f9a5e0b
    """
    found = admin.get(path_of(inference_id))
    show(found, lambda: describe_status(found), as_json=as_json)


@async_.command()
@click.argument("inference_id")
@json_option
@admin_options
def cancel(admin: AdminClient, inference_id: str, as_json: bool) -> None:
    """Cancel INFERENCE_ID if it has not ended.

    \b
    Examples:
      torchmoor async cancel 5cf0ea42-8a0e-4a7c-b7c4-5d1f2f9a5e0b
    """
    found = admin.post(path_of(inference_id) + "/cancel")
    show(found, lambda: [f"{found['inference_id']}: {found['state']}"], as_json=as_json)


@async_.command()
@click.argument("inference_id")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the result to this file (default: standard output).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON about the file; needs --output.")
@admin_options
def get(admin: AdminClient, inference_id: str, output: Path | None, as_json: bool) -> None:
    """Fetch the result of INFERENCE_ID.

    A file gets its name when the whole result is written.

    \b
    Examples:
      torchmoor async get 5cf0ea42-8a0e-4a7c-b7c4-5d1f2f9a5e0b -o answer.json
    """
    if as_json and output is None:
        raise click.UsageError("--json needs --output: standard output has the result")
    num_bytes = 0
    pieces = read_result(admin, inference_id)
    first = next(pieces, b"")  # before the file is created
    try:
        with open_output(output) as file:
            for piece in chain((first,), pieces):
                num_bytes += file.write(piece)
            file.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        target = output or "standard output"
        raise TorchmoorError(f"the result cannot be written to {target}: {error.strerror or error}") from error
    if as_json:
        click.echo(json.dumps({"inference_id": inference_id, "path": str(output), "bytes": num_bytes}))
