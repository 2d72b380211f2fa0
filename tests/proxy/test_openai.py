"""OpenAI's dialect at the proxy: paths, unchanged answers, and its error object for every failure."""

import json
import time
from typing import Any

import openai
import pytest

from tests.proxy.conftest import MakeStage, Stage, make_session_id, read_answer
from tests.proxy.fake_instance import Received, Wire, answering, refusing, silent, streaming
from torchmoor.config.limits import LimitSettings
from torchmoor.config.timeouts import TimeoutSettings
from torchmoor.proxy.instances.instance import InstanceState
from torchmoor.wire.response_ids import conversation_id, item_id, response_id

BASES = ("/v1", "/endpoints/llava/openai/v1")
BODY = b'{"messages": [{"role": "user", "content": "hi"}]}'
HEAD = {"id": "chatcmpl-1", "created": 7, "model": "llava"}
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def call(stage: Stage, path: str, body: bytes | None = BODY, **headers: str) -> tuple[int, dict[str, str], Any]:
    answer = stage.ask("GET" if body is None else "POST", path, body, headers)
    data = answer.read()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, json.loads(data)


def complete(stage: Stage, base: str = "/v1", **headers: str) -> tuple[int, dict[str, str], Any]:
    return call(stage, f"{base}/chat/completions", **headers)


def client(stage: Stage, base: str = "/v1", **options: Any) -> openai.OpenAI:
    """Return OpenAI's own client, configured with the address only."""
    made = openai.OpenAI(
        base_url=f"http://127.0.0.1:{stage.proxy.port}{base}", api_key="key", max_retries=0, timeout=60, **options
    )
    stage.close_later(made)
    return made


def behave(stage: Stage, behaviour: Any) -> None:
    stage.a.behave = stage.b.behave = behaviour


def chunk(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return b"data: %b\n\n" % json.dumps({**HEAD, "object": "chat.completion.chunk", "choices": [choice]}).encode()


@pytest.mark.parametrize("base", BASES)
def test_whole_answer_passes_untouched(stage: Stage, base: str) -> None:
    """A whole answer is unchanged on the endpoint's path and on the plain one; the key does not reach the instance."""
    body = b'{"id": "chatcmpl-1",  "choices": []}'
    behave(stage, answering(headers={"X-Torchmoor-Ttft-Ms": "3.1", "X-Request-Id": "torchserve"}, body=body))

    status, headers, answer = complete(stage, base, Authorization="Bearer secret")

    assert (status, answer) == (200, json.loads(body))
    assert headers["content-type"] == "application/json"
    assert headers["x-torchmoor-ttft-ms"] == "3.1"
    [seen] = stage.a.received + stage.b.received
    assert (seen.path, seen.body) == ("/predictions/llava", BODY)
    assert "authorization" not in seen.headers
    assert seen.headers["x-torchmoor-endpoint"] == "llava"
    assert headers["x-request-id"] == seen.headers["x-torchmoor-request-id"]


@pytest.mark.parametrize("base", BASES)
def test_openais_client_reads_a_stream(stage: Stage, base: str) -> None:
    """OpenAI's client reads a stream whose chunks are cut anywhere."""
    data = chunk({"role": "assistant", "content": ""}) + chunk({"content": "grün"}) + chunk({}, "stop")
    data += b"data: [DONE]\n\n"
    behave(stage, streaming([data[i : i + 7] for i in range(0, len(data), 7)], "text/event-stream"))

    stream = client(stage, base).chat.completions.create(model="llava", messages=MESSAGES, stream=True)
    choices = [part.choices[0] for part in stream]

    assert "".join(choice.delta.content or "" for choice in choices) == "grün"
    assert choices[-1].finish_reason == "stop"


def test_stream_passes_untouched(stage: Stage) -> None:
    data = chunk({"content": "x"}) + b"data: [DONE]\n\n"
    behave(stage, streaming([data], "text/event-stream"))
    answer = stage.ask("POST", "/v1/chat/completions", BODY)

    assert (answer.headers["content-type"], answer.read()) == ("text/event-stream", data)


@pytest.mark.parametrize(
    ("status", "code", "told", "kind", "exception"),
    [
        (400, "InvalidRequest", 400, "invalid_request_error", openai.BadRequestError),
        (429, "Overloaded", 429, "rate_limit_error", openai.RateLimitError),
        (507, "OutOfMemory", 503, "server_error", openai.InternalServerError),
        (504, "TurnTimedOut", 504, "server_error", openai.InternalServerError),
        (500, "InternalError", 500, "server_error", openai.InternalServerError),
    ],
)
def test_handlers_error_is_openais_exception(
    stage: Stage, status: int, code: str, told: int, kind: str, exception: type[openai.APIStatusError]
) -> None:
    """OpenAI's client raises the exception for the status, with the handler's code and message."""
    behave(stage, refusing(status, code, "the cause"))

    with pytest.raises(exception) as caught:
        client(stage).chat.completions.create(model="llava", messages=MESSAGES)

    error = caught.value
    assert (error.status_code, error.code, error.type) == (told, code, kind)
    assert error.body["message"] == "the cause"
    assert error.request_id


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (400, "ContextTooLong", "context_length_exceeded"),
        (415, "NotAnImage", "invalid_image_format"),
        (413, "ImageTooLarge", "image_too_large"),
        (403, "ImageUrlForbidden", "invalid_image_url"),
        (502, "ImageUnreachable", "failed_to_download_image"),
        (415, "UnsupportedMedia", "UnsupportedMedia"),
    ],
)
def test_an_input_that_cannot_be_used_is_a_bad_request(stage: Stage, status: int, kind: str, code: str) -> None:
    """OpenAI's client raises the exception for OpenAI's own status, with OpenAI's code."""
    behave(stage, refusing(status, kind, "the cause"))

    with pytest.raises(openai.BadRequestError, match="the cause") as caught:
        client(stage).chat.completions.create(model="llava", messages=MESSAGES)

    assert (caught.value.code, caught.value.type) == (code, "invalid_request_error")
    assert len(stage.a.received + stage.b.received) == 1


