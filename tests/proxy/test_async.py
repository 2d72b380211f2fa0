"""InvokeEndpointAsync with an unmodified boto3: each accepted request ends as its answer promised."""

import json
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from botocore.exceptions import ClientError
from click.testing import CliRunner, Result

from tests.proxy.conftest import MakeStage, Stage, read_answer
from tests.proxy.fake_instance import FakeInstance, Gate, Received, Wire, answering, refusing, silent
from tests.waiting import wait_until
from torchmoor.cli.main import main
from torchmoor.config.async_inference import AsyncEndpointSettings
from torchmoor.config.credentials import AccessKey, Credentials
from torchmoor.config.routing import LateBindingSettings, MultiModelSettings
from torchmoor.errors import ConfigError
from torchmoor.proxy.instances.endpoint import Endpoint
from torchmoor.proxy.instances.instance import Instance, InstanceState


@pytest.fixture
def stage(tmp_path: Path, make_stage: MakeStage) -> Stage:
    """Two instances, a queue and a folder."""
    return make_stage(async_folder=tmp_path)


def submit(stage: Stage, **members: Any) -> dict[str, Any]:
    members.setdefault("EndpointName", "llava")
    return stage.client().invoke_endpoint_async(**members)


def path_of(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


def until_there(url: str) -> bytes:
    wait_until(path_of(url).is_file, f"{url} is there")
    return path_of(url).read_bytes()


def refusal(stage: Stage, **members: Any) -> tuple[str, str]:
    with pytest.raises(ClientError) as caught:
        submit(stage, **members)
    error = caught.value.response["Error"]
    return error["Code"], error["Message"]


def test_inline_body_is_answered_under_the_promised_name(stage: Stage) -> None:
    """The answer is 202 with an id and both locations; the result is at the first, and nothing at the other."""
    stage.a.behave = stage.b.behave = answering(body=b'{"generated_text": "yes"}')

    answer = submit(stage, Body=b'{"inputs": "?"}', ContentType="application/json", Accept="application/json")

    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 202
    assert until_there(answer["OutputLocation"]) == b'{"generated_text": "yes"}'
    assert answer["OutputLocation"].endswith(f"/async-endpoint-outputs/llava/{answer['InferenceId']}.out")
    assert answer["FailureLocation"].endswith(f"/async-endpoint-failures/llava/{answer['InferenceId']}-error.out")
    assert not path_of(answer["FailureLocation"]).exists()
    [received] = stage.a.received + stage.b.received
    assert received.headers["x-torchmoor-endpoint"] == "llava"
    assert received.headers["content-type"] == "application/json"


def test_input_location_is_read_for_the_instance(stage: Stage, tmp_path: Path) -> None:
    """The body may be stored where InputLocation says."""
    (tmp_path / "inputs/in.bin").write_bytes(b"x" * 300_000)

    answer = submit(stage, InputLocation=(tmp_path / "inputs/in.bin").as_uri(), InferenceId="mine-1")

    until_there(answer["OutputLocation"])
    [received] = stage.a.received + stage.b.received
    assert received.body == b"x" * 300_000
    assert (answer["InferenceId"], received.headers["x-amzn-sagemaker-inference-id"]) == ("mine-1", "mine-1")


def test_filename_and_extension_name_the_result(stage: Stage) -> None:
    """Filename replaces the id, and S3OutputPathExtension is a folder."""
    answer = submit(stage, Body=b"{}", Filename="a.json", S3OutputPathExtension="mine/today")

    assert answer["OutputLocation"].endswith("/async-endpoint-outputs/llava/mine/today/a.json")
    until_there(answer["OutputLocation"])


@pytest.mark.parametrize(
    "members",
    [
        {"Filename": "hers.out"},
        {"S3OutputPathExtension": "hers.out"},
        {"InferenceId": "hers.out/x"},
        {"S3OutputPathExtension": "hers.out/deep", "Filename": "a.json"},
        {"Filename": "folder"},
    ],
)
@pytest.mark.parametrize("is_pending", [False, True])
def test_name_of_another_callers_result_is_refused(stage: Stage, members: Any, is_pending: bool) -> None:
    """A name that is, contains or lies below another request's result is refused before and after that is written."""
    gate = Gate()

    async def behave(received: Received, wire: Wire) -> None:
        await gate.pass_through()
        await wire.answer(body=b"hers")

    stage.a.behave = stage.b.behave = behave
    named = ({"InferenceId": "hers"}, {"S3OutputPathExtension": "folder"})
    hers = [submit(stage, Body=b"{}", **each) for each in named]
    if not is_pending:
        gate.open()
        for answer in hers:
            until_there(answer["OutputLocation"])

    code, message = refusal(stage, Body=b"{}", **members)
    gate.open()

    assert code == "ValidationError"
    assert "choose another Filename, S3OutputPathExtension or InferenceId" in message
    assert [until_there(answer["OutputLocation"]) for answer in hers] == [b"hers", b"hers"]


def test_model_error_becomes_a_failure_object(stage: Stage) -> None:
    """The reason has the same wording as for a real-time client."""
    stage.a.behave = stage.b.behave = refusing(400, "InvalidRequest", "no question")

    answer = submit(stage, Body=b"{}")

    text = until_there(answer["FailureLocation"]).decode()
    assert text.startswith('Received client error (400) from primary with message "')
    assert "no question" in text
    assert not path_of(answer["OutputLocation"]).exists()


def test_retried_submit_is_one_request(stage: Stage) -> None:
    """boto3 repeats an unanswered request with the same invocation id and gets the first request's answer."""
    client = stage.client()
    ids = []

    client.meta.events.register("before-send.sagemaker-runtime.InvokeEndpointAsync", _same_invocation)
    for _ in range(3):
        answer = client.invoke_endpoint_async(EndpointName="llava", Body=b"{}")
        ids.append(answer["InferenceId"])
        until_there(answer["OutputLocation"])

    assert len(set(ids)) == 1
    assert len(stage.a.received + stage.b.received) == 1


def test_inference_id_of_another_request_is_refused(stage: Stage) -> None:
    """Two requests cannot have the same result."""
    submit(stage, Body=b"{}", InferenceId="mine")

    code, message = refusal(stage, Body=b"{}", InferenceId="mine")

    assert code == "ValidationError"
    assert "mine is in use" in message


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({}, "has neither"),
        ({"Body": b"x", "InputLocation": "s3://b/k"}, "has both"),
        ({"Body": b"x" * 128_001}, "up to 128000 bytes"),
        ({"InputLocation": "ftp://host/x"}, "(https://, s3://, or file:// for configured directories)"),
        ({"InputLocation": "file:///etc/passwd"}, "below the directories"),
        ({"InputLocation": "https://example.com/x"}, "https"),
        ({"Body": b"x", "Filename": "a.b.c"}, "filename"),
        ({"Body": b"x", "Filename": "../up"}, "filename"),
        ({"Body": b"x", "S3OutputPathExtension": "a/../../b"}, "S3OutputPathExtension"),
        ({"Body": b"x", "InferenceId": "a/../../b"}, "InferenceId"),
        ({"Body": b"x", "EndpointName": "nobody"}, "not found"),
    ],
)
def test_wrong_request_is_refused_and_nothing_is_queued(stage: Stage, members: Any, words: str) -> None:
    """Each error is reported with its reason at submission, never later in a failure object."""
    code, message = refusal(stage, **members)

    assert code == "ValidationError"
    assert words in message
    assert stage.admin("/async-requests").json()["requests"] == []


