"""The commands with a real proxy, its admin plane and fake instances."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.http_servers import QuietHandler, serve_http
from tests.proxy.conftest import MakeStage, Stage, make_session_id
from tests.proxy.fake_chat import FakeChat
from tests.proxy.fake_instance import Gate, Received, Wire, answering, refusing, streaming
from tests.proxy.fake_many import FakeMany
from tests.waiting import DEADLINE_S, wait_until
from torchmoor.cli.main import main
from torchmoor.cli.running_fleets import recorded
from torchmoor.config.credentials import AccessKey, Credentials
from torchmoor.config.routing import EndpointSettings, MultiModelSettings, VariantSettings
from torchmoor.proxy.instances.instance import InstanceState

# boto3's client is never closed where a command ends with an error, so its connections are noticed when collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

STATUS = {
    "sessions": {"open": 37, "max": 1024},
    "memory": {"kv_bytes": 1 << 30, "kv_capacity_bytes": 2 << 30, "host_bytes": 0, "host_capacity_bytes": 1 << 20},
}
SSE = [
    b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n',
    b'data: {"choices": [{"delta": {"content": "a red "}}]}\n\n',
    b'data: {"choices": [{"delta": {"content": "circle"}, "finish_reason": "stop"}]}\n\n',
    b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}}\n\n',
    b"data: [DONE]\n\n",
]
TGI = [
    b'data:{"token": {"id": 5, "text": "a red ", "logprob": -1, "special": false}, "generated_text": null}\n\n',
    b'data:{"token": {"id": 6, "text": "circle", "logprob": -1, "special": false}, "generated_text": "a red circle",'
    b' "details": {"finish_reason": "eos_token", "generated_tokens": 2}}\n\n',
]


@pytest.fixture(autouse=True)
def no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove all credentials of AWS and of the fleet."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "TORCHMOOR_TOKEN", "TORCHMOOR_KEYS_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def invoke(stage: Stage, *arguments: str) -> Result:
    where = {"TORCHMOOR_URL": stage.proxy.runtime_url, "TORCHMOOR_ADMIN_URL": stage.proxy.admin_url}
    return CliRunner().invoke(main, arguments, env=where)


async def converse(request: Received, wire: Wire) -> None:
    """Answer sessions and conversations without one, as the handlers do."""
    body = json.loads(request.body)
    session = make_session_id("a")
    if request.headers.get("x-amzn-sagemaker-session-id") == "NEW_SESSION":
        expiring = {"X-Amzn-SageMaker-New-Session-Id": f"{session}; Expires=2035-01-01T00:00:00Z"}
        await wire.answer(200, expiring, json.dumps({"session_id": session}).encode())
    elif body.get("type") == "close_session":
        await wire.answer(200, {"X-Amzn-SageMaker-Closed-Session-Id": session})
    elif not body.get("stream"):
        receipts = {"X-Torchmoor-Generated-Tokens": "2", "X-Torchmoor-Context-Tokens": "9"}
        whole = {"response_text": "a red circle"} if "type" in body else {"choices": [{"message": {"content": "a"}}]}
        await wire.answer(200, receipts, json.dumps(whole).encode())
    elif "messages" in body:
        await streaming(SSE, "text/event-stream")(request, wire)
    elif request.headers.get("accept") == "text/event-stream":
        await streaming(TGI, "text/event-stream")(request, wire)
    else:
        await streaming([b"a red ", b"circle"])(request, wire)


@pytest.fixture
def talking(stage: Stage) -> Stage:
    stage.a.behave = stage.b.behave = converse
    return stage


def bodies(stage: Stage) -> list[dict[str, Any]]:
    return [json.loads(received.body) for received in (*stage.a.received, *stage.b.received)]


# Instances


def test_instances_are_a_table(stage: Stage) -> None:
    """Values that an instance does not report are empty; a pipe gets no colours."""
    stage.a.on_status = answering(body=json.dumps(STATUS).encode())

    result = invoke(stage, "instances")

    head, first, second = result.stdout.splitlines()
    assert head.split() == ["NAME", "ENDPOINT", "STATE", "LOAD", "SESSIONS", "KV", "FEATURES", "HOST"]
    assert first.split() == ["a", "llava", "ready", "0/64", "37/1024", "1.0G/2.0G", "0/1.0M"]
    assert second.split() == ["b", "llava", "ready", "0/64"]
    assert len(json.loads(invoke(stage, "instances", "--json").stdout)["instances"]) == 2
    assert invoke(stage, "instances", "--endpoint", "llm").stdout == "There is no such instance.\n"


def test_instances_are_listed_by_state(stage: Stage) -> None:
    """Each --state adds its instances to the table and to the JSON."""

    async def stop_a() -> None:
        stage.registry.set_state("a", InstanceState.DOWN)

    def names(*arguments: str) -> list[str]:
        listed = json.loads(invoke(stage, "instances", "--json", *arguments).stdout)["instances"]
        _, *rows = invoke(stage, "instances", *arguments).stdout.splitlines()
        assert [row["name"] for row in listed] == [row.split()[0] for row in rows]
        return [row["name"] for row in listed]

    stage.run(stop_a())

    assert names("--state", "down") == ["a"]
    assert names("--state", "ready") == ["b"]
    assert names("--state", "DOWN", "--state", "ready") == ["a", "b"]
    assert invoke(stage, "instances", "--state", "draining").stdout == "There is no such instance.\n"
    assert "'starting', 'ready', 'draining', 'down'" in invoke(stage, "instances", "--state", "gone").output


def test_drain_waits_for_what_runs(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """`drain` prints the number of running requests and returns at zero; `undrain` puts the instance back."""
    gate = Gate()
    stage.a.behave = gate.behave
    client = stage.client()
    asking = threading.Thread(
        target=client.invoke_endpoint,
        kwargs={"EndpointName": "llava", "SessionId": make_session_id("a"), "Body": b"{}"},
    )
    asking.start()
    gate.wait_reached()

    in_time = invoke(stage, "drain", "a", "--wait", "--timeout", "0.1")
    monkeypatch.setattr("torchmoor.cli.commands.drain.sleep", lambda seconds: gate.open())
    waited = invoke(stage, "drain", "a", "--wait")
    asking.join()

    assert in_time.exit_code == 1
    assert "1 request runs there" in in_time.stderr
    assert waited.exit_code == 0
    assert "Waiting: a is draining, 1 request runs there" in waited.stderr
    assert waited.stdout == "a: draining, no requests run there\n"
    assert stage.instance("a").state is InstanceState.DRAINING
    back = invoke(stage, "undrain", "a", "--wait", "--json")
    assert json.loads(back.stdout)["instances"] == [{"name": "a", "state": "ready", "outstanding": 0}]


def test_an_unknown_instance_is_told(stage: Stage) -> None:
    """An unknown instance is an error with advice, and others do not change."""
    for command, state in (("drain", InstanceState.READY), ("undrain", InstanceState.DRAINING)):
        result = invoke(stage, command, "a", "nobody")

        assert result.exit_code == 1
        assert "There is no instance 'nobody'" in result.stderr  # prose: allow
        assert stage.instance("a").state is state
        invoke(stage, "drain", "a")


def test_the_admin_planes_token_comes_from_the_environment_or_a_file(
    make_stage: MakeStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token comes from the environment or a file; without it, the exit status is 4 with advice."""
    stage = make_stage(credentials=Credentials(admin_token="0123456789abcdef0123"))
    keys = tmp_path / "keys.txt"
    keys.write_text("admin 0123456789abcdef0123\n")
    keys.chmod(0o600)

    without = invoke(stage, "instances")
    by_file = invoke(stage, "instances", "--keys", str(keys))
    monkeypatch.setenv("TORCHMOOR_ADMIN_TOKEN", "0123456789abcdef0123")
    by_environment = invoke(stage, "instances")

    assert (without.exit_code, by_file.exit_code, by_environment.exit_code) == (4, 0, 0)
    assert "TORCHMOOR_ADMIN_TOKEN" in without.stderr


