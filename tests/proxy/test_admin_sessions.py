"""Sessions on the admin plane: listed, closed and pinned there, and not from outside."""

import json
from typing import Any

import pytest
import requests

from tests.proxy.conftest import MakeStage, Stage, make_session_id
from tests.proxy.fake_instance import answering
from tests.proxy.fake_sessions import FakeHolders, make_session
from torchmoor.proxy.instances.instance import InstanceState

NAMES = tuple(f"{number:016x}" for number in range(1, 8))


@pytest.fixture
def holders() -> FakeHolders:
    return FakeHolders()


@pytest.fixture
def stage(make_stage: MakeStage, holders: FakeHolders) -> Stage:
    """Instance `a` holds the first four sessions, `b` the fourth and the others."""
    stage = make_stage(prepare=holders)
    holders.of["a"].hold(make_session(name) for name in NAMES[:4])
    holders.of["b"].hold(make_session(name) for name in NAMES[3:])
    return stage


def get(stage: Stage, query: str = "") -> dict[str, Any]:
    answer = stage.admin(f"/sessions{query}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def post(stage: Stage, path: str, **headers: str) -> tuple[int, dict[str, Any]]:
    answer = stage.admin(f"/sessions/{path}", "POST", headers=headers)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_pages_have_every_session_once_for_each_holder(stage: Stage, limit: int) -> None:
    """Pages of any size are complete, and a session that two instances hold is never split between pages."""
    found, after = [], ""
    for _ in range(20):
        page = get(stage, f"?limit={limit}&after={after}")
        found += [(row["session"], row["instance"]) for row in page["sessions"]]
        assert len(page["sessions"]) <= limit + 1
        after = page["next"]
        if after is None:
            break

    assert found == sorted([*((name, "a") for name in NAMES[:4]), *((name, "b") for name in NAMES[3:])])


def test_first_list_has_all_instances_of_a_large_fleet(
    make_stage: MakeStage, holders: FakeHolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instances that are not asked at once follow later, and the first list is complete."""
    monkeypatch.setattr("torchmoor.admin.statuses.MAX_QUERIES", 1)
    stage = make_stage(prepare=holders)
    holders.of["a"].hold([make_session(NAMES[0])])
    holders.of["b"].hold([make_session(NAMES[1])])

    found = get(stage)

    assert [row["session"] for row in found["sessions"]] == [*NAMES[:2]]
    assert all(each["answered"] for each in found["instances"])


def test_sessions_of_one_instance_or_of_a_beginning(stage: Stage) -> None:
    """Instances apply the filters, so that a page of results is full."""
    assert [row["session"] for row in get(stage, "?instance=b")["sessions"]] == list(NAMES[3:])
    assert [row["instance"] for row in get(stage, f"?session={NAMES[3]}")["sessions"]] == ["a", "b"]
    assert get(stage, "?endpoint=llava&session=ffff")["sessions"] == []
    assert {row["instance"]: row["open"] for row in get(stage)["instances"]} == {"a": 4, "b": 4}


@pytest.mark.parametrize(
    "query",
    [
        *("limit=0", "limit=1001", "limit=x", "limit=", f"limit={'9' * 5000}"),
        *("after=ts-seq-a", "session=%27", "endpoint=nobody", "instance=nobody"),
    ],
    ids=lambda query: query[:20],
)
def test_question_that_makes_no_sense_is_refused(stage: Stage, query: str) -> None:
    """The error says which values are allowed."""
    answer = stage.admin(f"/sessions?{query}")

    assert answer.status_code == 400
    assert answer.json()["error"]


def test_row_has_what_is_known_of_a_session_and_nothing_else(stage: Stage, holders: FakeHolders) -> None:
    """Extra fields of an instance, above all an id, and malformed ones are not forwarded."""
    holders.of["a"].hold([make_session("a" * 16, session_id="ts-seq-secret", turns="many", is_pinned="yes", tier=7)])
    holders.of["a"].hold([{"session": "ts-seq-secret"}])

    page = get(stage, f"?session={'a' * 16}")

    [row] = page["sessions"]
    assert (row["endpoint"], row["instance"], row["turns"], row["is_pinned"], row["tier"]) == (
        "llava",
        "a",
        None,
        False,
        "7",
    )
    assert row["bytes"] == 1 << 20
    assert "ts-seq" not in json.dumps([page, get(stage)])


def test_session_is_closed_wherever_it_is_held(stage: Stage, holders: FakeHolders) -> None:
    """Otherwise an instance that held the session earlier would keep it."""
    status, told = post(stage, f"{NAMES[3]}/close")

    assert status == 200
    assert [row["instance"] for row in told["instances"]] == ["a", "b"]
    assert NAMES[3] not in {*holders.of["a"].sessions, *holders.of["b"].sessions}
    assert NAMES[3] not in [row["session"] for row in get(stage)["sessions"]]
    assert post(stage, f"{NAMES[3]}/close")[0] == 404


def test_session_that_no_instance_holds_is_closed_in_the_journal(stage: Stage, holders: FakeHolders) -> None:
    """One instance of the endpoint closes it, once; it cannot be pinned, and other sessions are unknown still."""
    evicted = "e" * 16
    holders.of["a"].journal = holders.of["b"].journal = {evicted}
    assert post(stage, f"{evicted}/pin")[0] == 404
    assert post(stage, f"{'d' * 16}/close")[0] == 404

    status, told = post(stage, f"{evicted}/close")

    assert (status, len(told["instances"])) == (200, 1)
    assert holders.of["a"].journal == set()
    assert post(stage, f"{evicted}/close")[0] == 404


def test_session_is_pinned_and_unpinned(stage: Stage) -> None:
    """The list shows the change at once."""
    get(stage)
    assert post(stage, f"{NAMES[0]}/pin")[0] == 200
    assert [row["session"] for row in get(stage)["sessions"] if row["is_pinned"]] == [NAMES[0]]
    assert post(stage, f"{NAMES[0]}/unpin?instance=a")[0] == 200
    assert not any(row["is_pinned"] for row in get(stage)["sessions"])
    assert post(stage, f"{NAMES[0]}/pin?instance=b")[0] == 404


def test_refusal_of_an_instance_is_told_in_its_words(stage: Stage, holders: FakeHolders) -> None:
    """The operator sees the instance's own message."""
    holders.of["a"].refusal = (507, "OutOfMemory", "pinned sessions may hold 50% of the KV cache; unpin one first")

    status, told = post(stage, f"{NAMES[0]}/pin")

    assert (status, told["error"]) == (507, "pinned sessions may hold 50% of the KV cache; unpin one first")


@pytest.mark.parametrize("name", ["ts-seq-abcdefghijklmnop", "0" * 15, "0" * 17, "G" * 16])
def test_only_a_hash_names_a_session(stage: Stage, name: str) -> None:
    """An id is not accepted in place of a hash."""
    assert post(stage, f"{name}/close")[0] == 400


def test_drained_instance_is_asked_too(stage: Stage, holders: FakeHolders) -> None:
    """A drained instance holds its sessions until they end."""
    stage.call(stage.registry.drain, "a")
    assert stage.instance("a").state is InstanceState.DRAINING

    assert get(stage, "?instance=a")["sessions"]
    assert post(stage, f"{NAMES[0]}/close")[0] == 200


def test_foreign_container_cannot_tell_and_is_never_invoked(make_stage: MakeStage) -> None:
    """A foreign container would treat an operation as a request for its model."""
    stage = make_stage()
    for fake in stage.instances.values():
        fake.on_status = answering(body=b'{"label": "a cat"}')

    page = get(stage)

    assert [row["answered"] for row in page["instances"]] == [False, False]
    assert page["sessions"] == []
    assert post(stage, f"{NAMES[0]}/close") == (
        404,
        {
            "error": f"No instance holds a session {NAMES[0]}: it may have ended, or moved; see GET /sessions. "
            "No word from a, b."
        },
    )
    assert [len(fake.received) for fake in stage.instances.values()] == [0, 0]


def test_many_who_look_cost_one_round(stage: Stage, holders: FakeHolders) -> None:
    """Any number of readers causes one query to the instances per second."""
    for _ in range(20):
        get(stage)

    assert holders.of["a"].num_lists < 20
    assert holders.of["b"].num_lists < 20


@pytest.mark.parametrize("path", ["/endpoints/llava/invocations", "/invocations", "/predictions/llava"])
def test_operation_from_outside_reaches_no_instance(stage: Stage, holders: FakeHolders, path: str) -> None:
    """The data plane removes the header, so that the request arrives as an ordinary invocation."""
    body = json.dumps({"action": "close", "session": NAMES[0]}).encode()
    for name in ("X-Torchmoor-Operation", "x-torchmoor-operation", "X-TORCHMOOR-OPERATION"):
        requests.post(stage.proxy.runtime_url + path, data=body, headers={name: "sessions"}, timeout=60)

    received = [request for fake in stage.instances.values() for request in fake.received]
    assert len(received) == 3
    assert all("x-torchmoor-operation" not in request.headers for request in received)
    assert NAMES[0] in holders.of["a"].sessions


def test_hash_is_that_of_the_decisions(stage: Stage) -> None:
    """A session in the list can be found among the decisions and in the access log."""
    session_id = make_session_id("a")
    stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}", SessionId=session_id)

    [decision] = stage.admin("/decisions").json()["decisions"]

    assert len(decision["session"]) == 16
    assert session_id not in json.dumps(decision)
    assert get(stage, f"?session={decision['session']}")["sessions"] == []
