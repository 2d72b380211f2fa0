"""OpenAI's paths without an endpoint in front of several: the body's `model` selects the endpoint."""

import json
from typing import Any

import openai
import pytest
import requests

from tests.proxy.conftest import MakeStage, Stage, read_answer
from tests.proxy.fake_instance import Gate, Received, Wire, answering, dying, silent, streaming
from tests.proxy.test_access import CREDENTIALS, TOKEN, signed
from tests.proxy.test_openai import MESSAGES, behave, call, chunk, client
from torchmoor.config.limits import LimitSettings
from torchmoor.config.routing import LateBindingSettings, MultiModelSettings
from torchmoor.config.timeouts import TimeoutSettings

PATH = "/v1/chat/completions"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
TWO: Any = {"endpoints": {"a": "sees", "b": "talks"}}


@pytest.fixture
def stage(make_stage: MakeStage) -> Stage:
    """Two endpoints with one instance each."""
    return make_stage(**TWO)


def told(error: openai.APIStatusError) -> tuple[Any, ...]:
    return error.status_code, error.type, error.param, error.code


def test_openais_client_is_served_by_the_endpoint_of_its_model(stage: Stage) -> None:
    """Whole and streamed answers pass; the body, which names the model last, arrives as it was sent."""
    stage.a.behave = answering(body=b'{"id": "1", "choices": [], "model": "sees"}')
    stage.b.behave = streaming([chunk({"content": "hi"}), b"data: [DONE]\n\n"], "text/event-stream")
    gpt = client(stage)

    whole = gpt.chat.completions.create(model="sees", messages=MESSAGES)
    stream = gpt.chat.completions.create(model="talks", messages=MESSAGES, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in stream)

    assert (whole.model, text) == ("sees", "hi")
    [whole_seen], [stream_seen] = stage.a.received, stage.b.received
    assert json.loads(whole_seen.body) == {"messages": MESSAGES, "model": "sees"}
    assert stream_seen.headers["x-torchmoor-endpoint"] == "talks"
    assert int(stream_seen.headers["content-length"]) == len(stream_seen.body)


def test_unknown_model_is_told_what_there_is(stage: Stage) -> None:
    """A completion and a query for the model itself get OpenAI's 404."""
    gpt = client(stage)

    with pytest.raises(openai.NotFoundError, match=r"`gpt-5` does not exist\. There is: `sees`, `talks`") as completing:
        gpt.chat.completions.create(model="gpt-5", messages=MESSAGES)
    with pytest.raises(openai.NotFoundError, match="There is: `sees`, `talks`") as looking:
        gpt.models.retrieve("gpt-5")

    assert told(completing.value) == told(looking.value) == (404, "invalid_request_error", "model", "model_not_found")
    assert [model.id for model in gpt.models.list()] == ["sees", "talks"]
    assert gpt.models.with_raw_response.list().headers["x-request-id"]
    assert stage.a.received + stage.b.received == []


@pytest.mark.parametrize("body", [b"", b"{}", b"no json", b'{"messages": [{"model": "sees"}]}'])
def test_missing_model_is_asked_for(stage: Stage, body: bytes) -> None:
    """The answer is 400 and names the field."""
    status, _, answer = call(stage, PATH, body)

    assert (status, answer["error"]["param"]) == (400, "model")
    assert "several endpoints" in answer["error"]["message"]
    assert ("not valid JSON" in answer["error"]["message"]) == (body == b"no json")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b'{"messages": [{],"model": "sees"}', "in double quotes at line 1 column 16."),
        (b"\xff", "The body is not valid JSON."),
        (b"[" * 10_000, "The body is not valid JSON."),
        (b"no json" + bytes(20_000), "/openai/v1."),  # a long body is not checked
    ],
)
def test_a_body_that_is_not_json_names_no_model(stage: Stage, body: bytes, problem: str) -> None:
    """The error says so: the model may be behind the mistake."""
    status, _, answer = call(stage, PATH, body)

    assert status == 400
    assert answer["error"]["message"].endswith(problem)


def test_files_are_listed_on_an_endpoints_own_path(stage: Stage) -> None:
    """Files are listed on an endpoint's own path, because nothing else in the request names the endpoint."""
    status, _, answer = call(stage, "/v1/files", None)
    listed, headers, _ = call(stage, "/endpoints/talks/openai/v1/files?limit=1", None)

    assert (status, answer["error"]["param"]) == (400, "model")
    assert "/endpoints/NAME/openai/v1" in answer["error"]["message"]
    assert (listed, headers["x-torchmoor-instance"]) == (200, "b")
    assert stage.b.received[0].headers["x-torchmoor-resource"] == "GET files?limit=1"


