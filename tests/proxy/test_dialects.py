"""The dialects that are forwarded unchanged, and the admin plane."""

import json
import time
from email.utils import parsedate_to_datetime

import pytest

from tests.proxy.conftest import MakeStage, Stage, make_session_id, read_answer
from tests.proxy.fake_instance import Received, Wire, answering, refusing, silent, streaming
from torchmoor.config.health import HealthSettings
from torchmoor.config.limits import LimitSettings
from torchmoor.config.timeouts import TimeoutSettings
from torchmoor.proxy.instances.dns_source import DnsSource
from torchmoor.proxy.instances.instance import Instance, InstanceState

PATHS = ("/invocations", "/predictions/llava")


def post(stage: Stage, path: str, body: bytes = b"{}", **headers: str) -> tuple[int, dict[str, str], bytes]:
    answer = stage.ask("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def test_ping_is_healthy_while_an_instance_is_ready(stage: Stage) -> None:
    """/ping answers 200 with an empty body if an instance is ready, else 503."""
    statuses = []
    for name in ("a", "b", None):
        answer = stage.ask("GET", "/ping")
        statuses.append((answer.status, answer.read()))
        if name is not None:
            stage.set_state(InstanceState.DOWN, name)

    assert statuses == [(200, b""), (200, b""), (503, b"")]


@pytest.mark.parametrize("path", PATHS)
def test_answer_passes_with_both_session_headers(stage: Stage, path: str) -> None:
    """Both of the handler's session headers reach a client of the container's dialect."""
    value = "ts-seq-x; Expires=2030-01-01T00:00:00Z"
    both = {"X-Amzn-SageMaker-Session-Id": value, "X-Amzn-SageMaker-New-Session-Id": value}
    stage.a.behave = stage.b.behave = answering(headers={**both, "ts_stream_next": "true"}, body=b'{"ok": 1}')

    status, headers, body = post(stage, path, X_Amzn_SageMaker_Session_Id="NEW_SESSION")

    assert (status, body) == (200, b'{"ok": 1}')
    assert value == headers["x-amzn-sagemaker-session-id"] == headers["x-amzn-sagemaker-new-session-id"]
    assert headers["x-torchmoor-instance"] in ("a", "b")
    assert "ts_stream_next" not in headers
    [seen] = stage.a.received + stage.b.received
    assert (seen.path, seen.headers["x-torchmoor-endpoint"]) == ("/predictions/llava", "llava")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("POST", path) for path in (*PATHS, "/nothing", "/endpoints/nobody/invocations", "/v1/responses")),
        *(("POST", f"/endpoints/llava/invocations{kind}") for kind in ("", "-response-stream")),
        *(("GET", path) for path in ("/ping", "/health", "/chat", "/v1/models")),
    ],
)
def test_an_answer_has_one_date_of_the_proxys_clock(stage: Stage, method: str, path: str) -> None:
    """Whole answers, streams, refusals and pages have the time of this machine, even if the instance sent another."""
    stage.a.behave = stage.b.behave = answering(headers={"Date": "Thu, 01 Jan 1970 00:00:00 GMT"})
    began = int(time.time())

    answer = stage.ask(method, path, b"{}" if method == "POST" else b"")

    [date] = answer.headers.get_all("date") or []
    assert began <= parsedate_to_datetime(date).timestamp() <= time.time()


@pytest.mark.parametrize("path", PATHS)
def test_errors_pass_as_they_are(stage: Stage, path: str) -> None:
    """Status, code and body of the handler's errors are unchanged."""
    stage.a.behave = refusing(410, "SessionExpired", "too late")

    status, headers, body = post(stage, path, X_Amzn_SageMaker_Session_Id=make_session_id("a"))

    assert (status, headers["x-torchmoor-error"]) == (410, "SessionExpired")
    assert json.loads(body)["error"]["message"] == "too late"