def test_a_response_that_cannot_be_continued_is_a_bad_request(stage: Stage) -> None:
    """One that cannot be retrieved is not found."""

    def create(code: str) -> None:
        body = json.dumps({"error": {"code": code, "message": "m", "param": "previous_response_id"}}).encode()
        behave(stage, answering(404, {"X-Torchmoor-Error": "ResponseUnknown"}, body))
        client(stage).responses.create(model="llava", input="x", previous_response_id="resp_x")

    with pytest.raises(openai.BadRequestError) as caught:
        create("previous_response_not_found")
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    with pytest.raises(openai.NotFoundError):
        create("not_found")


def test_param_of_a_handlers_error_is_kept(stage: Stage) -> None:
    """The handler's `param` and Retry-After reach the client."""
    body = json.dumps({"error": {"code": "Overloaded", "message": "m", "param": "n"}}).encode()
    behave(stage, answering(429, {"X-Torchmoor-Error": "Overloaded", "Retry-After": "4"}, body))

    _, headers, answer = complete(stage)

    assert answer["error"] == {"message": "m", "type": "rate_limit_error", "param": "n", "code": "Overloaded"}
    assert headers["retry-after"] == "4"


@pytest.mark.parametrize(("status", "told"), [(503, 503), (507, 503), (413, 413), (404, 502), (500, 502)])
def test_torchserves_own_error_is_openais_object(stage: Stage, status: int, told: int) -> None:
    behave(stage, refusing(status, None, "words"))

    found, _, answer = complete(stage)

    assert found == told
    assert set(answer["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("body", [b"", b"nonsense", b"[]", b'{"error": "text"}', b'{"error": {}}'])
def test_odd_error_body_is_still_openais_object(stage: Stage, body: bytes) -> None:
    """A truncated error of an instance becomes an error object without its message."""
    behave(stage, answering(400, {"X-Torchmoor-Error": "InvalidRequest"}, body))

    status, _, answer = complete(stage)

    assert (status, answer["error"]["code"]) == (400, "InvalidRequest")


@pytest.mark.parametrize("status", [429, 507])
def test_full_instance_is_replaced_by_another(stage: Stage, status: int) -> None:
    """A request without a session moves to an instance with room, with its whole body."""
    stage.a.behave = refusing(status, {429: "Overloaded", 507: "OutOfMemory"}[status], "full")

    found, headers, _ = complete(stage)

    assert (found, headers["x-torchmoor-instance"]) == (200, "b")
    assert [r.body for r in stage.a.received + stage.b.received] == [BODY, BODY]


def test_models_are_the_endpoints(stage: Stage) -> None:
    """GET /v1/models lists the endpoints, and one of them by name; an unknown one is OpenAI's 404."""
    openai_client = client(stage)
    a_day_ago = time.time() - 86_400

    assert [model.id for model in openai_client.models.list()] == ["llava"]
    assert [model.id for model in client(stage, BASES[1]).models.list()] == ["llava"]
    assert openai_client.models.retrieve("llava").owned_by == "torchmoor"
    assert a_day_ago < openai_client.models.retrieve("llava").created <= time.time()
    with pytest.raises(openai.NotFoundError) as caught:
        openai_client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/endpoints/other/openai/v1/chat/completions", BODY, "model_not_found"),
        ("/v1/audio/speech", BODY, "UnknownOperationException"),
        ("/v1/chat/completions", None, "UnknownOperationException"),
        ("/endpoints/llava/openai/v1/embeddings", BODY, "UnknownOperationException"),
    ],
)
def test_unknown_paths_are_openais_404(stage: Stage, path: str, body: bytes | None, code: str) -> None:
    """Every error below these paths is OpenAI's object."""
    status, _, answer = call(stage, path, body)

    assert (status, answer["error"]["code"]) == (404, code)


