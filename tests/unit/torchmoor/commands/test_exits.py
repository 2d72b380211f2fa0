"""Exit statuses and interrupted commands, against a fake admin plane."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, ClassVar

import pytest
from click.testing import CliRunner

from tests.http_servers import QuietHandler, serve_http
from torchmoor.cli.main import main

ROOT = Path(__file__).parents[4]
COMMAND = (sys.executable, "-m", "torchmoor")
REMEDY = " (give --keys FILE, or set TORCHMOOR_TOKEN: docs/access.md)"
ROW = {"name": "llava-0", "endpoint": "llava", "state": "ready", "outstanding": 0, "capacity": 8, "status": None}


class Admin(QuietHandler):
    """Answers everything alike."""

    status = 200
    body: object = {"instances": [ROW]}
    headers_sent: ClassVar[dict[str, str]] = {}
    tokens: ClassVar[list[str]] = []  # the tokens that requests to all servers of this class had

    def do_GET(self) -> None:
        self.tokens.append(self.headers.get("Authorization", ""))
        self.reply(self.status, json.dumps(self.body).encode(), self.headers_sent)

    do_POST = do_GET


def run_admin(status: int = 200, body: object = None, **headers: str) -> AbstractContextManager[str]:
    return serve_http(type("Bound", (Admin,), {"status": status, "body": body or Admin.body, "headers_sent": headers}))


def run(
    *command: str, stdout: int | IO[str] = subprocess.PIPE, stderr: int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdout=stdout,
        stderr=stderr,
        text=True,
        cwd=ROOT,
        timeout=60,
        env={**os.environ, **environment},
    )


@contextmanager
def watching(url: str) -> Iterator[subprocess.Popen[str]]:
    """Run `torchmoor instances --watch`, which does not end by itself."""
    with subprocess.Popen(
        [*COMMAND, "instances", "--watch", "0.1", "--admin-url", url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1"},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_reader_that_has_gone_ends_a_command_quietly() -> None:
    """If its reader ends, as with `| head -1`, a command exits with 141, like other programs, and prints no error."""
    with run_admin() as url, watching(url) as process:
        assert process.stdout.readline().startswith("NAME")

        process.stdout.close()

        assert process.wait(30) == 141
        assert process.stderr.read() == ""


@pytest.mark.parametrize("arguments", [("instances",), ("--help",), ("--version",)], ids=" ".join)
def test_an_output_that_cannot_be_written_is_told(arguments: tuple[str, ...]) -> None:
    """A full disk gives a one-line error without a stack trace."""
    with run_admin() as url, open("/dev/full", "w") as full:
        ended = run(*COMMAND, *arguments, stdout=full, TORCHMOOR_ADMIN_URL=url)

    assert ended.returncode == 1
    assert ended.stderr == "Error: the output cannot be written: No space left on device\n"


def test_help_that_is_not_read_ends_quietly() -> None:
    """`torchmoor --help | true` prints no error."""
    reading, writing = os.pipe()
    os.close(reading)
    ended = run(*COMMAND, "--help", stdout=writing)
    os.close(writing)

    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_failure(closed: str) -> None:
    """A command works with closed standard streams, as a daemon may inherit them."""
    with run_admin() as url:
        ended = run("sh", "-c", f'"$@" {closed}', "sh", *COMMAND, "instances", TORCHMOOR_ADMIN_URL=url)

    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_answer_that_breaks_off_is_told() -> None:
    """A truncated answer is reported as a lost connection, not as an answer of another service."""
    with run_admin(200, **{"Content-Length": "1000"}) as url:
        result = CliRunner().invoke(main, ["instances", "--admin-url", url])

    assert result.exit_code == 3
    assert f"the answer of the admin plane at {url} broke off" in result.stderr


def test_ctrl_c_is_no_failure_to_explain() -> None:
    """Ctrl-C exits with 130 and no stack trace."""
    with run_admin() as url, watching(url) as process:
        process.stdout.readline()

        process.send_signal(signal.SIGINT)

        assert process.wait(30) == 130
        assert process.stderr.read().strip() == ""


@pytest.mark.parametrize(
    ("status", "body", "exit_status", "said"),
    [
        (401, {"error": "no token"}, 4, "set TORCHMOOR_ADMIN_TOKEN"),
        (403, {"error": "not from here"}, 4, "not from here"),
        (404, {"error": "there is no such thing"}, 1, "there is no such thing"),
        (502, "<html>", 1, "status 502"),
        (200, "<html>", 1, "is it the runtime's port?"),
        (409, {"model": "m", "instances": [{"instance": "a", "error": "busy"}]}, 1, "a: busy"),
    ],
)
def test_a_refusal_says_what_to_do(status: int, body: object, exit_status: int, said: str) -> None:
    """A refusal prints one line with advice and has its own exit status."""
    with run_admin(status, body) as url:
        result = CliRunner().invoke(main, ["models", "pin", "m", "--admin-url", url])

    assert result.exit_code == exit_status
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert said in result.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("sessions", "list", "--admin-url", "http://127.0.0.1:9"), 3, "http://127.0.0.1:9"),
        (("sessions", "close", os.fsdecode(b"caf\xe9")), 1, "Error: 'caf\\udce9' is not text in UTF-8\n"),
        (("package", "x" * 300), 1, "Error: there is no directory xxx"),
        (("instances", "--admin-url", "127.0.0.1:9080"), 2, "must begin with http"),
    ],
    ids=["no server", "not text", "a long name", "no address"],
)
def test_a_mistake_has_its_status_and_its_words(arguments: tuple[str, ...], status: int, said: str) -> None:
    """An address without a server has a status of its own."""
    result = CliRunner().invoke(main, arguments)

    assert result.exit_code == status
    assert said in result.stderr


def test_an_output_of_another_encoding_is_told() -> None:
    """An output encoding that cannot represent the text is an error with advice."""
    with run_admin(200, {"instances": [{**ROW, "endpoint": "€"}]}) as url:
        ended = run(*COMMAND, "instances", "--admin-url", url, PYTHONIOENCODING="iso-8859-1")

    assert ended.returncode == 1
    assert "cannot be written in latin-1: select a locale of UTF-8" in ended.stderr


@pytest.mark.parametrize("option", ["--session", "--adapter"])
@pytest.mark.parametrize("value", [os.fsdecode(b"caf\xe9"), "\u2192", "a\nb"])
def test_a_name_that_no_header_can_have_is_told(option: str, value: str) -> None:
    """A name that cannot be a header value is refused before boto3 raises its own exception."""
    result = CliRunner().invoke(main, ["ask", "x", option, value, "--url", "http://127.0.0.1:9"])

    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.stderr
    assert f"{value!r} has a character that is not printable ASCII" in result.stderr


@pytest.mark.parametrize("address", ["ftp://x", "http://", "http://x:y", "nonsense"])
@pytest.mark.parametrize("command", [("bench", "--requests", "1"), ("ask", "?"), ("chat",), ("doctor",)], ids=" ".join)
def test_a_runtime_address_that_is_none_is_told(command: tuple[str, ...], address: str) -> None:
    """The command exits with status 2 before it tries to connect."""
    result = CliRunner().invoke(main, [*command, "--url", address])

    assert result.exit_code == 2
    assert "must begin with http" in result.stderr


@pytest.mark.parametrize("word", ["nan", "inf"])
@pytest.mark.parametrize(
    "command",
    [
        *(("bench", "--duration"), ("bench", "--rate"), ("bench", "--timeout"), ("drain", "a", "--timeout")),
        *(("instances", "--watch"), ("ask", "?", "--temperature"), ("up", "--max-hold"), ("up", "--start-timeout")),
    ],
    ids=" ".join,
)
def test_a_word_for_no_number_is_no_number(command: tuple[str, ...], word: str) -> None:
    """A load of nan seconds is refused, because it would never end."""
    result = CliRunner().invoke(main, [*command, word])

    assert result.exit_code == 2
    assert "is not a finite number" in result.stderr


def test_an_instance_that_refuses_is_in_the_exit_status() -> None:
    rows = [{"instance": "a", "status": 200, "tier": "host"}, {"instance": "b", "status": 507, "error": "no room"}]
    with run_admin(200, {"model": "m", "instances": rows}) as url:
        result = CliRunner().invoke(main, ["models", "pin", "m", "--admin-url", url])

    assert result.exit_code == 1
    assert "a: m is in host memory" in result.stdout
    assert "b: no room" in result.stderr


@pytest.mark.parametrize(
    ("tier", "place"),
    [
        ("device", "is in device memory"),
        ("loading", "is being loaded"),
        ("leaving", "is being removed from memory"),
        ("disk", "is not in memory"),
        ("source", "is not in memory"),
        (None, "is not in memory"),
    ],
)
def test_an_action_says_where_the_model_is(tier: str | None, place: str) -> None:
    with run_admin(200, {"model": "m", "instances": [{"instance": "a", "status": 200, "tier": tier}]}) as url:
        result = CliRunner().invoke(main, ["models", "unload", "m", "--admin-url", url])

    assert (result.exit_code, result.stdout) == (0, f"a: m {place}\n")


def test_undrain_changes_nothing_if_one_is_not_drained() -> None:
    """If one of the instances is not drained, undrain changes none of them."""
    rows = [{**ROW, "is_drained": True}, {**ROW, "name": "llava-1", "is_drained": False}]
    with run_admin(200, {"instances": rows}) as url:
        result = CliRunner().invoke(main, ["undrain", "llava-0", "llava-1", "--admin-url", url])

    assert result.exit_code == 1
    assert "Instance 'llava-1' is not drained: nothing to undrain. Nothing was changed." in result.stderr


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        ("UnrecognizedClientException", REMEDY),
        ("MissingAuthenticationTokenException", REMEDY),
        ("InvalidSignatureException", ""),
    ],
)
def test_refused_credentials_say_what_to_give(code: str, remedy: str) -> None:
    """The endpoint's message is AWS's; the command adds its own option and variable.

    That of a signature has its own reason, such as the clock or the region, which other keys do not change.
    """
    with run_admin(403, {"message": "AWS's words."}, **{"x-amzn-ErrorType": code}) as url:
        result = CliRunner().invoke(main, ["ask", "hi", "--url", url])

    assert result.exit_code == 4
    assert result.stderr == f"Error: AWS's words.{remedy}\n"


@pytest.mark.parametrize("status", [404, 405])
def test_a_port_that_is_not_the_runtimes_is_told(status: int) -> None:
    """A port that is not the runtime's, such as the admin plane's, gives an error in place of boto3's."""
    with run_admin(status, {"error": "Not found."}) as url:
        result = CliRunner().invoke(main, ["ask", "Hello", "--url", url])

    assert result.exit_code == 1
    assert f"status {status}" in result.stderr
    assert "is this the runtime's address and port?" in result.stderr


