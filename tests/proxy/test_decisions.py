"""GET /decisions: the instance, reason and result of each request."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
from botocore.exceptions import ClientError

from tests.proxy.conftest import MakeStage, Stage, make_session_id
from tests.proxy.fake_instance import Received, Wire, answering, refusing
from tests.waiting import wait_until
from torchmoor.config.observe import ObserveSettings
from torchmoor.config.routing import VariantSettings
from torchmoor.proxy.instances.instance import InstanceState
from torchmoor.wire import headers
from torchmoor.wire.continuation import PieceKind, mark_piece
from torchmoor.wire.session_ids import session_hash


def decisions(stage: Stage, query: str = "") -> list[dict[str, Any]]:
    answer = stage.admin(f"/decisions{query}")
    assert answer.status_code == 200, answer.text
    return answer.json()["decisions"]


def is_noted_twice(stage: Stage) -> bool:
    return len(decisions(stage)) == 2


def test_each_request_is_there_with_its_reason_and_end(stage: Stage) -> None:
    """The newest decision is first; a session has its hash and never its id."""
    client = stage.client()
    session_id = make_session_id("b")
    client.invoke_endpoint(EndpointName="llava", Body=b"{}", SessionId=session_id)
    stage.instances["a"].behave = stage.instances["b"].behave = answering(400)
    with pytest.raises(ClientError):
        client.invoke_endpoint(EndpointName="llava", Body=b"{}")

    wait_until(lambda: len(decisions(stage)) == 2, "both are over")
    refused, turn = decisions(stage)
    assert (turn["instance"], turn["reason"], turn["outcome"], turn["status"]) == ("b", "session", "answered", 200)
    assert (turn["endpoint"], turn["variant"], turn["operation"]) == ("llava", "AllTraffic", "InvokeEndpoint")
    assert len(turn["session"]) == 16
    assert turn["ms"] > 0
    assert turn["time"] <= refused["time"]
    assert (refused["reason"], refused["status"], refused["error"]) == (
        "least-outstanding-requests",
        424,
        "ModelError",
    )
    assert session_id not in str([refused, turn])


def test_request_that_nobody_could_take_is_there_without_an_instance(stage: Stage) -> None:
    stage.set_state(InstanceState.DOWN)
    with pytest.raises(ClientError):
        stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}")

    [decision] = decisions(stage)
    assert (decision["instance"], decision["reason"], decision["status"]) == (None, None, 503)


def test_decisions_are_the_same_with_an_access_log(make_stage: MakeStage, tmp_path: Path) -> None:
    """The access log and the decisions both have the opened session and the error."""
    shown = []
    for observe in (ObserveSettings(), ObserveSettings(access_log=str(tmp_path / "access.jsonl"))):
        stage = make_stage(observe=observe)
        opened = {"X-Amzn-SageMaker-New-Session-Id": make_session_id("a")}
        stage.a.behave = stage.b.behave = answering(headers=opened)
        stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}", SessionId="NEW_SESSION")
        stage.a.behave = stage.b.behave = refusing(400, "InvalidRequest", "no")
        url = f"{stage.proxy.runtime_url}/predictions/llava"
        assert requests.post(url, data=b"{}", timeout=60).status_code == 400
        wait_until(partial(is_noted_twice, stage), "both are over")
        shown.append([(row["session"], row["error"]) for row in decisions(stage)])

    assert shown == [[(None, "InvalidRequest"), (session_hash(make_session_id("a").encode()), None)]] * 2


def test_request_has_its_path_times_tokens_and_the_models_error(stage: Stage) -> None:
    """A record has everything that the request's page shows, with times since the request's head."""
    receipt = {"X-Torchmoor-Context-Tokens": "40", "X-Torchmoor-Generated-Tokens": "7", "X-Torchmoor-Queue-Ms": "1.5"}
    stage.a.behave = stage.b.behave = answering(headers={**receipt, "X-Torchmoor-Prefill-Tokens": "many"})
    stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}", InferenceId="mine")
    stage.a.behave = stage.b.behave = refusing(400, "ContextTooLong", "no")
    with pytest.raises(ClientError):
        stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}")

    wait_until(partial(is_noted_twice, stage), "both are over")
    refused, answered = decisions(stage)
    assert (answered["method"], answered["path"]) == ("POST", "/endpoints/llava/invocations")
    assert answered["receipt"] == {"context_tokens": 40, "generated_tokens": 7, "queue_ms": 1.5}
    assert 0 <= answered["waited_ms"] <= answered["sent_ms"] <= answered["answered_ms"] <= answered["ms"]
    assert (answered["inference_id"], answered["model_error"], answered["bytes_in"]) == ("mine", None, 2)
    assert (refused["error"], refused["instance_status"]) == ("ModelError", 400)
    assert refused["model_error"] == "ContextTooLong"
    assert decisions(stage, f"?request={answered['request_id']}") == [answered]


@pytest.mark.parametrize(("note", "number"), [("17", 17), ("17,", None), ("", None)])
def test_streamed_request_has_its_generated_tokens(stage: Stage, note: str, number: int | None) -> None:
    """The number of generated tokens comes from a marked stream's last piece, which the client does not see."""

    async def behave(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/plain", {headers.CONTINUABLE: "the start", "X-Torchmoor-Context-Tokens": "40"})
        await wire.chunk(mark_piece(b"a ", "1,2,", PieceKind.PART))
        await wire.chunk(mark_piece(b"b", note, PieceKind.END))
        await wire.chunk(b"")

    stage.a.behave = stage.b.behave = behave
    answer = stage.client().invoke_endpoint_with_response_stream(EndpointName="llava", Body=b'{"inputs": "x"}')
    assert b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"]) == b"a b"

    wait_until(lambda: len(decisions(stage)) == 1, "it is over")
    wanted = {"context_tokens": 40} if number is None else {"context_tokens": 40, "generated_tokens": number}
    assert decisions(stage)[0]["receipt"] == wanted


def test_filters_by_error_and_session(stage: Stage) -> None:
    """The error filter matches the client's code and the model's; the session filter, the beginning of a hash."""
    client = stage.client()
    session_id = make_session_id("a")
    client.invoke_endpoint(EndpointName="llava", Body=b"{}", SessionId=session_id)
    stage.a.behave = stage.b.behave = refusing(400, "ContextTooLong", "no")
    with pytest.raises(ClientError):
        client.invoke_endpoint(EndpointName="llava", Body=b"{}")

    wait_until(partial(is_noted_twice, stage), "both are over")
    for error in ("any", "ModelError", "ContextTooLong"):
        assert [row["status"] for row in decisions(stage, f"?error={error}")] == [424], error
    assert decisions(stage, "?error=OutOfMemory") == []
    beginning = session_hash(session_id.encode())[:6]
    assert [row["status"] for row in decisions(stage, f"?session={beginning}")] == [200]


@pytest.mark.parametrize("base", ["/v1", "/endpoints/llava/openai/v1", "/endpoints/nobody/openai/v1"])
def test_ids_in_paths_are_not_shown(stage: Stage, base: str) -> None:
    """Ids of responses and conversations are hidden, because they give access like credentials."""
    session_id = make_session_id("a")
    url = f"{stage.proxy.runtime_url}{base}/responses/resp_{session_id.removeprefix('ts-seq-')}/input_items"
    requests.get(url, timeout=60)
    stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}")

    wait_until(lambda: any(row["method"] == "POST" for row in decisions(stage)), "both are over")
    assert session_id.removeprefix("ts-seq-") not in str(decisions(stage))


