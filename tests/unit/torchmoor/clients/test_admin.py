"""The admin plane's client against another service that answers with JSON."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from click.testing import CliRunner

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


class AnswersAll(BaseHTTPRequestHandler):
    """Another service, which answers every request with an empty object."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def other_url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), AnswersAll) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_another_service_is_not_taken_for_the_admin_plane(command: list[str], other_url: str) -> None:
    """Each command fails with one line that names the address, without reporting success."""
    done = CliRunner().invoke(main, [*command, "--admin-url", other_url])

    assert done.exit_code != 0
    assert f"{other_url} does not answer as an admin plane does" in done.output