def test_a_host_that_the_admin_plane_does_not_answer_for_is_told(stage: Stage) -> None:
    """The error for a host that the admin plane refuses is the admin plane's own."""
    url = stage.proxy.admin_url.replace("127.0.0.1", "0.0.0.0")

    result = invoke(stage, "instances", "--admin-url", url)

    assert result.exit_code == 4
    assert "The admin plane does not answer for the host '0.0.0.0:" in result.stderr


def test_a_fleet_without_asynchronous_requests_says_so(stage: Stage) -> None:
    """Every command about asynchronous requests says that the fleet has none."""
    for arguments in (("list",), ("status", "one"), ("cancel", "one"), ("get", "one")):
        result = invoke(stage, "async", *arguments)

        assert result.exit_code == 1
        assert "No endpoint accepts asynchronous requests" in result.stderr


def test_an_adapter_of_an_endpoint_without_adapters_is_told(talking: Stage) -> None:
    """The error names the option that gives the endpoint adapters."""
    for command in (("ask", "What?"), ("chat", "--ask", "What?")):
        result = invoke(talking, *command, "--adapter", "mine")

        assert result.exit_code == 1
        assert result.stderr.startswith("Error: llava has no adapters: leave --adapter out")


# Models


def test_models_are_listed_pinned_and_unloaded(make_stage: MakeStage) -> None:
    stage = make_stage(multi_model=MultiModelSettings())
    for fake in stage.instances.values():
        FakeMany(fake, source={"m1", "m2"})

    pinned = invoke(stage, "models", "pin", "m1", "--instance", "a")
    listed = invoke(stage, "models", "list")
    unknown = invoke(stage, "models", "prewarm", "m9")
    unloaded = invoke(stage, "models", "unload", "m1", "--instance", "a", "--json")

    assert pinned.stdout == "a: m1 is in device memory\n"
    _, row = listed.stdout.splitlines()
    assert row.split() == ["m1", "a", "device", "1.0K", "0", "s", "ago", "1", "pinned"]
    assert unknown.exit_code == 1
    assert "there is no model m9" in unknown.stderr
    assert json.loads(unloaded.stdout)["instances"][0]["status"] == 200