@pytest.mark.parametrize(("status", "faults"), [(400, 0), (500, 1)])
def test_mistake_of_the_client_is_not_a_fault(stage: Stage, status: int, faults: int) -> None:
    """A client's mistake is not a fault, although SageMaker answers 424 for both.

    The instance's status distinguishes them.
    """
    stage.a.behave = stage.b.behave = refusing(status, "ContextTooLong" if status == 400 else "Internal", "no")
    with pytest.raises(ClientError):
        stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}")

    def variant() -> dict[str, Any]:
        [found] = stage.admin("/dashboard.json").json()["variants"]
        return dict(found)

    wait_until(lambda: variant()["client_errors"] == 1, "it is over")
    assert variant()["faults"] == faults


def test_trace_is_linked_if_it_was_exported(make_stage: MakeStage) -> None:
    link = "https://traces.example/trace/{trace_id}?from=torchmoor"
    observe = ObserveSettings(traces_url="http://127.0.0.1:9/v1/traces", trace_link=link)
    stage = make_stage(observe=observe)
    for flags in ("01", "00"):
        requests.post(
            f"{stage.proxy.runtime_url}/endpoints/llava/invocations",
            data=b"{}",
            headers={"traceparent": f"00-{'a' * 32}-{'b' * 16}-{flags}"},
            timeout=60,
        )
    wait_until(partial(is_noted_twice, stage), "both are over")
    unsampled, sampled = decisions(stage)
    assert sampled["trace_url"] == f"https://traces.example/trace/{'a' * 32}?from=torchmoor"
    assert unsampled["trace_url"] is None


