"""Asynchronous requests through the admin plane, for `torchmoor async`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import click

from torchmoor.cli.tables import plain
from torchmoor.clients.admin import AdminClient
from torchmoor.clients.errors import AdminError
from torchmoor.fleet.archives import whole_file

PIECE_BYTES = 1 << 20
PATH = "/async-requests"


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
