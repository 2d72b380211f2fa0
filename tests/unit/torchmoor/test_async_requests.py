"""`torchmoor async` against a scripted admin plane."""

import os
import socket
import struct
import threading
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.http_servers import QuietHandler, serve_http
from torchmoor.cli.commands.async_ import describe_list, describe_status, open_output, read_result
from torchmoor.cli.main import main
from torchmoor.clients.admin import AdminClient
from torchmoor.clients.errors import AdminError


class WatchedClient(AdminClient):
    """Signals when it has the beginning of an answer."""

    has_answer = threading.Event()

    def open(self, *arguments: Any, **more: Any) -> HTTPResponse:
        answer = super().open(*arguments, **more)
        self.has_answer.set()
        return answer


class BreaksOff(QuietHandler):
    """Promises more of an answer than it sends. /async-requests/reset resets the connection, /failed has an error."""

    def do_GET(self) -> None:
        self.reply(500 if self.path == "/failed" else 200, b"x" * 60, {"Content-Length": "100"})
        if self.path.endswith("/reset/result"):
            assert WatchedClient.has_answer.wait(60)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.connection.close()


@pytest.fixture
def admin_url() -> Iterator[str]:
    with serve_http(BreaksOff) as url:
        yield url


def test_a_result_that_breaks_off_is_no_result(admin_url: str) -> None:
    """A truncated result is an error, so that a file that is too short does not pass for the answer."""
    pieces = read_result(AdminClient(admin_url), "one")

    assert next(pieces) == b"x" * 60
    with pytest.raises(AdminError, match="40 bytes before its end"):
        next(pieces)


@pytest.mark.parametrize("has_earlier", [True, False])
def test_a_result_that_breaks_off_leaves_no_file(admin_url: str, tmp_path: Path, has_earlier: bool) -> None:
    """A truncated result neither passes for the answer nor replaces an earlier file."""
    output = tmp_path / "answer.json"
    if has_earlier:
        output.write_text("earlier")

    result = CliRunner().invoke(main, ["async", "get", "one", "-o", str(output), "--admin-url", admin_url])

    assert result.exit_code == 1
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("answer.json", "earlier")] * has_earlier


@pytest.mark.parametrize("is_link", [True, False])
def test_a_whole_result_replaces_a_file_with_its_permissions(tmp_path: Path, is_link: bool) -> None:
    """A link still points to its file, and a file of its owner alone stays so."""
    output = target = tmp_path / "answer.json"
    target.touch(mode=0o600)
    if is_link:
        output = tmp_path / "link"
        output.symlink_to(target)

    with open_output(output) as file:
        file.write(b"answer")
        assert target.read_bytes() == b""

    assert (output.is_symlink(), target.read_bytes(), target.stat().st_mode & 0o777) == (is_link, b"answer", 0o600)


@pytest.mark.parametrize("name", ["a" * 255, "é" * 127], ids=["ASCII", "UTF-8"])
def test_a_file_may_have_the_longest_name(tmp_path: Path, name: str) -> None:
    """The name of the incomplete file does not grow with the file's, which may have 255 bytes."""
    with open_output(tmp_path / name) as file:
        file.write(b"answer")

    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(name, b"answer")]


def test_an_incomplete_result_is_never_open_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader who opened the incomplete file before its permissions were set would see what is written later."""
    output = tmp_path / "answer.json"
    output.touch(mode=0o600)
    modes: list[int] = []
    chmod = Path.chmod

    def note(path: Path, mode: int) -> None:
        modes.append(path.stat().st_mode & 0o777)
        chmod(path, mode)

    monkeypatch.setattr(Path, "chmod", note)
    with open_output(output) as file:
        file.write(b"answer")

    assert modes == [0o600]


def test_a_link_to_itself_is_replaced(tmp_path: Path) -> None:
    """It leads to no file that could get the result."""
    output = tmp_path / "link"
    output.symlink_to(output)

    with open_output(output) as file:
        file.write(b"answer")

    assert (output.is_symlink(), output.read_bytes()) == (False, b"answer")


def test_a_pipe_gets_a_result_as_it_arrives(tmp_path: Path) -> None:
    """A pipe is written to, not replaced by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with open_output(pipe) as file:
            file.write(b"answer")
            file.flush()
            assert os.read(reader, 100) == b"answer"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_connection_that_is_reset_ends_the_result(admin_url: str) -> None:
    """A reset connection is reported as such, without a traceback and not as an error of the output file."""
    with pytest.raises(AdminError, match=r"the result broke off \(.*reset.*\); fetch it again"):
        list(read_result(WatchedClient(admin_url), "reset"))


def test_an_error_that_breaks_off_is_an_error(admin_url: str) -> None:
    """A truncated error body still gives an error with its status."""
    with pytest.raises(AdminError, match="answers with status 500"):
        AdminClient(admin_url).open("GET", "/failed")


def test_a_terminal_obeys_no_reason_of_a_failure() -> None:
    """Control characters in a failure's reason, which may be model output, are not sent to the terminal."""
    words = "a\x1b]52;c;AAAA\x07b\nc"
    told = {"endpoint": "llava", "waiting": 0, "running": 0}
    row = {"inference_id": "i", "state": "FAILED", "received_at": 0.0, "reason": words}
    status = {**row, "output_location": "o", "failure_location": "f"}

    for lines in (describe_list({**told, "requests": [row]}), describe_status(status)):
        text = list(lines)
        assert any("a ]52;c;AAAA b c" in line for line in text)
        assert all(line.isprintable() for line in text)