@pytest.mark.parametrize("key", ["my file.json", "\u00e9.json", "\u65e5  \u672c/100%.json"])
def test_a_key_in_s3_has_any_printable_characters(tmp_path: Path, make_stage: MakeStage, key: str) -> None:
    """A key may have any printable characters; boto3 signs them and sends them as UTF-8."""
    keys = {"AKIDEXAMPLE": AccessKey(secret="secret" * 4)}
    stage = make_stage(async_folder=tmp_path, credentials=Credentials(keys=keys))
    for name in stage.instances:  # nothing is read from S3
        assert stage.admin(f"/instances/{name}/drain", "POST").status_code == 200
    client = stage.client(key_id="AKIDEXAMPLE", secret="secret" * 4)

    client.invoke_endpoint_async(EndpointName="llava", InputLocation=f"s3://inp/{key}")

    [request] = stage.admin("/async-requests").json()["requests"]
    assert request["input_location"] == f"s3://inp/{key}"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"s3://b/\xff", "must be UTF-8"),
        (b"s3://b/a\tb", "failed to satisfy constraint"),
        (b"s3:// b/a", "failed to satisfy constraint"),
        ("s3://b/\u2028".encode(), "printable characters"),
        ("s3://b/\u0085".encode(), "printable characters"),
        (b"s3://b", "s3://bucket/key"),
        (b"file:///a b", "percent-encode spaces"),
        ("https://host/\u00e9".encode(), "percent-encode spaces"),
    ],
)
def test_a_location_of_other_characters_is_refused(stage: Stage, value: bytes, words: str) -> None:
    """The message has the rule that was broken."""
    answer = stage.ask("POST", "/endpoints/llava/async-invocations", headers={"X-Amzn-SageMaker-InputLocation": value})

    assert answer.status == 400
    assert words in json.loads(answer.read())["Message"]