@pytest.mark.parametrize("body", [b"{}", b'{"model": "talks"}'])
def test_conversations_are_opened_on_an_endpoints_own_path(stage: Stage, body: bytes) -> None:
    """A conversation has no `model`, so the error does not suggest to name one, which the instance would refuse."""
    status, _, answer = call(stage, "/v1/conversations", body)
    opened, headers, _ = call(stage, "/endpoints/talks/openai/v1/conversations", b"{}")

    assert (status, answer["error"]["param"]) == (400, "model")
    assert answer["error"]["message"] == (
        "There are several endpoints: use the base URL of one, /endpoints/NAME/openai/v1."
    )
    assert (opened, headers["x-torchmoor-instance"]) == (200, "b")


def test_bad_header_is_told_before_the_instance_is_chosen(stage: Stage) -> None:
    """The checks are the same as on an endpoint's own path."""
    variant = {"X-Amzn-SageMaker-Target-Variant": "other"}

    status, _, answer = call(stage, PATH, b'{"model": "sees"}', **variant)

    assert (status, "Variant other not found for endpoint sees" in answer["error"]["message"]) == (400, True)


def test_model_beyond_the_limit_is_not_looked_for(make_stage: MakeStage) -> None:
    """A model beyond the limit is not searched for, and the error says where to name it."""
    stage = make_stage(limits=LimitSettings(max_unrouted_body_bytes=1000, max_replay_body_bytes=1000), **TWO)
    pad = "x" * 3_000_000
    first = json.dumps({"model": "talks", "pad": pad}).encode()

    found, headers, _ = call(stage, PATH, first)
    lost, _, answer = call(stage, PATH, json.dumps({"pad": pad, "model": "talks"}).encode())

    assert (found, headers["x-torchmoor-instance"], stage.b.received[0].body) == (200, "b", first)
    assert lost == 400
    assert "first 1000 bytes" in answer["error"]["message"]
    assert "/endpoints/NAME/openai/v1" in answer["error"]["message"]


def test_adapter_beyond_the_limit_is_not_the_base_model(make_stage: MakeStage) -> None:
    """A model beyond the limit may be an adapter, so the request is refused instead of using the base model."""
    limits = LimitSettings(max_unrouted_body_bytes=1000)
    stage = make_stage(limits=limits, endpoints={"a": "sees"}, multi_model=MultiModelSettings(are_adapters=True))
    pad = "x" * 2000

    found, _, _ = call(stage, PATH, json.dumps({"model": "sees/red", "pad": pad}).encode())
    lost, _, answer = call(stage, PATH, json.dumps({"pad": pad, "model": "sees/red"}).encode())

    assert (found, stage.a.received[0].headers["x-amzn-sagemaker-target-model"]) == (200, "red")
    assert (lost, answer["error"]["param"], len(stage.a.received)) == (400, "model", 1)
    assert "first 1000 bytes" in answer["error"]["message"]


def test_adapter_behind_too_many_values_is_not_the_base_model(make_stage: MakeStage) -> None:
    """The search ends after too many values, and the request is refused instead of using the base model."""
    stage = make_stage(endpoints={"a": "sees"}, multi_model=MultiModelSettings(are_adapters=True))

    lost, _, answer = call(stage, PATH, json.dumps({"pad": [[]] * 20_000, "model": "sees/red"}).encode())

    assert (lost, answer["error"]["param"], stage.a.received) == (400, "model", [])
    assert "before the first 20000 brackets and strings" in answer["error"]["message"]


def test_body_over_the_dialects_limit_is_refused(make_stage: MakeStage) -> None:
    """The answer is 413, with or without Content-Length, before and after the endpoint is known."""
    stage = make_stage(limits=LimitSettings(max_passthrough_body_bytes=40), **TWO)
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

    announced, _, _ = call(stage, PATH, bytes(41))
    unannounced = stage.raw(chunked + b"29\r\n" + bytes(41))

    assert (announced, unannounced[:12]) == (413, b"HTTP/1.1 413")


def test_time_out_is_as_on_the_endpoints_path(make_stage: MakeStage) -> None:
    stage = make_stage(timeouts=TimeoutSettings(model_timeout_s=0.2, sweep_interval_s=0.02), **TWO)
    behave(stage, silent)

    with pytest.raises(openai.InternalServerError) as caught:
        client(stage).chat.completions.create(model="sees", messages=MESSAGES)

    assert caught.value.status_code == 504


def test_client_that_leaves_is_as_on_the_endpoints_path(stage: Stage) -> None:
    """A disconnect cancels the work at the instance and releases the lease."""
    behave(stage, silent)

    with stage.socket() as leaving:
        leaving.sendall(HEAD + b'Content-Length: 18\r\n\r\n{"model": "talks"}')
        stage.until(lambda: stage.b.received, "the request at its instance")

    stage.until(lambda: stage.b.cancelled, "the cancel operation")
    stage.until(lambda: stage.outstanding() == 0, "the lease released")


