"""TGI's routes: the instance learns the route from a header, and errors have TGI's form."""

import json

import jsonschema
import pytest
import requests

from tests.proxy.conftest import MakeStage, Stage, make_session_id
from tests.proxy.fake_instance import Behaviour, Received, Wire, answering, refusing, silent, streaming
from torchmoor import __version__
from torchmoor.config.credentials import Credentials
from torchmoor.config.limits import LimitSettings
from torchmoor.config.timeouts import TimeoutSettings
from torchmoor.proxy.api.reference import data_schemas
from torchmoor.proxy.instances.instance import InstanceState

ROUTES = ("generate", "generate_stream")
BODY = b'{"inputs":  "x"}'


def post(stage: Stage, route: str = "generate", body: bytes = BODY, **headers: str) -> requests.Response:
    sent = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return requests.post(f"{stage.proxy.runtime_url}/{route}", data=body, headers=sent, timeout=60)


def received(stage: Stage) -> list[Received]:
    return [each for fake in stage.instances.values() for each in fake.received]


@pytest.mark.parametrize("route", ROUTES)
def test_the_instance_gets_the_body_unchanged_and_the_route(stage: Stage, route: str) -> None:
    """A client cannot send the header itself."""
    stage.a.behave = stage.b.behave = answering(body=b'{"generated_text": "y"}')

    answer = post(stage, route, X_Torchmoor_Tgi_Route="other")
    at_invocations = post(stage, "invocations", X_Torchmoor_Tgi_Route="other")

    assert (answer.status_code, answer.content) == (200, b'{"generated_text": "y"}')
    assert answer.headers["x-torchmoor-instance"] in ("a", "b")
    assert at_invocations.status_code == 200
    seen = {each.headers.get("x-torchmoor-tgi-route"): each for each in received(stage)}
    assert set(seen) == {route, None}
    assert (seen[route].method, seen[route].path, seen[route].body) == ("POST", "/predictions/llava", BODY)
    assert seen[route].headers["x-torchmoor-endpoint"] == "llava"


def test_a_stream_passes_as_it_is(stage: Stage) -> None:
    stage.a.behave = stage.b.behave = streaming([b"data:1\n\n", b"data:2\n\n"], "text/event-stream")

    answer = post(stage, "generate_stream")

    assert (answer.headers["content-type"], answer.content) == ("text/event-stream", b"data:1\n\ndata:2\n\n")


@pytest.mark.parametrize("route", ROUTES)
def test_turns_are_sticky(stage: Stage, route: str) -> None:
    for _ in range(3):
        assert post(stage, route, X_Amzn_SageMaker_Session_Id=make_session_id("b")).status_code == 200

    assert (len(stage.a.received), len(stage.b.received)) == (0, 3)


def test_the_first_of_several_endpoints_answers(make_stage: MakeStage) -> None:
    """As at /invocations."""
    stage = make_stage(endpoints={"a": "first", "b": "second"})

    assert post(stage).headers["x-torchmoor-instance"] == "a"
    assert requests.get(f"{stage.proxy.runtime_url}/info", timeout=60).json()["model_id"] == "first"


@pytest.mark.parametrize("route", ["generate", ""])
@pytest.mark.parametrize(
    ("behave", "status", "code", "kind", "message"),
    [
        (refusing(400, "InvalidRequest", "no"), 400, "InvalidRequest", "validation", "no"),
        (refusing(410, "SessionExpired", "too late"), 410, "SessionExpired", "validation", "too late"),
        (refusing(429, "Overloaded", "full"), 429, "Overloaded", "overloaded", "full"),
        (refusing(507, "OutOfMemory", "full"), 507, "OutOfMemory", "overloaded", "full"),
        (refusing(504, "TurnTimedOut", "slow"), 504, "TurnTimedOut", "generation", "slow"),
        (refusing(503, None, "queue full"), 503, "ServiceUnavailable", "overloaded", ""),
        (refusing(413, None, "long"), 413, "", "validation", "long"),
    ],
)
def test_an_instances_error_has_tgis_form(
    stage: Stage, route: str, behave: Behaviour, status: int, code: str, kind: str, message: str
) -> None:
    """Its status, code and message, and the type by which huggingface_hub chooses an exception."""
    stage.a.behave = stage.b.behave = behave

    answer = post(stage, route)

    assert (answer.status_code, set(answer.json())) == (status, {"error", "error_type"})
    assert (answer.json()["error_type"], message in answer.json()["error"]) == (kind, True)
    assert code in answer.headers["x-torchmoor-error"]
    assert answer.headers["x-torchmoor-request-id"]