def test_a_question_to_an_endpoint_with_many_models_says_what_it_is(make_stage: MakeStage) -> None:
    """The error for a question to an endpoint with many models names its kind, with and without a system message."""
    stage = make_stage(endpoints={"a": "many"}, multi_model=MultiModelSettings())

    for options in ((), ("--system", "Be brief.")):
        asked = invoke(stage, "ask", "Hello", "--endpoint", "many", *options)

        assert asked.exit_code == 1
        assert asked.stderr.startswith("Error: many is an endpoint with many models, not a chat endpoint")


def test_a_question_to_a_model_without_sessions_says_what_it_is(stage: Stage) -> None:
    """The error for a question to a model without sessions names its kind; a classifier answers any body."""
    for fake in stage.instances.values():
        fake.behave = answering(body=b'[{"label": "cat"}]')

    asked = invoke(stage, "ask", "Hello")

    assert asked.exit_code == 1
    assert asked.stderr.startswith("Error: llava is not a chat endpoint")


def test_no_endpoint_with_many_models_is_told(stage: Stage) -> None:
    """Without an endpoint with many models, a message is printed instead of an empty table."""
    assert "no endpoint has many models" in invoke(stage, "models", "list").stdout


# Sessions


def test_sessions_are_listed_and_closed(stage: Stage) -> None:
    """Sessions are listed and closed by their hashes; an unknown one is an error."""
    rows = [{"session": "00aa11bb22cc33dd", "tier": "kv", "bytes": 2048, "turns": 3, "is_pinned": True}]

    async def operate(request: Received, wire: Wire) -> None:
        body = json.loads(request.body)
        if request.headers["x-torchmoor-operation"] == "status":
            await wire.answer(body=json.dumps(STATUS).encode())
        elif "action" not in body:
            await wire.answer(body=json.dumps({"sessions": rows, "open": 1, "evicted": 5, "next": None}).encode())
        elif body["session"] == rows[0]["session"]:
            await wire.answer(body=b'{"is_running": false, "is_pinned": false}')
        else:
            await refusing(404, "SessionUnknown", "no such session")(request, wire)

    stage.a.on_operation = operate

    listed = invoke(stage, "sessions", "list", "--instance", "a")
    closed = invoke(stage, "sessions", "close", "00aa11bb22cc33dd")
    unknown = invoke(stage, "sessions", "close", "ffaa11bb22cc33dd")
    silent = invoke(stage, "sessions", "list", "--instance", "b")

    note, _, row = listed.stdout.splitlines()
    assert note == "Evicted by a: 5. An evicted session continues when it is used."
    assert row.split() == ["00aa11bb22cc33dd", "llava", "a", "kv", "2.0K", "3", "pinned"]
    assert closed.stdout == "00aa11bb22cc33dd: closed\n"
    assert unknown.exit_code == 1
    assert "ffaa11bb22cc33dd" in unknown.stderr
    assert silent.stdout == "b reports no sessions.\nNo session is open.\n"


# Questions