@pytest.mark.parametrize(
    ("header", "value"),
    [("RequestTTLSeconds", "59"), ("RequestTTLSeconds", "9999999999"), ("InvocationTimeoutSeconds", "3601")],
)
def test_numbers_are_checked(stage: Stage, header: str, value: str) -> None:
    """boto3 checks only the minimum, and other clients check nothing."""
    answer = stage.ask(
        "POST", "/endpoints/llava/async-invocations", body=b"{}", headers={f"X-Amzn-SageMaker-{header}": value}
    )

    body = json.loads(answer.read())
    assert answer.status == 400
    assert f"'{header[0].lower()}{header[1:]}'".lower() in body["Message"].lower()
    assert "than or equal to" in body["Message"]


def test_invocation_id_is_not_cut(stage: Stage) -> None:
    """Otherwise the second of two ids with the same beginning would get the first one's answer."""
    answer = stage.ask("POST", "/endpoints/llava/async-invocations", b"{}", {"amz-sdk-invocation-id": "i" * 257})

    assert (answer.status, b"256 characters" in answer.read()) == (400, True)


def test_clients_who_wait_go_first(tmp_path: Path, make_stage: MakeStage) -> None:
    """While a client waits for an instance, no asynchronous request gets one."""
    gate = Gate()

    async def behave(received: Received, wire: Wire) -> None:
        if received.body == b"first":
            await gate.pass_through()
        await wire.answer(body=received.body)

    stage = make_stage(async_folder=tmp_path, late_binding=LateBindingSettings(), capacity=1, names=("a",))
    stage.a.behave = behave
    client = stage.client()
    first = submit(stage, Body=b"first")
    gate.wait_reached()
    others = [submit(stage, Body=b"other") for _ in range(3)]
    real_time = threading.Thread(target=lambda: client.invoke_endpoint(EndpointName="llava", Body=b"live"))
    real_time.start()
    [dispatcher] = stage.proxy.data.dispatchers.all()
    stage.until(lambda: dispatcher.num_waiting == 1, "the client waits")

    gate.open()
    real_time.join(60)
    for answer in (first, *others):
        until_there(answer["OutputLocation"])

    assert [each.body for each in stage.a.received] == [b"first", b"live", b"other", b"other", b"other"]


