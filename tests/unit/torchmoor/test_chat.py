"""`torchmoor chat` and boto3's real client against a small stand-in for the proxy, on a loopback socket."""

import base64
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.config import Config
from click.testing import CliRunner, Result

from tests.http_servers import QuietHandler, serve_http
from torchmoor.cli.conversation import ChatError, image_reference
from torchmoor.cli.main import main
from torchmoor.clients.signing import Login, Signer, make_client
from torchmoor.proxy.http.eventstream import exception, payload_part

# boto3's client is never closed, so its pooled connections are noticed when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SESSION = "ts-seq-abc"
PNG = b"\x89PNG not really"


@dataclass
class Runtime:
    """The requests that the stand-in received, and its scripted answers."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=lambda: [b"a red ", b"circle"])
    error: tuple[int, dict[str, Any]] | None = None  # answered to questions
    ending: bytes = b""  # sent after the parts
    breaks: bool = False  # the connection ends in mid-stream


class Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    runtime: Runtime

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.runtime.bodies.append(body)
        self.runtime.sessions.append(self.headers["X-Amzn-SageMaker-Session-Id"])
        if body.get("type") == "start_session" or body.get("requestType") == "NEW_SESSION":
            expiring = f"{SESSION}; Expires=2030-01-01T00:00:00Z"
            self.answer(200, {"session_id": SESSION}, {"X-Amzn-SageMaker-New-Session-Id": expiring})
        elif body["type"] == "close_session":
            self.answer(200, {"success": True}, {"X-Amzn-SageMaker-Closed-Session-Id": SESSION})
        elif self.runtime.error is not None:
            self.answer(*self.runtime.error, {"x-amzn-ErrorType": "ModelError"})
        else:
            self.stream()

    def answer(self, status: int, body: dict[str, Any], headers: dict[str, str]) -> None:
        self.reply(status, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/vnd.amazon.eventstream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for data in [*map(payload_part, self.runtime.parts), self.runtime.ending]:
            if data:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        if self.runtime.breaks:
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client may leave whenever it likes
            super().handle()


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """Collect the connections while this module's filter applies; once, because it takes a second."""
    yield
    gc.collect()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """Yield the stand-in, with an environment without any AWS configuration."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    made = Runtime()
    with serve_http(type("Bound", (Handler,), {"runtime": made})) as made.url:
        yield made


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """Make a file that is never decoded here."""
    path = tmp_path / "picture.png"
    path.write_bytes(PNG)
    return path


def chat(runtime: Runtime, picture: object, *arguments: str, typed: str = "") -> Result:
    command = ["chat", str(picture), "--url", runtime.url, *arguments]
    return CliRunner().invoke(main, command, input=typed)


def kinds(runtime: Runtime) -> list[str]:
    return [body["type"] for body in runtime.bodies]


def test_questions_are_asked_in_one_session_that_is_closed(runtime: Runtime, picture: Path) -> None:
    """The image is sent once, with the opening; standard output has the answers only."""
    result = chat(runtime, picture, "--ask", "What color?", "--ask", "Where?")

    assert result.exit_code == 0, result.stderr
    assert result.stdout == "a red circle\na red circle\n"
    assert kinds(runtime) == ["start_session", "send_text_prompt", "send_text_prompt", "close_session"]
    assert runtime.sessions == ["NEW_SESSION", SESSION, SESSION, SESSION]
    assert [body["prompt_text"] for body in runtime.bodies[1:3]] == ["What color?", "Where?"]
    image = runtime.bodies[0]["image"]
    assert image.startswith("data:image/png;base64,")
    assert base64.b64decode(image.partition(",")[2]) == PNG
    assert not any("image" in body or "images" in body for body in runtime.bodies[1:])


def test_a_character_cut_in_two_is_put_together(runtime: Runtime, picture: Path) -> None:
    whole = "größer 🟥".encode()
    runtime.parts = [whole[i : i + 1] for i in range(len(whole))]

    result = chat(runtime, picture, "--ask", "?")

    assert result.stdout == "größer 🟥\n"


def test_bytes_that_are_not_text_do_not_end_the_command(runtime: Runtime, picture: Path) -> None:
    """A third-party handler may send any bytes, and end within a character."""
    runtime.parts = [b"a \xff red ", "ë".encode()[:1]]

    result = chat(runtime, picture, "--ask", "Where?")

    assert result.exit_code == 0, result.stderr
    assert result.stdout == "a \ufffd red \ufffd\n"


def test_json_is_one_object_a_line(runtime: Runtime, picture: Path) -> None:
    """With JSON output, each line has the question, the answer and the time to its first piece."""
    result = chat(runtime, picture, "--ask", "What color?", "--json")

    (line,) = result.stdout.splitlines()
    said = json.loads(line)
    assert said["question"] == "What color?"
    assert said["answer"] == "a red circle"
    assert said["ttft_ms"] > 0


def test_a_conversation_can_come_through_a_pipe(runtime: Runtime, picture: Path, tmp_path: Path) -> None:
    """Each line of a pipe is a question.

    /image adds an image to the next one, and /quit or the end of input ends it.
    """
    other = tmp_path / "other.png"
    other.write_bytes(PNG)

    result = chat(runtime, picture, typed=f"one\n\n/image {other}\ntwo\nthree\n/quit\nfour\n")

    assert result.exit_code == 0, result.stderr
    asked = runtime.bodies[1:-1]
    assert [body["prompt_text"] for body in asked] == ["one", "two", "three"]
    assert [len(body.get("images", [])) for body in asked] == [0, 1, 0]
    assert kinds(runtime)[-1] == "close_session"


def test_help_is_not_a_question(runtime: Runtime, picture: Path) -> None:
    """/help prints the commands of the conversation."""
    result = chat(runtime, picture, typed="/help\n")

    assert "/image PATH" in result.stderr
    assert [kind for kind in kinds(runtime) if kind == "send_text_prompt"] == []


def test_an_address_is_passed_on_and_not_fetched(runtime: Runtime) -> None:
    """An address of an image is sent to the handler, which checks and fetches it."""
    chat(runtime, "https://example.com/a.png", "--ask", "?")

    assert runtime.bodies[0]["image"] == "https://example.com/a.png"


def test_a_missing_file_is_an_error_that_names_it(runtime: Runtime) -> None:
    """A missing file is reported by name before any request is sent."""
    result = chat(runtime, "/nonexistent/a.png", "--ask", "?")

    assert result.exit_code == 1
    assert result.stderr == "Error: cannot read /nonexistent/a.png: No such file or directory\n"
    assert runtime.bodies == []


def test_the_models_own_words_are_shown(runtime: Runtime, picture: Path) -> None:
    """The text in the handler's JSON, which ModelError wraps twice, is shown alone, and the session is closed."""
    original = json.dumps({"error": {"code": "ContextTooLong", "message": "the conversation is full"}})
    runtime.error = (424, {"Message": "Received client error (400)", "OriginalMessage": original})

    result = chat(runtime, picture, "--ask", "?")

    assert result.exit_code == 1
    assert result.stderr == "Error: the conversation is full\n"
    assert kinds(runtime)[-1] == "close_session"


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"ending": bytes(64)}, 1, "Error: the answer's event stream is damaged"),
        ({"ending": exception("ModelStreamError", "the instance died", "StreamBroken")}, 1, "the instance died"),
        ({"breaks": True}, 1, "Error: the connection was lost"),
        ({"url": "http://127.0.0.1:1"}, 3, "torchmoor up"),
        ({"url": "localhost 8080"}, 2, "localhost 8080"),
    ],
    ids=["damaged stream", "error in mid-stream", "connection lost in mid-stream", "no proxy", "no address"],
)
def test_a_failure_is_a_readable_error(
    runtime: Runtime, picture: Path, changes: dict[str, Any], status: int, said: str
) -> None:
    """A partial answer does not look whole. Without a proxy, the error asks whether it is running."""
    for name, value in changes.items():
        setattr(runtime, name, value)

    result = chat(runtime, picture, "--ask", "?")

    assert result.exit_code == status
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    if status == 1:  # a session is open
        assert result.stderr.startswith("Error: ")
        assert kinds(runtime)[-1] == "close_session"


