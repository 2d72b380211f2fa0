"""`torchmoor async` against an admin plane that a test plays."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from torchmoor.cli.async_requests import describe_list, describe_status, read_result
from torchmoor.clients.admin import AdminClient
from torchmoor.clients.errors import AdminError


class BreaksOff(BaseHTTPRequestHandler):
    """Promises more of a result than it sends."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "100")
        self.end_headers()
        self.wfile.write(b"x" * 60)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def admin_url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), BreaksOff) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_result_that_breaks_off_is_no_result(admin_url: str) -> None:
    """A file that is too short must not pass for the answer."""
    pieces = read_result(AdminClient(admin_url), "one")

    assert next(pieces) == b"x" * 60
    with pytest.raises(AdminError, match="40 bytes before its end"):
        next(pieces)


def test_a_terminal_obeys_no_reason_of_a_failure() -> None:
    """It may have the words of a model that was asked to say them."""
    words = "a\x1b]52;c;AAAA\x07b\nc"
    told = {"endpoint": "llava", "waiting": 0, "running": 0}
    row = {"inference_id": "i", "state": "FAILED", "received_at": 0.0, "reason": words}
    status = {**row, "output_location": "o", "failure_location": "f"}

    for lines in (describe_list({**told, "requests": [row]}), describe_status(status)):
        text = list(lines)
        assert any("a ]52;c;AAAA b c" in line for line in text)
        assert all(line.isprintable() for line in text)
