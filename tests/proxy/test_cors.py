"""Web apps of other origins (listen.allowed_origins): what they may call and read, in a browser and byte by byte."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.browser import open_tab, run_chromium
from tests.http_servers import QuietHandler, serve_http
from tests.proxy.conftest import FAST, MakeStage, Stage
from tests.proxy.fake_instance import Received, Wire, answering, dying, refusing, streaming
from tests.proxy.test_fast_path import CountingPath
from tests.waiting import wait_until
from torchmoor.config.credentials import Credentials
from torchmoor.config.limits import LimitSettings
from torchmoor.config.listen import ListenSettings
from torchmoor.config.observe import ObserveSettings

APP = "https://chat.example"
INVOCATIONS = "/endpoints/llava/invocations"
STREAM = "/endpoints/llava/invocations-response-stream"
CHAT = "/v1/chat/completions"
PATHS = (
    ("POST", INVOCATIONS),
    ("POST", STREAM),
    ("POST", "/invocations"),
    ("POST", "/predictions/llava"),
    ("POST", CHAT),
    ("POST", "/v1/responses"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/other"),
    ("POST", "/endpoints/none/invocations"),
    ("POST", "/endpoints/llava/async-invocations"),
    ("GET", "/v2/models/llava"),
    ("GET", "/ping"),
    ("POST", "/generate"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/no/such/path"),
)
TOKEN = "0123456789abcdef"


def make(make_stage: MakeStage, *origins: str, host: str = "127.0.0.1", **options: Any) -> Stage:
    listen = ListenSettings(host=host, port=0, admin_port=0, allowed_origins=origins)
    stage = make_stage(listen=listen, **options)
    stage.a.behave = stage.b.behave = answering(body=b'{"answer": 1}')
    return stage


def ask(stage: Stage, method: str = "POST", path: str = INVOCATIONS, **headers: str) -> requests.Response:
    url = f"http://127.0.0.1:{stage.proxy.port}{path}"
    return requests.request(method, url, headers=headers, data=b"{}", timeout=60)


def ask_first(stage: Stage, origin: str = APP, path: str = CHAT) -> requests.Response:
    """Send the preflight request of a page that will send JSON with a token."""
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    return ask(stage, "OPTIONS", path, Origin=origin, **wanted)


def check_readable(answer: requests.Response, origin: str = APP) -> None:
    """Assert that a browser lets a page of this origin read the answer; each field must be there once."""
    assert answer.raw.headers.getlist("Access-Control-Allow-Origin") == [origin], answer.url
    assert answer.raw.headers.getlist("Access-Control-Expose-Headers") == ["*"], answer.url
    assert answer.raw.headers.getlist("Vary") == ["origin"], answer.url


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])  # pages are refused on the first only
@pytest.mark.parametrize("keys", [Credentials(), Credentials(tokens={"alice": TOKEN})], ids=["open", "with a token"])
def test_every_answer_can_be_read_by_an_allowed_page(make_stage: MakeStage, host: str, keys: Credentials) -> None:
    """Every path and status can be read, also without the token.

    The answer is otherwise the same as without an Origin.
    """
    stage = make(make_stage, APP, "http://localhost:3000", host=host, credentials=keys)
    token = {"Authorization": f"Bearer {TOKEN}"} if keys.tokens else {}
    for method, path in PATHS:
        answer, plain = ask(stage, method, path, Origin=APP, **token), ask(stage, method, path, **token)
        check_readable(answer)
        assert (answer.status_code, answer.text[:20]) == (plain.status_code, plain.text[:20]), path
        assert "Access-Control-Allow-Origin" not in plain.headers
        check_readable(ask(stage, method, path, Origin="http://localhost:3000"), "http://localhost:3000")

    assert ask(stage, Origin=APP).status_code == (403 if token else 200)


def test_preflights_are_answered_before_credentials_are_asked_for(make_stage: MakeStage) -> None:
    stage = make(make_stage, APP, credentials=Credentials(tokens={"alice": TOKEN}))
    for path in (CHAT, INVOCATIONS, "/v1/responses", "/predictions/llava"):
        answer = ask_first(stage, path=path)

        assert (answer.status_code, answer.content) == (200, b"")
        check_readable(answer)
        assert answer.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert answer.headers["Access-Control-Max-Age"] == "7200"
        assert {"DELETE", "GET", "POST"} <= set(answer.headers["Access-Control-Allow-Methods"].split(", "))

    # Only a browser's preflight gets this answer.
    assert ask(stage, "OPTIONS", CHAT, Origin=APP).status_code == 401
    assert stage.a.received + stage.b.received == []
    assert ask_first(stage, "https://other.example").status_code == 403


def test_streams_and_errors_in_their_midst_can_be_read(make_stage: MakeStage) -> None:
    stage = make(make_stage, APP)
    stage.a.behave = stage.b.behave = streaming([b"one", b"two"])
    answer = ask(stage, path=STREAM, Origin=APP)
    check_readable(answer)
    assert b"two" in answer.content

    stage.a.behave = stage.b.behave = refusing(400, "ValidationError", "No.")
    for path in (INVOCATIONS, STREAM, CHAT):
        answer = ask(stage, path=path, Origin=APP)
        check_readable(answer)
        assert answer.status_code >= 400

    stage.a.behave = stage.b.behave = dying
    answer = ask(stage, Origin=APP)
    check_readable(answer)
    assert answer.status_code >= 500


@pytest.mark.parametrize("path", [INVOCATIONS, STREAM, CHAT, "/invocations", "/predictions/llava"])
def test_an_instances_own_permissions_are_replaced(make_stage: MakeStage, path: str) -> None:
    """The proxy replaces TorchServe's own fields (cors_allowed_origin).

    Without the proxy's setting they are forwarded.
    """
    own = {"Access-Control-Allow-Origin": "*", "access-control-allow-methods": "GET", "X-Other": "1"}
    stage, plain = make(make_stage, APP), make(make_stage)
    for each in (stage, plain):
        each.a.behave = each.b.behave = answering(headers=own, body=b"{}")

    answers = [ask(stage, path=path, Origin=APP) for _ in range(2)]  # the second on the fast path
    unchanged = ask(plain, path=path)

    for answer in answers:
        check_readable(answer)
        assert "Access-Control-Allow-Methods" not in answer.headers
        assert answer.headers.get("X-Other") == unchanged.headers.get("X-Other")
    assert "Access-Control-Allow-Origin" not in ask(stage, path=path).headers
    assert unchanged.headers.get("Access-Control-Allow-Origin") == ("*" if "X-Other" in unchanged.headers else None)


def test_late_and_long_bodies_get_readable_errors(make_stage: MakeStage) -> None:
    """An answer that an exchange writes itself, and one that ends the connection before the body has come."""
    stage = make(make_stage, APP, limits=LimitSettings(body_timeout_s=5.0))
    head = f"POST {INVOCATIONS} HTTP/1.1\r\nHost: localhost\r\nOrigin: {APP}\r\nContent-Length: ".encode()
    with stage.socket() as late:
        late.sendall(head + b"4\r\n\r\n{")
        stage.until(lambda: any(c.exchange for c in stage.proxy.data.server.connections), "the exchange")
        stage.pass_time(10)
        assert b"access-control-allow-origin: https://chat.example\r\n" in late.recv(65536)
    with stage.socket() as long:
        long.sendall(head + b"99999999999\r\n\r\n")
        answer = long.recv(65536)
    assert b"access-control-allow-origin: https://chat.example\r\n" in answer
    assert b" 400 " in answer or b" 413 " in answer


def test_other_pages_are_refused_and_the_refusal_names_the_setting(make_stage: MakeStage) -> None:
    stage = make(make_stage, APP)
    for other in ("https://chat.example:8443", "http://chat.example", "https://a.chat.example", "null"):
        answer = ask(stage, Origin=other)
        assert answer.status_code == 403
        assert "listen.allowed_origins (--allow-origin)" in answer.text
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert ask_first(stage, other).status_code == 403
    rebound = ask(stage, Origin=APP, Host="rebound.example")  # a name of the page's own site that leads here
    assert rebound.status_code == 403
    assert "--allow-host" in rebound.text
    assert stage.a.received + stage.b.received == []


def test_nothing_changes_without_the_setting(make_stage: MakeStage) -> None:
    stage = make(make_stage, host="0.0.0.0")
    for headers in ({}, {"Origin": APP}):
        answer = ask(stage, **headers)
        assert answer.status_code == 200
        assert not {"vary", "access-control-allow-origin"} & {name.lower() for name in answer.headers}
    assert ask_first(stage).status_code == 404


def test_the_control_plane_and_the_admin_plane_refuse_allowed_pages(make_stage: MakeStage) -> None:
    """The control and admin planes, which can run code, refuse allowed pages without naming a setting."""
    stage = make(make_stage, APP)
    target = {"X-Amz-Target": "SageMaker.ListEndpoints", "Content-Type": "application/x-amz-json-1.1"}
    refused = ask(stage, path="/", Origin=APP, **target)
    assert refused.status_code == 403
    assert "allowed_origins" not in refused.text
    assert ask(stage, path="/", **target).status_code == 200

    admin = stage.proxy.admin_url
    assert "Access-Control-Allow-Origin" not in requests.get(f"{admin}/instances", headers={"Origin": APP}).headers
    posted = requests.post(f"{admin}/instances/a/drain", headers={"Origin": APP})
    assert posted.status_code == 403
    assert "allowed_origins" not in posted.text
    wanted = {"Origin": APP, "Access-Control-Request-Method": "POST"}
    assert not requests.options(f"{admin}/instances/a/drain", headers=wanted).ok


def test_the_fast_path_leaves_such_requests_to_the_general_one(make_stage: MakeStage) -> None:
    """Requests with an Origin take the general path, and other clients' requests stay on the fast path."""
    stage = make(make_stage, APP, path=FAST)
    taken = CountingPath(stage)
    head = f"POST {INVOCATIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n".encode()
    for _ in range(3):  # the first at each instance opens a connection
        assert b"\r\nvary: origin\r\n" in stage.raw(head + b"\r\n{}")
    num_taken = taken.num_taken
    assert num_taken

    answer = stage.raw(head + f"Origin: {APP}\r\n\r\n{{}}".encode())
    assert f"\r\naccess-control-allow-origin: {APP}\r\n".encode() in answer
    assert taken.num_taken == num_taken