@pytest.mark.parametrize("path", PATHS)
def test_turns_are_sticky(stage: Stage, path: str) -> None:
    """The session header selects the instance, as in the runtime API; a forged id is refused."""
    for _ in range(3):
        assert post(stage, path, X_Amzn_SageMaker_Session_Id=make_session_id("b"))[0] == 200

    status, headers, _ = post(stage, path, X_Amzn_SageMaker_Session_Id=make_session_id("b")[:-1])

    assert (status, headers["x-torchmoor-error"]) == (400, "ValidationError")
    assert (len(stage.a.received), len(stage.b.received)) == (0, 3)


@pytest.mark.parametrize("path", PATHS)
def test_stream_passes_chunk_by_chunk(stage: Stage, path: str) -> None:
    """Chunks are forwarded without frames, and a late error's mark reaches the client."""
    stage.a.behave = stage.b.behave = streaming([b"data: 1\n\n", b"data: 2\n\n"], "text/event-stream")

    status, headers, body = post(stage, path)

    assert (status, headers["content-type"], body) == (200, "text/event-stream", b"data: 1\n\ndata: 2\n\n")


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
def test_tgis_clients_send_json_to_the_root(stage: Stage, kind: str) -> None:
    """POST / serves TGI's clients like /invocations, whole and streamed."""
    whole = post(stage, "/", b'{"inputs": "x"}', Content_Type=kind, Authorization="Bearer x")
    stage.a.behave = stage.b.behave = streaming([b"data:{}\n\n"], "text/event-stream")
    streamed = post(stage, "/", b'{"inputs": "x", "stream": true}', Content_Type=kind)

    assert [each.path for each in stage.a.received + stage.b.received] == ["/predictions/llava"] * 2
    assert whole[0] == 200
    assert (streamed[0], streamed[2]) == (200, b"data:{}\n\n")


@pytest.mark.parametrize(
    "headers",
    [
        {"Content_Type": "application/x-amz-json-1.1"},
        {"Content_Type": "application/x-www-form-urlencoded"},
        {"Content_Type": "application/jsonlines"},
        {"Content_Type": "application/json", "Smithy_Protocol": "rpc-v2-cbor"},
        {"Content_Type": "application/json", "Authorization": "AWS4-HMAC-SHA256 Credential=A/1/r/kms/aws4_request"},
    ],
)
def test_the_root_is_that_of_aws_otherwise(stage: Stage, headers: dict[str, str]) -> None:
    assert post(stage, "/", **headers)[0] == 404
    assert stage.a.received + stage.b.received == []


