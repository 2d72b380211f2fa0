"""`torchmoor async`: asynchronous requests."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from itertools import chain
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import click

from torchmoor.async_inference.request import AsyncState
from torchmoor.cli.foreign_text import plain
from torchmoor.cli.options import admin_options, json_option, show
from torchmoor.cli.running_fleets import complete_endpoints
from torchmoor.clients.admin import AdminClient
from torchmoor.clients.errors import AdminError
from torchmoor.errors import TorchmoorError
from torchmoor.fleet.archives import whole_file

PIECE_BYTES = 1 << 20
PATH = "/async-requests"


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


def read_result(admin: AdminClient, inference_id: str) -> Iterator[bytes]:
    """Yield a request's result in pieces. Raises AdminError."""
    with admin.open("GET", path_of(inference_id) + "/result") as answer:
        while piece := _read_piece(answer):
            yield piece
        if answer.length:  # http.client does not raise if a body is read in pieces
            raise AdminError(f"the result broke off, {answer.length} bytes before its end; fetch it again")


def _read_piece(answer: HTTPResponse) -> bytes:
    try:
        return answer.read(PIECE_BYTES)
    except (OSError, HTTPException) as error:
        raise AdminError(f"the result broke off ({error}); fetch it again") from error


@contextmanager
def open_output(path: Path | None) -> Iterator[IO[bytes]]:
    """Open a file, or standard output if path is None. Raises OSError.

    A new file, or one that replaces a regular file, gets its name at the end of the block, unless the block raises.
    """
    if path is None or (path.exists() and not path.is_file()):  # a pipe or a device has no end
        with click.open_file("-" if path is None else str(path), "wb") as stream:
            yield stream
        return
    with whole_file(path) as file:
        yield file


def path_of(inference_id: str) -> str:
    """Return a request's path in the admin plane."""
    return f"{PATH}/{quote(inference_id, safe='')}"


def describe_list(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a list."""
    yield f"{found['endpoint']}: {found['waiting']} waiting, {found['running']} running"
    for each in found["requests"]:
        age_s = max(0.0, time.time() - each["received_at"])
        yield f"{each['inference_id']:<38} {each['state']:<10} {age_s:8.0f} s  {plain(each['reason'])[:60]}".rstrip()


def describe_status(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of one request."""
    for key in ("inference_id", "endpoint", "state", "reason", "attempts", "instance", "input_location"):
        if found.get(key):
            yield f"{key}: {plain(str(found[key]))}"
    yield f"output_location: {found['output_location']}"
    yield f"failure_location: {found['failure_location']}"