def test_the_access_log_counts_the_added_bytes(make_stage: MakeStage, tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    stage = make(make_stage, APP, observe=ObserveSettings(access_log=str(log)))
    for count, path in enumerate((INVOCATIONS, "/no/such/path"), 1):
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nOrigin: {APP}\r\nContent-Length: 2\r\n\r\n{{}}"
        answer = stage.raw(head.encode())
        wait_until(lambda count=count: log.read_bytes().count(b"\n") >= count, "its line in the log")
        assert json.loads(log.read_text().splitlines()[-1])["bytes_out"] == len(answer)


# In a browser


class _Page(QuietHandler):
    """An empty page on every path."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><html lang=en><title>app</title><link rel=icon href='data:,'>")


@pytest.fixture
def page_port() -> Iterator[int]:
    """Serve the app's page, and return the port."""
    with serve_http(_Page) as url:
        yield int(url.rpartition(":")[2])


# Each request has fields that require a preflight request.
SCRIPT = """
async (base) => {
  const json = { "Content-Type": "application/json", "Authorization": "Bearer any" };
  const seen = {};
  const turn = await fetch(`${base}/endpoints/llava/invocations`, {
    method: "POST", headers: { ...json, "X-Amzn-SageMaker-Session-Id": "NEW_SESSION" }, body: "{}",
  });
  seen.session = turn.headers.get("X-Amzn-SageMaker-New-Session-Id");
  seen.receipt = turn.headers.get("X-Torchmoor-Tokens-Out");
  seen.id = Boolean(turn.headers.get("x-amzn-RequestId"));
  const stream = await fetch(`${base}/v1/chat/completions`, {
    method: "POST", headers: json, body: '{"model": "llava", "messages": [], "stream": true}',
  });
  seen.stream = await stream.text();
  const refused = await fetch(`${base}/v1/models/none`, { headers: json });
  seen.refused = [refused.status, (await refused.json()).error.message];
  const deleted = await fetch(`${base}/v1/responses/resp_none`, { method: "DELETE", headers: json });
  seen.deleted = deleted.status;
  const socket = new WebSocket(`${base.replace("http", "ws")}/v1/responses`);
  seen.socket = await new Promise((done) => {
    socket.onopen = () => done("open");
    socket.onerror = () => done("refused");
  });
  socket.close();
  return seen;
}
"""


@pytest.mark.browser
def test_a_page_in_a_browser_uses_the_apis(make_stage: MakeStage, page_port: int) -> None:
    """A page uses preflights, header fields, a stream, an error and a WebSocket."""
    origin = f"http://localhost:{page_port}"
    stage = make(make_stage, origin)

    async def behave(request: Received, wire: Wire) -> None:
        if b"stream" in request.body:
            await wire.begin_stream("text/event-stream")
            await wire.chunk(b"data: [DONE]\n\n")
            await wire.chunk(b"")
        else:
            receipt = {"X-Torchmoor-Tokens-Out": "7", "X-Amzn-SageMaker-New-Session-Id": "s1; Expires=later"}
            await wire.answer(headers=receipt)

    stage.a.behave = stage.b.behave = behave
    with run_chromium() as browser:
        with open_tab(browser, origin, refusals=("404",)) as tab:
            seen = tab.page.evaluate(SCRIPT, stage.proxy.runtime_url)
        with open_tab(browser, f"http://127.0.0.1:{page_port}", refusals=("",)) as other:  # another origin
            refused = other.page.evaluate(
                "(url) => fetch(url).then(() => 'read', (error) => error.name)", f"{stage.proxy.runtime_url}/v1/models"
            )
            other.complaints.clear()  # Chromium explains the refusal

    assert seen["session"].startswith("s1;")
    assert (seen["receipt"], seen["id"]) == ("7", True)
    assert seen["stream"].endswith("data: [DONE]\n\n")
    assert seen["refused"][0] == 404
    assert "none" in seen["refused"][1]
    assert seen["deleted"] == 200
    assert seen["socket"] == "open"
    assert refused == "TypeError"