def test_a_system_message_comes_with_each_question_of_its_session(talking: Stage) -> None:
    """The system message is sent with each question, also in a kept session; an empty one is not sent."""
    asking = ("--ask", "one", "--ask", "two")

    result = invoke(talking, "chat", "https://example.com/a.png", "--system", "Be terse.", "--keep", *asking)
    plain = invoke(talking, "ask", "?", "--system", "")

    assert (result.exit_code, result.stdout) == (0, "a red circle\na red circle\n")
    assert plain.exit_code == 0
    asked = [body for body in bodies(talking) if "prompt_text" in body]
    assert [body.get("system") for body in asked] == ["Be terse.", "Be terse.", None]


def test_a_question_to_a_fleet_that_is_starting_is_told_what_starts(stage: Stage) -> None:
    """The error names the instances that are starting, as after a question that is asked right after `up`."""

    stage.set_state(InstanceState.STARTING)

    result = invoke(stage, "ask", "?")

    assert result.exit_code == 1
    started = r"\(a is being started.*; b is being started.*\)"
    assert re.fullmatch(rf"Error: No instance of the endpoint is ready\. Try again later\. {started}\n", result.stderr)


def test_a_session_is_kept_if_asked_for_and_closed_by_the_next(talking: Stage) -> None:
    """The id of a kept session is printed on standard error only; the next question continues it with its images."""
    kept = invoke(talking, "ask", "one", "--keep")
    session = make_session_id("a")
    on = invoke(talking, "ask", "two", "https://example.com/a.png", "--session", session)

    assert kept.stdout == on.stdout == "a red circle\n"
    assert f"--session {session}" in kept.stderr
    assert [body.get("type", body.get("requestType")) for body in bodies(talking)] == [
        *("NEW_SESSION", "send_text_prompt", "send_text_prompt", "close_session")
    ]
    assert bodies(talking)[2]["images"] == ["https://example.com/a.png"]


def test_a_question_comes_from_standard_input(talking: Stage) -> None:
    where = {"TORCHMOOR_URL": talking.proxy.runtime_url}
    result = CliRunner().invoke(main, ["ask", "-"], input="what is\nit?\n", env=where)
    empty = CliRunner().invoke(main, ["ask", "-"], input="\n", env=where)

    assert result.stdout == "a red circle\n"
    assert bodies(talking)[1]["prompt_text"] == "what is\nit?"
    assert empty.exit_code == 2