def test_requests_at_a_time_are_as_configured(tmp_path: Path, make_stage: MakeStage) -> None:
    """MaxConcurrentInvocationsPerInstance bounds the requests that run at each instance."""
    gate = Gate()
    config = AsyncEndpointSettings(max_concurrent_per_instance=2)
    stage = make_stage(async_folder=tmp_path, async_config=config)
    stage.a.behave = stage.b.behave = gate.behave
    answers = [submit(stage, Body=b"{}") for _ in range(10)]

    wait_until(lambda: len(stage.a.received) == len(stage.b.received) == 2, "four run")
    metrics = stage.proxy.data.async_inference.endpoints["llava"].metrics
    stage.until(lambda: (metrics.num_running, metrics.num_waiting) == (4, 6), "the others wait")
    assert stage.outstanding() == 4
    gate.open()

    for answer in answers:
        until_there(answer["OutputLocation"])


def test_signed_requests_are_their_senders(tmp_path: Path, make_stage: MakeStage) -> None:
    """The signature is checked, and the same invocation id of two principals is two requests."""
    keys = {name: AccessKey(secret=name.lower() * 4) for name in ("AKIDALICE", "AKIDBOB")}
    stage = make_stage(async_folder=tmp_path, credentials=Credentials(keys=keys))
    ids = []
    for name, key in keys.items():
        client = stage.client(key_id=name, secret=key.secret)
        client.meta.events.register("before-send.sagemaker-runtime.InvokeEndpointAsync", _same_invocation)
        answer = client.invoke_endpoint_async(EndpointName="llava", Body=b"{}")
        until_there(answer["OutputLocation"])
        ids.append(answer["InferenceId"])

    assert len(set(ids)) == 2
    principals = {each.headers["x-torchmoor-principal"] for each in stage.a.received + stage.b.received}
    assert len(principals) == 2
    with pytest.raises(ClientError, match="InvalidSignature"):
        stage.client(key_id="AKIDBOB", secret="wrong" * 8).invoke_endpoint_async(EndpointName="llava", Body=b"{}")


def _same_invocation(request: Any, **_: Any) -> None:
    request.headers["amz-sdk-invocation-id"] = "11111111-2222-3333-4444-555555555555"


def test_head_of_a_result_has_no_body(stage: Stage) -> None:
    """The answer to HEAD has no body, whose bytes would be read as the connection's next answer."""
    stage.a.behave = stage.b.behave = answering(body=b"result")
    submit(stage, Body=b"{}", InferenceId="one")
    wait_until(lambda: stage.admin("/async-requests/one").json()["state"] == "COMPLETED", "it has ended")
    head = b"%b HTTP/1.1\r\nHost: localhost\r\n%b\r\n"

    with socket.create_connection(("127.0.0.1", stage.proxy.admin_port), timeout=60) as sock:
        sock.sendall(head % (b"HEAD /async-requests/one/result", b""))
        sock.sendall(head % (b"GET /livez", b"Connection: close\r\n"))
        received = read_answer(sock, to_end=True)

    first, second, _ = received.split(b"\r\n\r\n")
    assert b"Content-Length: 6" in first
    assert second.startswith(b"HTTP/1.1 200")