def test_retry_is_told(stage: Stage) -> None:
    stage.instances["a"].behave = refusing(503, None, "no worker")
    stage.instances["b"].behave = answering()
    for _ in range(2):
        stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}")

    found = [row for row in decisions(stage) if row["retries"]]
    assert found
    assert {(row["instance"], row["reason"], row["retries"]) for row in found} == {("b", "retry", 1)}


def test_filters_and_pages(make_stage: MakeStage) -> None:
    """Decisions can be filtered by endpoint, instance and time, and limited in number."""
    stage = make_stage(endpoints={"b": "other"})
    for _ in range(3):
        stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}")
    stage.client().invoke_endpoint(EndpointName="other", Body=b"{}")

    wait_until(lambda: len(decisions(stage)) == 4, "all are over")
    assert [row["instance"] for row in decisions(stage, "?endpoint=other")] == ["b"]
    assert len(decisions(stage, "?instance=a&limit=2")) == 2
    newest = decisions(stage)[0]["time"]
    assert decisions(stage, f"?since={newest + 1}") == []
    for query in ("limit=0", "limit=5000", f"limit={'9' * 5000}", "since=nan", "since=now"):
        assert stage.admin(f"/decisions?{query}").status_code == 400


def test_decisions_of_one_variant_are_found(make_stage: MakeStage) -> None:
    """Decisions can be filtered by variant, alone and with another filter."""
    variants = tuple(VariantSettings(name=name, model="llava") for name in ("blue", "green"))
    stage = make_stage(variants=variants, homes={"a": "blue", "b": "green"})
    for variant in ("blue", "green", "green"):
        stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}", TargetVariant=variant)

    wait_until(lambda: len(decisions(stage)) == 3, "all are over")
    assert [row["variant"] for row in decisions(stage, "?variant=green")] == ["green", "green"]
    assert [row["instance"] for row in decisions(stage, "?variant=blue&endpoint=llava")] == ["a"]
    assert decisions(stage, "?variant=blue&instance=b") == decisions(stage, "?variant=red") == []


def test_so_many_are_kept_and_no_more(make_stage: MakeStage) -> None:
    """In a burst earlier minutes and failures are kept, and the answer says how many records were left out."""
    stage = make_stage(observe=ObserveSettings(max_decisions=6, max_decisions_per_s=1))
    client = stage.client()
    for _ in range(30):
        client.invoke_endpoint(EndpointName="llava", Body=b"{}")
    told = stage.admin("/decisions").json()
    assert 1 <= len(told["decisions"]) <= 6
    assert told["left_out"] > 0

    stage.instances["a"].behave = stage.instances["b"].behave = answering(400)
    for _ in range(2):
        with pytest.raises(ClientError):
            client.invoke_endpoint(EndpointName="llava", Body=b"{}")

    wait_until(lambda: 424 in [row["status"] for row in decisions(stage)], "a failure is kept")
