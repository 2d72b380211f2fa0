"""The admin plane's client against another service that answers with JSON."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from tests.http_servers import QuietHandler, serve_http
from torchmoor.cli.main import main

COMMANDS = (
    ["instances"],
    ["sessions", "list"],
    ["sessions", "close", "da68e24be4b32f04"],
    ["models", "list"],
    ["models", "pin", "m"],
    ["drain", "llava-0"],
    ["async", "list", "--endpoint", "llava"],
    ["async", "status", "one"],
    ["async", "cancel", "one"],
)


class AnswersAll(QuietHandler):
    """Another service, which answers every request with an empty object."""

    def do_GET(self) -> None:
        self.reply(200, b"{}")

    do_POST = do_GET


@pytest.fixture(scope="module")
def other_url() -> Iterator[str]:
    with serve_http(AnswersAll) as url:
        yield url


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_another_service_is_not_taken_for_the_admin_plane(command: list[str], other_url: str) -> None:
    """Each command fails with one line that names the address, without reporting success."""
    done = CliRunner().invoke(main, [*command, "--admin-url", other_url])

    assert done.exit_code != 0
    assert f"{other_url} does not answer as an admin plane does" in done.output