def test_an_error_in_a_conversation_does_not_end_it(runtime: Runtime, picture: Path) -> None:
    """An error does not end a conversation; without a terminal, the exit status is 1 if any question failed."""
    runtime.error = (424, {"Message": "busy"})

    result = chat(runtime, picture, typed="one\ntwo\n")

    assert result.exit_code == 1
    assert result.stderr.count("Error: busy") == 2
    assert kinds(runtime)[-1] == "close_session"


def test_a_session_can_be_named_where_other_users_cannot_read_it(
    runtime: Runtime, picture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session id, which is a credential, may be in TORCHMOOR_SESSION, because others can read command lines."""
    monkeypatch.setenv("TORCHMOOR_SESSION", SESSION)

    result = chat(runtime, picture, "--ask", "And that?")

    assert result.exit_code == 0, result.stderr
    assert kinds(runtime) == ["send_text_prompt", "close_session"]
    assert runtime.sessions == [SESSION, SESSION]


@pytest.mark.parametrize("command", [("ask", "-"), ("chat",)], ids=" ".join)
def test_a_closed_standard_input_is_told(
    runtime: Runtime, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed standard input, as from a service manager or `<&-`, is an error before a session is opened."""
    module = import_module(f"torchmoor.cli.commands.{command[0]}")
    monkeypatch.setattr(module, "sys", SimpleNamespace(stdin=None))

    result = CliRunner().invoke(main, [*command, "--url", runtime.url])

    assert result.exit_code == 2
    assert "standard input is closed" in result.stderr
    assert runtime.bodies == []


@pytest.mark.parametrize("question", ["", " \n", "-"])
def test_an_empty_question_is_an_error_before_a_session_is_opened(runtime: Runtime, question: str) -> None:
    """An argument that is empty, as from an unset variable, has the same error as an empty standard input."""
    result = CliRunner().invoke(main, ["ask", question, "--url", runtime.url], input="\n")

    assert result.exit_code == 2
    assert "the question is empty" in result.stderr
    assert runtime.bodies == []


@pytest.mark.parametrize("command", [("ask", "-"), ("chat",)], ids=" ".join)
def test_standard_input_that_is_not_text_is_told(runtime: Runtime, command: tuple[str, ...]) -> None:
    """Standard input that is not text, such as Latin-1, is an error, and no session stays open."""
    result = CliRunner().invoke(main, [*command, "--url", runtime.url], input=b"caf\xe9\n")

    assert result.exit_code == 1
    assert result.stderr.startswith("Error: standard input is not text in UTF-8")
    assert [body.get("type") for body in runtime.bodies] in ([], [None, "close_session"])


@pytest.mark.parametrize("arguments", [("ask", "caf\udce9"), ("ask", "hi", "--system", "caf\udce9"), ("chat",)])
def test_bytes_that_python_has_decoded_to_surrogates_are_told(runtime: Runtime, arguments: tuple[str, ...]) -> None:
    """Surrogates, to which Python decodes invalid bytes in arguments and in locale C, are an error."""
    if "chat" in arguments:
        program = [sys.executable, "-m", "torchmoor", "chat", "--url", runtime.url]
        environment = {**os.environ, "LC_ALL": "C"}
        done = subprocess.run(program, input=b"caf\xe9\nhi\n", capture_output=True, env=environment)
        status, errors = done.returncode, done.stderr.decode()
        assert runtime.bodies[1]["prompt_text"] == "hi"
    else:
        result = CliRunner().invoke(main, [*arguments, "--url", runtime.url])
        status, errors = result.exit_code, result.stderr

    assert status == 1
    assert errors.startswith("Error: 'caf\\udce9' is not text in UTF-8: convert it first")


def presigned(client: Any) -> str:
    """Return a URL that the client has signed. Fails without credentials."""
    return client.generate_presigned_url("invoke_endpoint", Params={"EndpointName": "llava", "Body": b""})


def test_a_user_without_credentials_or_region_gets_a_client(runtime: Runtime) -> None:
    client = make_client(runtime.url, Login(), Config())

    assert client.meta.region_name == "us-east-1"
    assert "X-Amz-Credential=" in presigned(client)


def test_a_users_own_credentials_and_region_are_kept(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own credentials and region are used, for a proxy that checks signatures."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAMINE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")

    client = make_client(runtime.url, Login(), Config())
    signed = Signer(Login()).sign("GET", runtime.url, {})

    assert client.meta.region_name == "eu-west-1"
    assert "X-Amz-Credential=AKIAMINE" in presigned(client)
    assert "Credential=AKIAMINE/" in signed["Authorization"]
    assert "/eu-west-1/sagemaker/" in signed["Authorization"]


@pytest.mark.parametrize("name", ["~no-such-user/a.png", "a\0.png", "/usr"])
def test_a_name_that_is_not_an_images_is_a_readable_error(name: str) -> None:
    """It does not end the conversation."""
    with pytest.raises(ChatError, match="cannot read"):
        image_reference(name)


def test_a_conversation_needs_no_image(runtime: Runtime) -> None:
    """A conversation may have no image, as with text models."""
    command = ["chat", "--endpoint", "llm", "--url", runtime.url, "--ask", "hello"]

    result = CliRunner().invoke(main, command)

    assert result.exit_code == 0, result.stderr
    assert result.stdout == "a red circle\n"
    assert runtime.bodies[0] == {"requestType": "NEW_SESSION"}