@pytest.mark.parametrize("route", ["generate", ""])
def test_the_proxys_errors_have_tgis_form(make_stage: MakeStage, route: str) -> None:
    stage = make_stage(limits=LimitSettings(max_passthrough_body_bytes=1000))

    forged = post(stage, route, X_Amzn_SageMaker_Session_Id=make_session_id("a")[:-1])
    long = post(stage, route, body=bytes(1001))
    stage.set_state(InstanceState.DOWN)
    down = post(stage, route)

    answers = {each.status_code: each.json()["error_type"] for each in (forged, long, down)}
    assert answers == {400: "validation", 413: "validation", 503: "overloaded"}
    assert down.headers["retry-after"]


def test_a_time_out_is_an_error_of_the_generation(make_stage: MakeStage) -> None:
    stage = make_stage(timeouts=TimeoutSettings(model_timeout_s=0.1, sweep_interval_s=0.02))

    stage.a.behave = stage.b.behave = silent

    answer = post(stage)

    assert (answer.status_code, answer.json()["error_type"]) == (504, "generation")


def test_the_server_describes_itself(stage: Stage) -> None:
    """With what the proxy knows."""
    info = requests.get(f"{stage.proxy.runtime_url}/info", timeout=60)

    assert info.json() == {"model_id": "llava", "router": "torchmoor", "version": __version__}
    assert received(stage) == []


def test_health_is_that_of_ping_with_tgis_error(stage: Stage) -> None:
    """While nothing is ready, /health has TGI's error object, and /ping, as SageMaker requires, has no body."""

    def ask(method: str, path: str) -> tuple[int, bytes]:
        answer = requests.request(method, f"{stage.proxy.runtime_url}/{path}", timeout=60)
        return answer.status_code, answer.content

    before = ask("GET", "health")
    stage.set_state(InstanceState.DOWN)

    assert before == (200, b"")
    status, body = ask("GET", "health")
    assert (status, json.loads(body)) == (503, {"error": "unhealthy", "error_type": "healthcheck"})
    jsonschema.validate(json.loads(body), data_schemas.TGI_ERROR)
    assert ask("HEAD", "health") == ask("GET", "ping") == (503, b"")


@pytest.mark.parametrize("path", ["generate", "generate_stream", "info"])
def test_credentials_are_required(make_stage: MakeStage, path: str) -> None:
    stage = make_stage(credentials=Credentials(tokens={"alice": "token-of-alice-0123456789"}))

    answer = requests.request("GET" if path == "info" else "POST", f"{stage.proxy.runtime_url}/{path}", timeout=60)

    assert answer.status_code == 403
    assert received(stage) == []


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/generate"), ("POST", "/generate/"), ("POST", "/info"), ("POST", "/health")]
)
def test_other_requests_are_unknown(stage: Stage, method: str, path: str) -> None:
    assert requests.request(method, stage.proxy.runtime_url + path, timeout=60).status_code == 404


def test_a_request_that_is_tried_again_names_its_route_again(stage: Stage) -> None:
    stage.a.behave = stage.b.behave = refusing(503, None, "queue full")

    post(stage, "generate_stream")

    assert [each.headers["x-torchmoor-tgi-route"] for each in received(stage)] == ["generate_stream"] * 2


def test_an_error_that_is_not_json_is_the_message(stage: Stage) -> None:

    async def broken(request: Received, wire: Wire) -> None:
        await wire.answer(500, {"X-Torchmoor-Error": "InternalError"}, b"\xff{")

    stage.a.behave = stage.b.behave = broken

    assert post(stage).json() == {"error": json.loads('"\\ufffd{"'), "error_type": "generation"}