@pytest.mark.parametrize("base", ["", "/endpoints/llava/openai", "/endpoints/llava/v1"])
def test_a_wrong_base_url_is_explained(stage: Stage, base: str) -> None:
    """OpenAI's client shows which ones are right."""
    client = openai.OpenAI(base_url=stage.proxy.runtime_url + base, api_key="any", max_retries=0)

    with client, pytest.raises(openai.NotFoundError, match="begin with /v1, or with /endpoints/NAME/openai/v1: "):
        client.chat.completions.create(model="llava", messages=[{"role": "user", "content": "hi"}])


def test_target_model_is_refused_where_there_is_one(stage: Stage) -> None:
    """TargetModel is refused in OpenAI's form, because another model than the intended one would answer."""
    status, _, answer = complete(stage, **{"X-Amzn-SageMaker-Target-Model": "m0.tar.gz"})

    assert (status, answer["error"]["code"], answer["error"]["message"]) == (
        400,
        "ValidationError",
        "Endpoint llava is not a multi-model endpoint and does not support target model header.",
    )


def test_body_limit(make_stage: MakeStage) -> None:
    """A body beyond the limit gets 413, with or without a declared length."""
    stage = make_stage(limits=LimitSettings(max_passthrough_body_bytes=10))

    announced, _, answer = complete(stage)
    with stage.socket() as sock:
        sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n14\r\n" + bytes(20)
        )
        unannounced = read_answer(sock, to_end=True)

    assert (announced, answer["error"]["type"]) == (413, "invalid_request_error")
    assert unannounced.startswith(b"HTTP/1.1 413")


def test_no_instance_is_unavailable(stage: Stage) -> None:
    """Without an instance the answer is 503 with Retry-After."""
    stage.set_state(InstanceState.DOWN)

    status, headers, answer = complete(stage)

    assert (status, headers["retry-after"], answer["error"]["type"]) == (503, "5", "server_error")


def test_time_out_is_a_gateway_time_out(make_stage: MakeStage) -> None:
    """A time-out is 504, for which OpenAI's client has an exception."""
    stage = make_stage(timeouts=TimeoutSettings(model_timeout_s=0.1, sweep_interval_s=0.02))

    behave(stage, silent)

    with pytest.raises(openai.InternalServerError) as caught:
        client(stage).chat.completions.create(model="llava", messages=MESSAGES)
    assert caught.value.status_code == 504