@pytest.mark.parametrize("line", ["token alice 0123456789abcdef0123", "key AKIAEXAMPLE 0123456789abcdef0123"])
def test_a_question_is_asked_with_a_token_or_a_key_of_the_file(
    make_stage: MakeStage, tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question is sent with a token or key from the file that the server has; without it, the exit status is 4."""
    secret = "0123456789abcdef0123"
    stage = make_stage(
        credentials=Credentials(keys={"AKIAEXAMPLE": AccessKey(secret=secret)}, tokens={"alice": secret})
    )
    stage.a.behave = stage.b.behave = converse
    keys = tmp_path / "keys.txt"
    keys.write_text(f"{line}\n")
    keys.chmod(0o600)

    good = invoke(stage, "ask", "?", "--system", "", "--keys", str(keys))
    without = invoke(stage, "ask", "?", "--system", "")
    monkeypatch.setenv("TORCHMOOR_TOKEN", "something-else")
    wrong = invoke(stage, "ask", "?", "--system", "")
    load = invoke(stage, "bench", "--stateless", "--requests", "2", "--users", "1", "--keys", str(keys), "--json")
    refused = invoke(stage, "bench", "--requests", "2")

    assert (good.exit_code, good.stdout) == (0, "a red circle\n")
    assert (without.exit_code, wrong.exit_code, refused.exit_code) == (4, 4, 4)
    assert json.loads(load.stdout)["completed"] == 2


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(stage: Stage) -> None:
    """Ctrl-C keeps the partial answer and continues; between two answers it ends the command."""
    talk = FakeChat(stage, gate=Gate())
    gate = talk.gate
    terminal, its_end = os.openpty()
    program = [sys.executable, "-m", "torchmoor", "chat", "--url", stage.proxy.runtime_url]
    with subprocess.Popen(program, stdin=its_end, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        os.write(terminal, b"What color?\n")
        gate.wait_reached()
        process.send_signal(signal.SIGINT)
        wait_until(lambda: "stop_answer" in [body.get("type") for body in talk.bodies], "the answer is stopped")
        os.write(terminal, b"And now?\n/quit\n")
        output, _ = process.communicate(timeout=60)
    os.close(terminal)
    os.close(its_end)

    assert process.returncode == 0
    stopped, _, whole = output.partition(b'"stop_sequence"')
    assert b"circle" in stopped
    assert b'"eos_token"' in whole, "the next question is answered"
    assert talk.asked() == ["What color?", "And now?"]
    assert talk.bodies[-1] == {"type": "close_session"}


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_obeys_no_answer(stage: Stage, is_terminal: bool, options: tuple[str, ...]) -> None:
    """On a terminal an answer has no control characters beside line breaks and tabs; in a pipe it is unchanged."""
    said = b"The \x1b]52;c;cm0=\x07circle\r\n\tis \xc2\x9b31mred."

    async def behave(request: Received, wire: Wire) -> None:
        is_question = json.loads(request.body).get("stream")
        await (streaming([said[:6], said[6:]]) if is_question else converse)(request, wire)

    stage.a.behave = stage.b.behave = behave
    program = [sys.executable, "-m", "torchmoor", "ask", "?", *options, "--url", stage.proxy.runtime_url]
    reading, writing = os.openpty() if is_terminal else os.pipe()
    subprocess.run(program, stdout=writing, check=True, timeout=DEADLINE_S)
    os.close(writing)
    with open(reading, "rb", buffering=0) as output:
        shown = b""
        with suppress(OSError):  # a terminal's end is an error
            while piece := output.read(4096):
                shown += piece

    if options:  # JSON escapes the others itself
        answer = said.decode().replace("\x9b", "") if is_terminal else said.decode()
        assert (json.loads(shown)["answer"], b"\xc2\x9b" in shown) == (answer, not is_terminal)
    else:
        assert shown == (b"The ]52;c;cm0=circle\r\n\tis 31mred.\r\n" if is_terminal else said + b"\n")


def test_a_terminal_obeys_no_error(stage: Stage) -> None:
    """The reason that an instance gives is printed without control characters."""
    stage.a.behave = stage.b.behave = refusing(400, "InvalidRequest", "not \x1b[2Jthis")

    result = invoke(stage, "ask", "?")

    assert (result.exit_code, result.stderr) == (1, "Error: not [2Jthis\n")


# A load


@pytest.mark.parametrize("mode", [(), ("--stateless",), ("--no-stream",), ("--stateless", "--no-stream")])
def test_a_load_is_measured_in_every_mode(talking: Stage, mode: tuple[str, ...]) -> None:
    """Each mode sends each question once, and opens and closes sessions in pairs.

    Results have the usual benchmark names.
    """
    result = invoke(talking, "bench", "--requests", "9", "--users", "2", "--turns", "2", "--json", *mode)

    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["completed"], found["failed"], found["errors"]) == (9, 0, {})
    assert found["mode"] == ("stateless" if "--stateless" in mode else "session")
    assert found["p99_e2el_ms"] > 0
    assert (found["p99_ttft_ms"] is None) == ("--no-stream" in mode)
    assert found["total_output_tokens"] == 18
    asked = bodies(talking)
    opened = [body for body in asked if body.get("requestType") == "NEW_SESSION"]
    closed = [body for body in asked if body.get("type") == "close_session"]
    assert len(opened) == len(closed)
    assert bool(opened) == ("--stateless" not in mode)


def test_an_open_loop_load_keeps_its_rate_and_its_number(talking: Stage) -> None:
    """The rate and number of an open-loop load are exact.

    The table is on standard output, progress on standard error.
    """
    result = invoke(talking, "bench", "--rate", "200", "--requests", "20", "--turns", "1")

    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("20 answered, 0 failed")
    assert "TTFT  time to first token" in result.stdout


def test_failures_of_a_load_have_their_kinds(stage: Stage) -> None:
    """Failures are counted by kind, and the exit status is 1 if no question was answered."""
    stage.a.behave = stage.b.behave = refusing(400, "ContextTooLong", "too long")

    result = invoke(stage, "bench", "--requests", "3", "--users", "1", "--stateless", "--json")

    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["errors"], found["error_reasons"]) == ({"424 ModelError": 3}, {"424 ModelError": "too long"})


def test_the_table_of_a_load_has_the_reason_of_a_failure(stage: Stage) -> None:
    """The table has the model's message below the number of failures, also for a refused opening."""
    stage.a.behave = stage.b.behave = refusing(415, "NotAnImage", "the bytes are not an image")

    result = invoke(stage, "bench", "--requests", "1", "--users", "1", "--duration", "1", "--image", __file__)

    lines = result.stdout.splitlines()
    [place] = [number for number, line in enumerate(lines) if line.endswith("opening: 424 ModelError")]
    assert lines[place + 1].strip() == "the bytes are not an image"


@pytest.mark.parametrize("body", [b"\xff\xfe gone", b"\x1b]52;c;AAAA\x07 gone"])
def test_a_load_survives_a_failure_in_other_bytes_than_text(body: bytes) -> None:
    """A failure whose body is not text is counted, and no control character of it reaches the terminal."""

    class Failing(QuietHandler):
        def do_GET(self) -> None:
            self.reply(200, b"{}")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.reply(500, body)

    with serve_http(Failing) as url:
        result = CliRunner().invoke(main, ["bench", "--url", url, "--requests", "2", "--users", "1"])

    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[-2].split() == ["2", "opening:", "500"]
    assert lines[-1].endswith("gone")
    assert all(line.isprintable() for line in lines)


def test_a_stream_that_breaks_off_is_a_failure_of_a_load(stage: Stage) -> None:
    async def break_off(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/event-stream")
        await wire.chunk(SSE[1])
        wire.reset()

    stage.a.behave = stage.b.behave = break_off

    result = invoke(stage, "bench", "--requests", "2", "--users", "1", "--stateless", "--json")

    assert json.loads(result.stdout)["errors"] == {"ModelStreamError": 2}


def test_a_load_on_nobody_is_told_before_it_begins() -> None:
    """A load on an address without a server exits with status 3 at once."""
    result = CliRunner().invoke(main, ["bench", "--url", "http://127.0.0.1:9"])

    assert result.exit_code == 3
    assert "no answer from http://127.0.0.1:9: Connection refused (is `torchmoor up` running?)" in result.stderr


def test_a_load_on_an_unknown_endpoint_is_told(stage: Stage) -> None:
    """The error for an unknown endpoint names it."""
    result = invoke(stage, "bench", "--endpoint", "nothing")

    assert result.exit_code == 1
    assert result.stderr.endswith("status 400: Endpoint nothing of account 000000000000 not found.\n")


def test_status_lists_endpoints_that_were_created_later(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Endpoints created later are listed with their instances; without the admin plane, those of the fleet's start."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    async def create() -> None:
        settings = EndpointSettings(name="later", variants=(VariantSettings(model="m"),))
        stage.registry.serve(stage.registry.stage(settings, 1))

    stage.run(create())
    record = {"runtime": stage.proxy.runtime_url, "endpoints": ["llava"], "run_dir": str(tmp_path)}
    found = []
    for admin in (stage.proxy.admin_url, "http://127.0.0.1:9"):
        with recorded(json.dumps({**record, "admin": admin})):
            result = CliRunner().invoke(main, ["status", "--json"])
            table = CliRunner().invoke(main, ["status"]).stdout
        [fleet] = json.loads(result.stdout)["fleets"]
        found.append((fleet["endpoints"], fleet["instances"]))
        assert ("llava, later" in table) == (fleet["instances"] is not None)
    assert found == [(["llava", "later"], {"a": "ready", "b": "ready"}), (["llava"], None)]


def test_status_takes_the_token_from_a_file(
    make_stage: MakeStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`status` reads the token from a file, like every command for the admin plane."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    stage = make_stage(credentials=Credentials(admin_token="0123456789abcdef0123"))
    keys = tmp_path / "keys.txt"
    keys.write_text("admin 0123456789abcdef0123\n")
    keys.chmod(0o600)
    record = {"runtime": stage.proxy.runtime_url, "endpoints": ["llava"], "run_dir": str(tmp_path)}

    with recorded(json.dumps({**record, "admin": stage.proxy.admin_url})):
        without = CliRunner().invoke(main, ["status", "--json"])
        by_option = CliRunner().invoke(main, ["status", "--json", "--keys", str(keys)])
        monkeypatch.setenv("TORCHMOOR_KEYS_FILE", str(keys))
        by_environment = CliRunner().invoke(main, ["status", "--json"])

    found = [json.loads(result.stdout)["fleets"][0]["instances"] for result in (without, by_option, by_environment)]
    ready = {"a": "ready", "b": "ready"}
    assert found == [None, ready, ready]