def test_death_in_mid_stream_cuts_the_connection(stage: Stage) -> None:
    """The connection is cut after an instance's death, because an orderly end would look like a whole answer."""

    async def dying(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/plain")
        await wire.chunk(b"half")
        wire.writer.close()

    stage.a.behave = stage.b.behave = dying
    with stage.socket() as sock:
        sock.sendall(b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        try:
            answer = read_answer(sock, to_end=True)
        except ConnectionResetError:
            answer = b""

    assert not answer.endswith(b"0\r\n\r\n")


def test_version_more_path_and_query_pass(stage: Stage) -> None:
    """Version, further path and query of TorchServe's path are forwarded unchanged."""
    assert post(stage, "/predictions/llava/1.0/v1/chat/completions?x=1")[0] == 200

    [seen] = stage.a.received + stage.b.received
    assert seen.path == "/predictions/llava/1.0/v1/chat/completions?x=1"


@pytest.mark.parametrize(
    "path", ["/predictions/other", "/predictions/", "/predictions/llava/../../models", "/predictions/llava/%2e%2e/x"]
)
def test_unknown_model_is_not_found(stage: Stage, path: str) -> None:
    """An unknown model gets TorchServe's own error, and no path leads out of /predictions."""
    status, _, body = post(stage, path)

    assert (status, json.loads(body)["type"]) == (404, "ModelNotFoundException")
    assert stage.a.received + stage.b.received == []


def test_body_limit_is_its_own(make_stage: MakeStage) -> None:
    """A body beyond the limit gets 413, with or without a declared length."""
    stage = make_stage(limits=LimitSettings(max_passthrough_body_bytes=1000))

    assert post(stage, "/invocations", bytes(1001))[0] == 413
    with stage.socket() as sock:
        sock.sendall(
            b"POST /invocations HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n" + bytes(2000)
        )
        assert read_answer(sock, to_end=True).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("path", PATHS)
def test_refused_request_is_counted(stage: Stage, path: str) -> None:
    """A refusal counts as an invocation with a client error, as in the runtime API."""
    status, _, _ = post(stage, path, X_Amzn_SageMaker_Session_Id="forged")

    [endpoint] = stage.proxy.data.registry.endpoints()
    metrics = stage.proxy.data.dispatchers.first(endpoint).metrics
    assert (status, metrics.invocations, metrics.client_errors) == (400, 1, 1)


def test_time_out_is_a_gateway_time_out(make_stage: MakeStage) -> None:
    """A time-out is 504 in the handlers' error form."""
    stage = make_stage(timeouts=TimeoutSettings(model_timeout_s=0.1, sweep_interval_s=0.02))

    stage.a.behave = stage.b.behave = silent

    status, headers, _ = post(stage, "/invocations")

    assert (status, headers["x-torchmoor-error"]) == (504, "ModelError")


def test_no_instance_is_unavailable(stage: Stage) -> None:
    """Without an instance the answer is 503 with Retry-After."""
    for name in ("a", "b"):
        stage.set_state(InstanceState.DOWN, name)

    status, headers, _ = post(stage, "/invocations")

    assert (status, headers["x-torchmoor-error"]) == (503, "ServiceUnavailable")
    assert headers["retry-after"]


def test_draining_instance_serves_its_sessions_and_nothing_new(stage: Stage) -> None:
    stage.set_state(InstanceState.DRAINING, "a")

    for _ in range(2):
        assert post(stage, "/invocations")[0] == 200
    assert post(stage, "/invocations", X_Amzn_SageMaker_Session_Id=make_session_id("a"))[0] == 200

    assert (len(stage.a.received), len(stage.b.received)) == (1, 2)


def test_admin_shows_health_instances_and_metrics(stage: Stage) -> None:
    """Metrics have CONTRACT's names, per endpoint and variant."""
    stage.a.behave = stage.b.behave = answering(body=b"{}")
    post(stage, "/endpoints/llava/invocations")
    stage.client().invoke_endpoint_with_response_stream(EndpointName="llava", Body=b"{}")["Body"].close()
    stage.until(lambda: stage.outstanding() == 0, "both requests over")
    stage.a.behave = stage.b.behave = refusing(400, "InvalidJson", "no")
    post(stage, "/endpoints/llava/invocations")
    post(stage, "/endpoints/llava/invocations", X_Amzn_SageMaker_Session_Id="forged")

    health, instances, metrics = (stage.admin(path) for path in ("/healthz", "/instances", "/metrics"))

    assert health.status_code == 200
    rows = instances.json()["instances"]
    assert [(row["name"], row["state"], row["outstanding"]) for row in rows] == [("a", "ready", 0), ("b", "ready", 0)]
    labels = '{endpoint="llava",variant="AllTraffic"}'
    lines = metrics.text.splitlines()
    assert f"Invocations_total{labels} 4.0" in lines
    assert f"Invocation4XXErrors_total{labels} 2.0" in lines
    assert f"InvocationModelErrors_total{labels} 1.0" in lines
    assert f"ModelLatency_count{labels} 3.0" in lines
    assert f"FirstChunkLatency_count{labels} 1.0" in lines
    assert 'InstanceReady{endpoint="llava",instance="a"} 1.0' in lines


def test_admin_health_fails_without_an_instance(stage: Stage) -> None:
    for name in ("a", "b"):
        stage.set_state(InstanceState.DOWN, name)

    answer = stage.admin("/healthz")

    assert (answer.status_code, answer.json()["endpoints_without_instance"]) == (503, ["llava"])


def test_a_balancer_sends_no_clients_before_the_instances_are_known(stage: Stage) -> None:
    """A proxy is ready once it has asked DNS and each instance, even if none can serve; it is live at all times."""
    for name in ("a", "b"):
        stage.set_state(InstanceState.DOWN, name)
    stage.until(lambda: stage.proxy.health.has_asked_all(), "each instance has been asked")
    source = DnsSource("_inference._tcp.llava", "llava", "AllTraffic")

    stage.proxy.registry.sources[source.dns_name] = source

    answer = stage.admin("/readyz")
    assert (answer.status_code, answer.json()["waits_for_dns"]) == (503, ["_inference._tcp.llava"])
    assert stage.admin("/livez").status_code == 200
    source.answered_at = 1.0
    assert stage.admin("/readyz").status_code == 200


def test_an_instance_that_joins_takes_no_proxy_out_of_its_balancer(stage: Stage) -> None:
    """A new instance does not make proxies unready until it answers.

    All learn of it at once, and no proxy would be left.
    """
    stage.until(lambda: stage.proxy.health.has_asked_all(), "each instance has been asked")
    assert stage.admin("/readyz").status_code == 200

    async def join() -> None:
        stage.registry.add(Instance(name="c", endpoint="llava", model="llava", port=9))

    stage.run(join())
    stage.proxy.registry.sources["_i._tcp.more"] = DnsSource("_i._tcp.more", "llava", "AllTraffic")

    assert not stage.proxy.health.has_asked_all()
    answer = stage.admin("/readyz")
    assert (answer.status_code, answer.json()["waits_for_dns"]) == (200, ["_i._tcp.more"])


def test_one_unanswered_probe_costs_no_session(make_stage: MakeStage) -> None:
    """An instance goes DOWN only after several consecutive unanswered probes."""
    patient = HealthSettings(
        starting_interval_s=0.02, ready_interval_s=0.02, probe_timeout_s=0.05, unanswered_before_down=10**9
    )
    stage = make_stage(health=patient, names=("a",))
    stage.until(lambda: not stage.proxy.health.is_probing, "the first probe")
    stage.a.behave = silent
    stage.instance("a").management_port = stage.a.port

    stage.until(lambda: len(stage.a.received) >= 4, "a fourth probe after three without an answer")

    assert stage.instance("a").is_ready
    stage.instance("a").management_port = None


def test_probes_bring_an_instance_back(make_stage: MakeStage) -> None:
    """An instance goes DOWN when a probe's connection is refused, and READY at the next good one."""
    stage = make_stage(health=HealthSettings(starting_interval_s=0.02, ready_interval_s=0.02), names=("a",))
    stage.run(stage.a.die())
    stage.until(lambda: stage.instance("a").state is InstanceState.DOWN, "the failed probe")

    stage.run(stage.a.start())

    stage.until(lambda: stage.instance("a").is_ready, "the good probe")
    assert post(stage, "/invocations")[0] == 200


@pytest.mark.parametrize(
    ("workers", "state"), [([{"status": "READY"}], InstanceState.READY), ([{"status": "LOADING"}], InstanceState.DOWN)]
)
def test_readiness_is_a_ready_worker(
    make_stage: MakeStage, workers: list[dict[str, str]], state: InstanceState
) -> None:
    """Readiness is the model's state on the management port; /ping would be healthy too early."""
    stage = make_stage(health=HealthSettings(starting_interval_s=0.02, ready_interval_s=0.02), names=("a",))
    stage.a.behave = answering(body=json.dumps([{"modelName": "llava", "workers": workers}]).encode())
    stage.instance("a").management_port = stage.a.port
    stage.set_state(InstanceState.DOWN if state is InstanceState.READY else InstanceState.READY, "a")

    stage.until(lambda: stage.a.received and stage.instance("a").state is state, "the probe's verdict")

    assert stage.a.received[-1].path == "/models/llava"
    stage.instance("a").management_port = None