def test_a_file_of_keys_counts_more_than_the_environment(tmp_path: Path) -> None:
    """A key file takes precedence, so that one fleet does not get another's token from the environment."""
    keys = tmp_path / "keys.txt"
    keys.write_text("admin of-this-fleet-alone\n")
    keys.chmod(0o600)
    Admin.tokens.clear()

    with run_admin() as url:
        for more in ((), ("--keys", str(keys))):
            command = ["instances", "--admin-url", url, *more]
            result = CliRunner().invoke(main, command, env={"TORCHMOOR_ADMIN_TOKEN": "of-another"})
            assert result.exit_code == 0, result.stderr

    assert Admin.tokens == ["Bearer of-another", "Bearer of-this-fleet-alone"]


def test_a_token_is_not_taken_elsewhere() -> None:
    """A redirect is not followed, because its target would receive the token."""
    Admin.tokens.clear()

    with run_admin() as elsewhere, run_admin(302, "moved", Location=elsewhere) as url:
        environment = {"TORCHMOOR_ADMIN_TOKEN": "of-this-fleet"}
        result = CliRunner().invoke(main, ["drain", "a", "--admin-url", url], env=environment)

    assert result.exit_code == 1
    assert "status 302" in result.stderr
    assert Admin.tokens == ["Bearer of-this-fleet"]


