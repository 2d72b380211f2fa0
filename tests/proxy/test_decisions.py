"""GET /decisions: where requests went, why, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
from botocore.exceptions import ClientError

from tests.proxy.conftest import Stage, make_session_id
from tests.proxy.fake_instance import answering, refusing
from tests.waiting import wait_until
from torchmoor.config.observe import ObserveSettings
from torchmoor.proxy.instances.instance import InstanceState


def decisions(stage: Stage, query: str = "") -> list[dict[str, Any]]:
    answer = requests.get(f"{stage.proxy.admin_url}/decisions{query}", timeout=10)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["decisions"]
    return found


def is_noted_twice(stage: Stage) -> bool:
    return len(decisions(stage)) == 2


def test_each_request_is_there_with_its_reason_and_end(stage: Stage) -> None:
    """The newest first; of a session its hash, and never its id."""
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
    """What went nowhere is what an operator looks for."""

    async def fell() -> None:
        for name in stage.instances:
            stage.registry.set_state(name, InstanceState.DOWN)

    stage.run(fell())
    with pytest.raises(ClientError):
        stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}")

    [decision] = decisions(stage)
    assert (decision["instance"], decision["reason"], decision["status"]) == (None, None, 503)


def test_decisions_are_the_same_with_an_access_log(make_stage: Callable[..., Stage], tmp_path: Path) -> None:
    """The log knows more of an answer than the decisions show."""
    shown = []
    for observe in (ObserveSettings(), ObserveSettings(access_log=str(tmp_path / "access.jsonl"))):
        stage = make_stage(observe=observe)
        opened = {"X-Amzn-SageMaker-New-Session-Id": make_session_id("a")}
        stage.a.behave = stage.b.behave = answering(headers=opened)
        stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}", SessionId="NEW_SESSION")
        stage.a.behave = stage.b.behave = refusing(400, "InvalidRequest", "no")
        url = f"{stage.proxy.runtime_url}/predictions/llava"
        assert requests.post(url, data=b"{}", timeout=10).status_code == 400
        wait_until(partial(is_noted_twice, stage), "both are over")
        shown.append([(row["session"], row["error"]) for row in decisions(stage)])

    assert shown == [[(None, None)] * 2] * 2


def test_retry_is_told(stage: Stage) -> None:
    """With the instance that answered in the end."""
    stage.instances["a"].behave = refusing(503, None, "no worker")
    stage.instances["b"].behave = answering()
    for _ in range(2):
        stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}")

    found = [row for row in decisions(stage) if row["retries"]]
    assert found
    assert {(row["instance"], row["reason"], row["retries"]) for row in found} == {("b", "retry", 1)}


def test_filters_and_pages(make_stage: Callable[..., Stage]) -> None:
    """By endpoint, instance, time and number."""
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
        assert requests.get(f"{stage.proxy.admin_url}/decisions?{query}", timeout=10).status_code == 400


def test_so_many_are_kept_and_no_more(make_stage: Callable[..., Stage]) -> None:
    """A burst keeps the records of earlier minutes and its own failures; the page says how many were left out."""
    stage = make_stage(observe=ObserveSettings(max_decisions=6, max_decisions_per_s=1))
    client = stage.client()
    for _ in range(30):
        client.invoke_endpoint(EndpointName="llava", Body=b"{}")
    told = requests.get(f"{stage.proxy.admin_url}/decisions", timeout=10).json()
    assert 1 <= len(told["decisions"]) <= 6
    assert told["left_out"] > 0

    stage.instances["a"].behave = stage.instances["b"].behave = answering(400)
    for _ in range(2):
        with pytest.raises(ClientError):
            client.invoke_endpoint(EndpointName="llava", Body=b"{}")

    wait_until(lambda: 424 in [row["status"] for row in decisions(stage)], "a failure is kept")