def test_client_that_leaves_within_a_result_is_no_fault(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """A client that disconnects in mid-result, as in `torchmoor async get ID | head`, causes no traceback."""
    stage.a.behave = stage.b.behave = answering(body=b"x" * 20_000_000)
    submit(stage, Body=b"{}", InferenceId="one")
    wait_until(lambda: stage.admin("/async-requests/one").json()["state"] == "COMPLETED", "it has ended")

    with socket.create_connection(("127.0.0.1", stage.proxy.admin_port), timeout=60) as sock:
        sock.sendall(b"GET /async-requests/one/result HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert sock.recv(1)

    stage.until(lambda: stage.extra_tasks() == [], "the admin plane has noticed")
    assert "Traceback" not in caplog.text


def test_admin_plane_lists_shows_cancels_and_fetches(stage: Stage) -> None:
    """The admin plane forwards a result unchanged."""
    gate = Gate()

    async def behave(received: Received, wire: Wire) -> None:
        if received.body == b"slow":
            gate.reached.set()
            await wire.until_closed()
        else:
            await wire.answer(body=b"result", headers={"Content-Type": "text/x-result"})

    stage.a.behave = stage.b.behave = behave
    quick = submit(stage, Body=b"quick", InferenceId="a/b c")
    until_there(quick["OutputLocation"])
    slow = submit(stage, Body=b"slow", InferenceId="slow")
    gate.wait_reached()

    wait_until(lambda: stage.admin("/async-requests/a%2Fb%20c").json()["state"] == "COMPLETED", "it has ended")
    result = stage.admin("/async-requests/a%2Fb%20c/result")
    assert (result.content, result.headers["Content-Type"]) == (b"result", "text/x-result")
    assert "sandbox" in result.headers["Content-Security-Policy"], "a model's page is none of the admin plane's"
    assert result.headers["Content-Disposition"] == "attachment"
    assert result.headers["X-Content-Type-Options"] == "nosniff"
    cancelled = stage.admin("/async-requests/slow/cancel", "POST")
    assert (cancelled.status_code, cancelled.json()) == (200, {"inference_id": "slow", "state": "CANCELLED"})
    assert until_there(slow["FailureLocation"])
    wait_until(lambda: stage.admin("/async-requests/slow").json()["state"] == "CANCELLED", "it has ended")
    wait_until(lambda: stage.a.cancels + stage.b.cancels, "a cancellation")

    listed = stage.admin("/async-requests").json()["requests"]
    assert [(each["inference_id"], each["state"]) for each in listed] == [("a/b c", "COMPLETED"), ("slow", "CANCELLED")]
    for query in ("state=cancelled", "after=a/b%20c"):
        [found] = stage.admin(f"/async-requests?{query}").json()["requests"]
        assert found["inference_id"] == "slow"
    assert stage.admin("/async-requests/nobody").status_code == 404
    assert stage.admin("/async-requests/slow/result").status_code == 409
    late = stage.admin("/async-requests/a%2Fb%20c/cancel", "POST")
    assert (late.status_code, late.json()) == (409, {"inference_id": "a/b c", "state": "COMPLETED"})
    for query in ("state=ODD", "limit=0", f"limit={'9' * 5000}", "endpoint=odd"):
        assert stage.admin(f"/async-requests?{query}").status_code == 400


def test_metrics_are_cloudwatchs(stage: Stage) -> None:
    """The metrics have the names that dashboards and policies of SageMaker use."""
    answer = submit(stage, Body=b"{}")
    until_there(answer["OutputLocation"])
    counted = 'InvocationsProcesssed_total{endpoint="llava",variant="AllTraffic"} 1.0'
    wait_until(lambda: counted in stage.admin("/metrics").text, "counted")
    text = stage.admin("/metrics").text
    for name in (
        *("ApproximateBacklogSize", "ApproximateBacklogSizePerInstance", "ApproximateAgeOfOldestRequest"),
        *("HasBacklogWithoutCapacity", "InvocationFailures_total", "ExpiredRequests_total", "TimeInBacklog_sum"),
        *("TotalProcessingTime_sum", "RequestDownloadFailures_total", "ResponseUploadFailures_total"),
        *("NotificationFailures_total", "RequestDownloadLatency_sum", "ResponseUploadLatency_sum"),
    ):
        assert f'{name}{{endpoint="llava"' in text


def test_restart_goes_on_where_it_was(tmp_path: Path, make_stage: MakeStage) -> None:
    """A request accepted with 202 before a stop is answered after the next start."""

    def hang(instances: Mapping[str, FakeInstance]) -> None:
        instances["a"].behave = silent

    def answer_later(instances: Mapping[str, FakeInstance]) -> None:
        instances["a"].behave = answering(body=b"later")

    with Stage(async_folder=tmp_path, prepare=hang, names=("a",)) as first:
        answers = [submit(first, Body=b"{}") for _ in range(5)]
        wait_until(lambda: first.a.received, "one runs")

    make_stage(async_folder=tmp_path, prepare=answer_later, names=("a",))

    for answer in answers:
        assert until_there(answer["OutputLocation"]) == b"later"


def test_endpoint_with_many_models_cannot_be_asynchronous(tmp_path: Path, make_stage: MakeStage) -> None:
    """As on SageMaker; the proxy refuses the configuration at the start."""
    with pytest.raises(ConfigError, match="many models"):
        make_stage(async_folder=tmp_path, multi_model=MultiModelSettings())


def command(stage: Stage, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["async", *arguments, "--admin-url", stage.proxy.admin_url])


def test_command_line_lists_shows_fetches_and_cancels(stage: Stage, tmp_path: Path) -> None:
    """`torchmoor async` prints text for people and JSON for programs."""
    stage.a.behave = stage.b.behave = answering(body=b"result")
    answer = submit(stage, Body=b"{}", InferenceId="a/b c")
    until_there(answer["OutputLocation"])
    wait_until(lambda: json.loads(command(stage, "status", "a/b c", "--json").stdout)["state"] == "COMPLETED", "ended")

    listed = command(stage, "list")
    assert "llava: 0 waiting, 0 running" in listed.stdout
    assert "a/b c" in listed.stdout
    assert json.loads(command(stage, "list", "--state", "completed", "--json").stdout)["requests"][0]["attempts"] == 1
    assert "state: COMPLETED" in command(stage, "status", "a/b c").stdout
    assert command(stage, "get", "a/b c").stdout == "result"
    told = command(stage, "get", "a/b c", "-o", str(tmp_path / "out"), "--json")
    assert json.loads(told.stdout)["bytes"] == 6
    assert (tmp_path / "out").read_bytes() == b"result"
    late = command(stage, "cancel", "a/b c")
    assert (late.exit_code, late.stdout) == (1, "")
    assert "It is COMPLETED" in late.stderr
    assert "There is no request 'unknown'" in command(stage, "get", "unknown", "-o", str(tmp_path / "none")).stderr
    assert not (tmp_path / "none").exists()


def test_command_line_says_that_nobody_answers() -> None:
    """The message contains the address that was tried."""
    result = CliRunner().invoke(main, ["async", "list", "--admin-url", "http://127.0.0.1:9"])

    assert result.exit_code == 3
    assert "no answer from the admin plane at http://127.0.0.1:9" in result.stderr


def test_an_update_waits_for_running_requests(stage: Stage) -> None:
    """A request that runs when the endpoint's instances are replaced ends at the old ones, and can be cancelled until
    then.

    The next request runs on the new ones.
    """
    gate = Gate()

    async def behave(received: Received, wire: Wire) -> None:
        await gate.pass_through()
        await wire.answer(body=b"first")

    async def wait_for_cancel(received: Received, wire: Wire) -> None:
        cancelled.reached.set()
        await wire.until_closed()

    async def replace(generation: int, instance: FakeInstance) -> Endpoint:
        settings = stage.registry.get_endpoint("llava").settings
        endpoint = stage.registry.stage(settings, generation)
        stage.registry.add(
            Instance(
                name=f"new-{generation}",
                endpoint="llava",
                generation=generation,
                model="llava",
                port=instance.port,
                state=InstanceState.READY,
            )
        )
        stage.registry.serve(endpoint)
        return endpoint

    stage.run(dismiss(stage, "b"))
    stage.a.behave, stage.b.behave, cancelled = behave, answering(body=b"second"), Gate()
    first = submit(stage, Body=b"{}")
    gate.wait_reached()

    stage.run(replace(1, stage.b))
    second = submit(stage, Body=b"{}")
    assert until_there(second["OutputLocation"]) == b"second"
    gate.open()

    assert until_there(first["OutputLocation"]) == b"first"
    assert (len(stage.a.received), len(stage.b.received)) == (1, 1)
    stage.b.behave = wait_for_cancel
    third = submit(stage, Body=b"{}")
    cancelled.wait_reached()
    last = stage.run(replace(2, stage.a))
    assert stage.admin(f"/async-requests/{third['InferenceId']}/cancel", "POST").status_code == 200
    stage.until(lambda: stage.instance("new-1").outstanding == 0, "the cancelled request has left")
    stage.call(stage.registry.retire, last)


async def dismiss(stage: Stage, name: str) -> None:
    stage.registry.dismiss(name)