def test_dead_instance_is_replaced_by_another_of_the_endpoint(make_stage: MakeStage) -> None:
    """The request is repeated with its whole body, which the proxy has kept."""
    stage = make_stage(names=("a", "b", "c"), endpoints={"a": "sees", "b": "sees", "c": "talks"})

    stage.a.behave = dying
    for _ in range(2):
        status, headers, _ = call(stage, PATH, b'{"model": "sees"}')
        assert (status, headers["x-torchmoor-instance"]) == (200, "b")


def test_request_waits_for_its_endpoints_instance(make_stage: MakeStage) -> None:
    """With late binding a request waits in its endpoint's queue, and the other endpoint is not delayed."""
    stage = make_stage(capacity=1, late_binding=LateBindingSettings(), **TWO)
    gate = Gate()
    stage.a.behave = gate.behave
    first, second = stage.http(), stage.http()
    first.request("POST", PATH, b'{"model": "sees"}')
    gate.wait_reached()
    second.request("POST", PATH, b'{"model": "sees"}')
    stage.until(lambda: sum(d.num_waiting for d in stage.proxy.data.dispatchers.all()) == 1, "the second waits")

    other, _, _ = call(stage, PATH, b'{"model": "talks"}')
    gate.open()

    assert [first.getresponse().status, second.getresponse().status, other] == [200, 200, 200]


def test_signature_is_checked_before_the_model_is_looked_for(make_stage: MakeStage) -> None:
    """A caller without the secret learns nothing about the models; other callers are served."""
    stage = make_stage(credentials=CREDENTIALS, **TWO)

    good = signed(stage, b'{"model": "sees"}', path=PATH)
    answers = [
        requests.post(good.url, data, headers=dict(good.headers.items()), timeout=60)
        for data in (b'{"model": "sees"}', b'{"model": "oops"}')
    ]
    gpt = client(stage).with_options(api_key=TOKEN)
    with pytest.raises(openai.NotFoundError, match="There is: `sees`"):
        gpt.chat.completions.create(model="gpt-5", messages=MESSAGES)

    assert [answer.status_code for answer in answers] == [200, 401]
    assert "sees" not in answers[1].text
    assert [seen.body for seen in stage.a.received] == [b'{"model": "sees"}']


def test_a_model_that_is_no_text_in_utf_8_is_unknown(stage: Stage) -> None:
    """A model name with a lone surrogate, which JSON allows, is unknown."""
    status, _, answer = call(stage, PATH, b'{"model": "\\ud800"}')

    assert (status, answer["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b'{"model": "talks"}'),
        ("/endpoints/talks/openai/v1/responses", b'{"input": "Hi"}'),
        ("/v1/responses", b'{"model": "talks", "input": "Hi"}'),
    ],
)
def test_an_endpoint_deleted_while_its_request_arrives_is_unknown(
    make_stage: MakeStage, path: str, body: bytes
) -> None:
    """An endpoint that is deleted between a request's head and body is unknown."""
    stage = make_stage(names=("a", "b", "c"), endpoints={"a": "sees", "b": "talks", "c": "hears"})

    async def delete() -> None:
        endpoint = stage.registry.get_endpoint("talks")
        stage.registry.retire(endpoint)
        stage.registry.dismiss("b")
        stage.registry.forget(endpoint)

    with stage.socket() as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        client.sendall(body[:1])
        stage.until(lambda: stage.proxy.data.parts.arriving.num_bytes, "the head is read")
        stage.run(delete())
        client.sendall(body[1:])
        answer = read_answer(client)

    assert answer.startswith(b"HTTP/1.1 404 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "model_not_found"


def test_a_chunked_request_for_a_resource_has_one_length(stage: Stage) -> None:
    """A chunked request becomes a POST with one length.

    A second would make the instance read the body as another request.
    """
    line = b"GET /endpoints/sees/openai/v1/responses/resp_x HTTP/1.1\r\n"

    answer = stage.raw(line + b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 200")
    assert [(each.headers["content-length"], each.body) for each in stage.a.received] == [("5", b"hello")]


def test_a_connection_with_unsent_bytes_is_not_used_again(stage: Stage) -> None:
    """A connection on which an instance answered before reading the whole body is closed, not reused."""

    async def answer_unread(request: Received, wire: Wire) -> None:
        await wire.answer(413)
        await wire.until_closed()

    stage.a.reads_bodies = False
    behave(stage, answer_unread)

    first, _, _ = call(stage, PATH, json.dumps({"model": "sees", "pad": "x" * 30_000_000}).encode())

    assert first == 413
    stage.until(lambda: stage.a.num_open == 0, "the connection is closed")
