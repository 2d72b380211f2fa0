"""The fast path has the effect of the general one, for real clients; tests/fuzz compares the two byte by byte."""

import itertools
import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import requests
from botocore.exceptions import ClientError

from tests.proxy.conftest import FAST, GENERAL, PATH, MakeStage, Stage, make_session_id
from tests.proxy.fake_instance import Gate, answering, refusing, streaming
from tests.waiting import PROGRAM_S, wait_until
from torchmoor.config.callers import CallerSettings
from torchmoor.config.credentials import AccessKey, Credentials
from torchmoor.config.observe import ObserveSettings
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.config.timeouts import TimeoutSettings
from torchmoor.metrics.invocations import InvocationMetrics
from torchmoor.proxy.access.gate import principal_of
from torchmoor.proxy.fast_path import request as fast_path_request
from torchmoor.proxy.http.call import FastClient, FastPath
from torchmoor.proxy.http.message import Request
from torchmoor.proxy.instances.instance import Instance, InstanceState

ROOT = Path(__file__).parents[2]
SUITE = (
    "invoke",
    "access",
    "access_log",
    "callers",
    "faults",
    "connections",
    "routing",
    "moved_sessions",
    "stream",
    "strictness",
    "bodies_in_flight",
)
# A sweep between a head and its body would make a busy machine take the general path at times.
TOKEN, SECRET = "a-token-of-an-app", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
NO_SWEEPS = TimeoutSettings(sweep_interval_s=3600)
PASSING = ("id", "date", "signature", "authorization", "user-agent", "host", "timeout-ms")  # parts of field names
TIMES_AND_IDS = ("time", "request_id", "inference_id")  # fields of the access log


class CountingPath:
    """Counts the requests that the fast path takes."""

    def __init__(self, stage: Stage) -> None:
        self.num_taken = 0
        path = stage.proxy.data.server.fast_path
        assert path is not None
        self._path: FastPath = path
        stage.proxy.data.server.fast_path = self

    def try_send(self, client: FastClient, request: Request, body: bytes) -> bool:
        is_taken = self._path.try_send(client, request, body)
        self.num_taken += is_taken
        return is_taken

    def may_take(self, request: Request) -> bool:
        return self._path.may_take(request)


def stable(fields: dict[str, str]) -> dict[str, str]:
    """Return the fields that are the same in every run."""
    return {name: value for name, value in fields.items() if not any(part in name.lower() for part in PASSING)}


def drive(stage: Stage) -> dict[str, Any]:
    """Send clients' requests; return what both sides received, and the counts."""
    client, session = stage.client(), make_session_id("a")
    answers: list[Any] = []

    def invoke(**given: Any) -> None:
        try:
            answer = client.invoke_endpoint(EndpointName="llava", **{"Body": b'{"x": 1}', **given})
            answers.append((stable(answer["ResponseMetadata"]["HTTPHeaders"]), answer["Body"].read()))
        except ClientError as error:
            answers.append((error.response["Error"], error.response["ResponseMetadata"]["HTTPStatusCode"]))

    tokens = {"X-Torchmoor-Prefill-Tokens": "5", "X-Torchmoor-Generated-Tokens": "7"}
    stage.a.behave = stage.b.behave = answering(200, {**tokens, "ts_stream_next": "false"})
    for _ in range(4):
        invoke(SessionId=session, ContentType="application/json", Accept="application/json")
        invoke(ContentType="text/csv", CustomAttributes="mine", InferenceId="request-7")
    for behave in (refusing(400, "session-expired", "It expired."), refusing(503, None, "Busy."), answering(500)):
        stage.a.behave = stage.b.behave = behave
        invoke(SessionId=session)
    stage.a.behave = stage.b.behave = streaming([b"one", b"two"])
    invoke(SessionId=session)
    invoke(SessionId=session[:-1] + "2")
    stage.a.behave = stage.b.behave = answering()
    invoke(SessionId=session, Body=b"x" * 100_000)
    stage.until(lambda: stage.outstanding() == 0, "all are over")
    [dispatcher] = stage.proxy.data.dispatchers.all()
    counts = dispatcher.metrics.snapshot()
    return {
        "answers": answers,
        "requests": [
            (fake.name, got.method, got.path, stable(got.headers), got.body)
            for fake in stage.instances.values()
            for got in fake.received
        ],
        "counts": {name: sum(value[0]) if isinstance(value, list) else value for name, value in counts.items()},
        "left out": stage.proxy.data.dispatchers.decisions.num_left_out,
    }


def test_both_paths_serve_a_real_client_alike(make_stage: MakeStage) -> None:
    """boto3 and the instances get equal bytes on both paths, and the counts are equal."""
    fast, general = make_stage(path=FAST, timeouts=NO_SWEEPS), make_stage(path=GENERAL)
    taken = CountingPath(fast)

    found = drive(fast)
    assert taken.num_taken >= 6
    general_data = general.proxy.data.dispatchers
    general_left_out = general_data.decisions.num_left_out
    expected = drive(general)

    assert general_left_out == 0
    del found["left out"], expected["left out"]
    assert found == expected