def test_death_between_two_events_is_an_error_in_the_stream(stage: Stage) -> None:
    """OpenAI's client raises an exception after the text that it has read, and [DONE] is not sent."""

    async def dying(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/event-stream")
        await wire.chunk(chunk({"content": "half"}))
        wire.writer.close()

    behave(stage, dying)
    stream = client(stage).chat.completions.create(model="llava", messages=MESSAGES, stream=True)

    first = next(stream)

    assert first.choices[0].delta.content == "half"
    with pytest.raises(openai.APIError, match="broken off"):
        next(stream)


def test_death_within_an_event_cuts_the_connection(stage: Stage) -> None:
    """An instance's death within an event cuts the connection; an error event would become part of the broken one."""

    async def dying(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/event-stream")
        await wire.chunk(b'data: {"choices"')
        wire.writer.close()

    behave(stage, dying)
    with stage.socket() as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        try:
            answer = read_answer(sock, to_end=True)
        except ConnectionResetError:
            answer = b""

    assert not answer.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("instance", ["a", "b"])
def test_response_goes_where_its_session_is(stage: Stage, base: str, instance: str) -> None:
    """The id in the path or in the body finds the instance; method and path go along as a field of a POST."""
    behave(stage, answering(body=b"{}"))
    found = response_id(make_session_id(instance), 3)
    requests: list[tuple[str, str, dict[str, Any] | None]] = [
        ("GET", f"responses/{found}/input_items?limit=2", None),
        ("DELETE", f"responses/{found}", None),
        ("POST", f"responses/{found}/cancel", {}),
        ("POST", "responses", {"input": "x" * 20_000, "model": "llava", "previous_response_id": found}),
    ]

    for method, path, body in requests:
        assert stage.ask(method, f"{base}/{path}", None if body is None else json.dumps(body)).status == 200
        seen = getattr(stage, instance).received[-1]
        assert (seen.method, seen.path) == ("POST", "/predictions/llava")
        assert seen.headers["x-torchmoor-resource"] == f"{method} {path}"
        assert seen.body == (b"" if body is None else json.dumps(body).encode())
    assert len(getattr(stage, instance).received) == len(requests)


@pytest.mark.parametrize("before", ["", "x", "xx"])  # so that the limit cuts each byte of a character
@pytest.mark.parametrize("instance", ["a", "b"])
def test_conversation_may_be_an_object(stage: Stage, instance: str, before: str) -> None:
    """A conversation may be an object, as in OpenAI's client, and precede the question."""
    behave(stage, answering(body=b"{}"))
    place = {"id": conversation_id(make_session_id(instance))}
    body = json.dumps({"conversation": place, "input": before + "\u8272" * 400}, ensure_ascii=False)

    assert stage.ask("POST", "/v1/responses", body.encode()).getheader("x-torchmoor-instance") == instance


@pytest.mark.parametrize("instance", ["a", "b"])
@pytest.mark.parametrize("kind", ["message", "function_call", "reasoning"])
def test_items_that_are_named_lead_to_the_instance_of_the_last(stage: Stage, instance: str, kind: str) -> None:
    """Items named by id lead to the instance of the last one, whose KV cache has most of the conversation."""
    behave(stage, answering(body=b"{}"))
    names = [item_id(make_session_id(each), 1, 1, kind) for each in ("b" if instance == "a" else "a", instance)]
    first, last = ({"type": "item_reference", "id": name} for name in names)
    said = {"role": "user", "content": "Hello"}

    alone = {"id": names[1]}
    answer = {"type": "message", "id": names[0], "role": "assistant", "content": "Hi"}
    turned, nulls = {"id": names[1], "type": "item_reference"}, {"type": None, **alone}
    for reference in (last, turned, alone, nulls, {**alone, "type": None}):
        connection = stage.http()
        body = json.dumps({"model": "llava", "input": [said, first, {"id": names[0]}, said, reference, answer, said]})
        connection.request("POST", "/v1/responses", body)
        assert connection.getresponse().getheader("x-torchmoor-instance") == instance


def test_head_of_a_resource_is_refused(stage: Stage) -> None:
    """HEAD is refused, since the instance gets a POST, whose answer's body would be read as the next answer."""
    path = f"/v1/responses/{response_id(make_session_id('a'), 3)}"
    with stage.socket() as sock:
        sock.sendall(f"HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\nGET /ping HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        answers = b""
        while answers.count(b"\r\n\r\n") < 2:
            answers += sock.recv(65536)

    head, _, rest = answers.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404")
    assert rest.startswith(b"HTTP/1.1 200")
    assert not stage.a.received + stage.b.received


@pytest.mark.parametrize("base", BASES)
def test_an_uploads_name_goes_along(stage: Stage, base: str) -> None:
    """The proxy forwards a file's name, which TorchServe drops from the form; a client's own header is ignored."""
    behave(stage, answering(body=b"{}"))
    own = {"x-torchmoor-form-filename": "other.png"}

    for name in ('c "1".png', "größe.png", ""):
        client(stage, base).files.create(file=(name, b"x" * 100_000), purpose="vision", extra_headers=own)

    names = [each.headers.get("x-torchmoor-form-filename") for each in (*stage.a.received, *stage.b.received)]
    assert sorted(names, key=str) == [None, "c%20%221%22.png", "gr%C3%B6%C3%9Fe.png"]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize", "/endpoints/llava/openai/v1/tokenize"])
def test_tokens_are_asked_of_an_instance(stage: Stage, path: str) -> None:
    behave(stage, answering(body=b"{}"))
    assert stage.ask("POST", path, json.dumps({"prompt": "x"})).status == 200
    [seen] = [*stage.a.received, *stage.b.received]
    assert seen.headers["x-torchmoor-resource"] == "POST tokenize"
