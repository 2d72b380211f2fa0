"""Web pages in a browser of this machine: those of other sites reach nothing on a loopback listener."""

import json

import pytest

from tests.proxy.conftest import MakeStage, Stage
from tests.proxy.fake_instance import answering
from tests.proxy.test_cors import ask
from torchmoor.config.listen import ListenSettings

PATHS = (
    ("POST", "/endpoints/llava/invocations"),
    ("POST", "/invocations"),
    ("GET", "/predictions/llava"),
    ("POST", "/predictions/llava"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/endpoints/llava/async-invocations"),
    ("GET", "/v1/models"),
    ("GET", "/no/such/path"),
)
PAGE = {"Origin": "https://page.example"}
OTHER_PORT = {"Origin": "http://127.0.0.1:3000", "Sec-Fetch-Site": "same-site"}


def make(make_stage: MakeStage, *allowed: str, host: str = "127.0.0.1") -> Stage:
    stage = make_stage(listen=ListenSettings(host=host, port=0, admin_port=0, allowed_hosts=allowed))
    stage.a.behave = stage.b.behave = answering(body=b'{"answer": 1}')
    return stage


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param(PAGE, id="a page"),
        pytest.param(OTHER_PORT, id="a page of another port"),
        pytest.param({"Origin": "null"}, id="a page without an origin"),
        pytest.param({"Origin": "http://[::1"}, id="an origin that cannot be read"),
        pytest.param({"Sec-Fetch-Site": "cross-site"}, id="an image or a form of a page"),
        pytest.param({"Host": "rebound.example"}, id="a name that leads here"),
        pytest.param({"Host": "rebound.example", "Origin": "http://rebound.example"}, id="its own page"),
        pytest.param({"Host": "localhost.page.example:80"}, id="a name that begins with localhost"),
        pytest.param({"Host": "10.0.0.1"}, id="an address of another machine"),
    ],
)
def test_pages_of_other_sites_are_refused(make_stage: MakeStage, headers: dict[str, str]) -> None:
    """Pages of other sites are refused on every path, before an instance gets a request."""
    stage = make(make_stage)
    for method, path in PATHS:
        answer = ask(stage, method, path, **headers)
        assert answer.status_code == 403, (method, path)
        assert "Access-Control-Allow-Origin" not in answer.headers

    assert stage.a.received + stage.b.received == []
    preflight = ask(stage, "OPTIONS", **PAGE, **{"Access-Control-Request-Method": "POST"})
    assert preflight.status_code == 403


@pytest.mark.parametrize("host", ["localhost:1", "LOCALHOST", "127.0.0.1:80", "[::1]:8080", "127.1.2.3", "a.localhost"])
def test_names_of_loopback_are_served(make_stage: MakeStage, host: str) -> None:
    stage = make(make_stage)

    assert ask(stage, Host=host).status_code == 200
    assert ask(stage, Host=host, Origin=f"http://{host}").status_code == 200
    assert stage.raw(b"GET /ping HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_clients_and_the_chat_page_are_served(make_stage: MakeStage) -> None:
    """boto3, the chat page's own requests, and a link from another site to the page are served."""
    stage = make(make_stage)
    answer = stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}")
    assert json.load(answer["Body"]) == {"answer": 1}
    own = {"Origin": f"http://127.0.0.1:{stage.proxy.port}", "Sec-Fetch-Site": "same-origin"}

    assert ask(stage, **own).status_code == 200
    assert (
        ask(stage, "GET", "/chat", **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}).status_code == 200
    )
    assert ask(stage, "GET", "/v1/models", **{"Sec-Fetch-Site": "none"}).status_code == 200


def test_allowed_names_are_served(make_stage: MakeStage) -> None:
    """Allowed names work behind a proxy that keeps the Host and one that replaces it, also on the admin plane."""
    stage = make(make_stage, "chat.example", "10.1.2.3")

    assert ask(stage, Host="Chat.example:443", Origin="https://chat.example:443").status_code == 200
    assert ask(stage, Origin="https://chat.example").status_code == 200
    assert ask(stage, Host="10.1.2.3").status_code == 200
    assert ask(stage, Host="other.example").status_code == 403
    assert "--allow-host" in ask(stage, Host="other.example").text
    foreign = ask(stage, **PAGE).text
    assert "--allow-origin" in foreign
    assert "--allow-host" in foreign
    for host, status in (("chat.example", 200), ("other.example", 403)):
        assert stage.admin("/instances", headers={"Host": host}).status_code == status


def test_other_addresses_check_names_only_if_some_are_given(make_stage: MakeStage) -> None:
    open_to_all = make(make_stage, host="0.0.0.0")
    assert ask(open_to_all, Host="any.example", **PAGE).status_code == 200

    named = make(make_stage, "chat.example", host="0.0.0.0")
    assert ask(named, Host="chat.example").status_code == 200
    assert ask(named, Host="any.example").status_code == 403
    assert ask(named, Host="chat.example", **PAGE).status_code == 403