def test_decisions_are_the_same_on_both_paths(make_stage: MakeStage) -> None:
    """A fast-path decision has all values of the general path: receipt, session, times."""
    rows = []
    for stage in (make_stage(), make_stage(path=GENERAL)):
        stage.a.behave = answering(200, {"X-Torchmoor-Prompt-Tokens": "5"})
        for _ in range(3):
            stage.client().invoke_endpoint(EndpointName="llava", SessionId=make_session_id("a"), Body=b"{}")
        url = f"{stage.proxy.admin_url}/decisions"
        wait_until(lambda url=url: len(requests.get(url, timeout=60).json()["decisions"]) == 3, "all are recorded")
        rows.append(requests.get(url, timeout=60).json()["decisions"])

    for fast, general in zip(*rows, strict=True):
        passing = {name for name in fast if name in ("time", "request_id", "inference_id") or name.endswith("ms")}
        assert {name: fast[name] for name in fast.keys() - passing} == {
            name: general[name] for name in general.keys() - passing
        }
        assert {name for name in passing if fast[name] is None} == {name for name in passing if general[name] is None}


def test_the_time_before_the_instance_has_the_request_is_the_proxys(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's latency begins when the request is sent to the instance, as on the general path."""
    stage = make_stage(path=FAST, timeouts=NO_SWEEPS)

    def invoke() -> InvocationMetrics:
        stage.client().invoke_endpoint(EndpointName="llava", SessionId=make_session_id("a"), Body=b"{}")
        stage.until(lambda: stage.outstanding() == 0, "it is over")
        [dispatcher] = stage.proxy.data.dispatchers.all()
        return dispatcher.metrics

    before_s = invoke().model_latency.sum  # the general path opens the connection to the instance
    # The fast path reads the clock when it sends a request and when it has the answer; between them pass 100 s.
    times = itertools.count(1_000_000, 100)
    monkeypatch.setattr(fast_path_request, "monotonic", lambda: next(times))
    invoke()
    metrics = invoke()

    assert sum(metrics.overhead_latency.counts) == sum(metrics.model_latency.counts) == 3
    assert metrics.model_latency.sum - before_s == pytest.approx(200)


def test_with_keys_every_request_is_checked(make_stage: MakeStage) -> None:
    """Every request is checked for credentials, also after an admitted one on the same connection."""
    stage = make_stage(path=FAST, timeouts=NO_SWEEPS, credentials=Credentials(tokens={"app": TOKEN}))
    taken = CountingPath(stage)

    url = f"{stage.proxy.runtime_url}/endpoints/llava/invocations"
    with requests.Session() as client:
        for _ in range(3):
            admitted = client.post(url, data=b"{}", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60)
            forged = client.post(url, data=b"{}", headers={"Authorization": f"Bearer {TOKEN}x"}, timeout=60)
            refused = client.post(url, data=b"{}", timeout=60)
            assert (admitted.status_code, forged.status_code, refused.status_code) == (200, 403, 403)
    assert taken.num_taken > 0
    gate = stage.proxy.data.gate
    assert sum(gate.num_denied.values()) == 6  # once each, although both paths read it


def test_signed_requests_of_boto3_take_the_fast_path(make_stage: MakeStage) -> None:
    """The signature is verified with the body, and the instance gets the key's principal, as on the general path."""
    keys = Credentials(keys={"AKIAEXAMPLE": AccessKey(secret=SECRET)})
    seen = []
    for path in (FAST, GENERAL):
        stage = make_stage(path=path, timeouts=NO_SWEEPS, credentials=keys)
        taken = CountingPath(stage) if path == FAST else None
        client = stage.client(secret=SECRET)
        session = make_session_id("a", principal=principal_of("key", "AKIAEXAMPLE"))
        for _ in range(4):
            client.invoke_endpoint(EndpointName="llava", SessionId=session, Body=b"{}")
            client.invoke_endpoint(EndpointName="llava", Body=b"{}")
        forger = stage.client(secret="another")
        with pytest.raises(ClientError, match="signature we calculated"):
            forger.invoke_endpoint(EndpointName="llava", Body=b"{}")
        assert taken is None or taken.num_taken >= 4
        assert stage.proxy.data.gate.num_denied == {"InvalidSignatureException": 1}
        seen.append(
            [(fake.name, stable(got.headers), got.body) for fake in stage.instances.values() for got in fake.received]
        )
    assert seen[0] == seen[1]


def test_a_limited_caller_is_counted_on_both_paths(make_stage: MakeStage) -> None:
    """A fast-path request counts for its caller until its answer, a loss or a disconnect."""
    for path in (FAST, GENERAL):
        stage = make_stage(path=path, timeouts=NO_SWEEPS, callers=CallerSettings(limited="always", max_requests=1))
        taken = CountingPath(stage) if path == FAST else None
        callers = stage.proxy.data.dispatchers.callers
        client = stage.client()
        for _ in range(4):
            client.invoke_endpoint(EndpointName="llava", SessionId=make_session_id("a"), Body=b"{}")
        gate = Gate()
        stage.a.behave = gate.behave
        with closing(stage.http()) as waiting:
            waiting.request(
                "POST",
                "/endpoints/llava/invocations",
                body=b"{}",
                headers={"X-Amzn-SageMaker-Session-Id": make_session_id("a")},
            )
            stage.until(lambda callers=callers: callers.num_requests, "it is counted")
            with pytest.raises(ClientError, match="1 requests in flight"):
                client.invoke_endpoint(EndpointName="llava", SessionId=make_session_id("a"), Body=b"{}")
            gate.open()
            assert waiting.getresponse().status == 200
        stage.until(lambda callers=callers: not callers.num_requests, "it has left")
        assert callers.num_refused == {"max_requests": 1}
        assert taken is None or taken.num_taken >= 3


def test_the_access_log_is_the_same_on_both_paths(make_stage: MakeStage, tmp_path: Path) -> None:
    """A line has equal names in equal order, and equal values except times and ids."""
    logged: dict[str, list[list[tuple[str, Any]]]] = {}
    for path in (FAST, GENERAL):
        log = tmp_path / path
        observe = ObserveSettings(access_log=str(log))
        stage = make_stage(path=path, observe=observe, timeouts=NO_SWEEPS)
        taken = CountingPath(stage) if path == FAST else None
        num_answers = len(drive(stage)["answers"])
        assert taken is None or taken.num_taken >= 6
        wait_until(lambda log=log, num=num_answers: log.read_bytes().count(b"\n") == num, "each request has a line")
        found = [json.loads(line) for line in log.read_text().splitlines()]
        logged[path] = [
            [(name, None if name.endswith("_ms") or name in TIMES_AND_IDS else value) for name, value in line.items()]
            for line in found
        ]
        assert {line["inference_id"] for line in found} > {"request-7"}
        assert {(line["prefill_tokens"], line["generated_tokens"]) for line in found[:8]} == {(5, 7)}
        assert not {"prefill_tokens", "generated_tokens"} & found[8].keys()
    assert logged[FAST] == logged[GENERAL]


def test_a_replaced_endpoint_gets_no_further_request(make_stage: MakeStage) -> None:
    """Requests go to the endpoint that is being served, never to a replaced one."""
    stage = make_stage(path=FAST, timeouts=NO_SWEEPS)
    taken = CountingPath(stage)
    client = stage.client()
    for _ in range(3):
        client.invoke_endpoint(EndpointName="llava", SessionId=make_session_id("a"), Body=b"{}")
    num_before, num_taken = len(stage.a.received), taken.num_taken
    assert num_taken
    settings = EndpointSettings(name="llava", variants=(VariantSettings(model="llava"),))

    async def replace() -> None:
        endpoint = stage.registry.stage(settings, 1)
        stage.registry.add(
            Instance(
                name="c", endpoint="llava", model="llava", port=stage.b.port, generation=1, state=InstanceState.READY
            )
        )
        stage.registry.serve(endpoint)

    stage.run(replace())
    for _ in range(4):
        client.invoke_endpoint(EndpointName="llava", SessionId=make_session_id("c"), Body=b"{}")
    assert len(stage.a.received) == num_before
    assert taken.num_taken > num_taken

    stage.call(stage.registry.retire, stage.registry.get_endpoint("llava"))
    with pytest.raises(ClientError, match="not found"):
        client.invoke_endpoint(EndpointName="llava", SessionId=make_session_id("c"), Body=b"{}")


def test_a_declined_request_leaves_the_order_of_instances(make_stage: MakeStage) -> None:
    """A request that the fast path declines does not change the order of instances, so equal load spreads evenly."""
    stage = make_stage(path=FAST, names=("a", "b", "c"))
    client = stage.client()
    for _ in range(30):
        client.invoke_endpoint(EndpointName="llava", Body=b"{}")  # the first three find no idle connection

    assert [len(fake.received) for fake in stage.instances.values()] == [10, 10, 10]


@pytest.mark.slow
@pytest.mark.parametrize("path", [FAST, GENERAL])
def test_the_proxys_tests_pass_on_either_path(path: str) -> None:
    """The proxy's tests of requests pass with as many as possible on the fast path, and with none."""
    files = [f"tests/proxy/test_{name}.py" for name in SUITE]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env={**os.environ, PATH: path},
        capture_output=True,
        text=True,
        check=False,
        timeout=PROGRAM_S,
    )
    assert done.returncode == 0, done.stdout[-5000:]