@pytest.mark.parametrize("token", ["a\nb", "a b", "€"])
@pytest.mark.parametrize(
    ("command", "name"),
    [(("instances",), "TORCHMOOR_ADMIN_TOKEN"), (("ask", "?"), "TORCHMOOR_TOKEN"), (("bench",), "TORCHMOOR_TOKEN")],
    ids=["instances", "ask", "bench"],
)
def test_a_token_that_cannot_be_sent_is_told(command: tuple[str, ...], name: str, token: str) -> None:
    """The error names the variable without its value and does not report an unreachable address."""
    result = CliRunner().invoke(main, command, env={name: token, "TORCHMOOR_KEYS_FILE": ""})

    assert result.exit_code == 1
    assert result.stderr == f"Error: {name} must be of visible ASCII characters alone\n"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("AWS_PROFILE", "nobody", "(nobody)"), ("AWS_CA_BUNDLE", "/nonexistent", "/nonexistent")],
)
def test_what_boto3_cannot_use_is_told(name: str, value: str, said: str) -> None:
    """A missing profile or certificate bundle gives a one-line error without a stack trace."""
    environment = {name: value, "AWS_CONFIG_FILE": "/nonexistent", "TORCHMOOR_TOKEN": ""}
    result = CliRunner().invoke(main, ["bench", "--requests", "1", "--url", "http://127.0.0.1:9"], env=environment)

    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert said in result.stderr


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("admin 0123456789abcdef0123\n")
    keys.chmod(0o644)

    result = CliRunner().invoke(main, ["instances", "--keys", str(keys)])

    assert result.exit_code == 1
    assert "chmod 600" in result.stderr
    assert "0123456789" not in result.stderr


def test_a_fleet_outlives_the_reader_of_its_messages() -> None:
    """After a closed terminal or pipe, messages and log are lost; an error would end the supervision of an instance."""
    reading, writing = os.pipe()
    os.close(reading)
    program = """
import logging
from torchmoor.run.log import report, start_log
report("one")
start_log("INFO")
logging.info("two")
report("three")
logging.info("four")
print("goes on")
"""
    ended = run(sys.executable, "-c", program, stderr=writing, PYTHONUNBUFFERED="")
    os.close(writing)

    assert (ended.returncode, ended.stdout) == (0, "goes on\n")


def test_a_fleet_without_standard_output_announces_nothing() -> None:
    """Programs that start others in the background may close standard output before."""
    program = """
from torchmoor.run.log import announcer, report
announcer()("{}")
report("goes on")
"""
    ended = run("bash", "-c", 'exec "$0" -c "$1" >&-', sys.executable, program)

    assert (ended.returncode, ended.stderr) == (0, "torchmoor: goes on\n")
