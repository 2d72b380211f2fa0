"""Bounds of what one client may send to the chat service and keep there with OpenAI's resources."""

import json
from typing import Any

import pytest

from tests.unit.handlers.conftest import Client, Exchange, ServiceFactory
from torchmoor.wire import headers as wire


def ask(client: Client, resource: str, body: Any = None) -> Exchange:
    return client.call(body, {wire.RESOURCE: resource})


def say(text: str) -> dict[str, Any]:
    return {"items": [{"role": "user", "content": text}]}


def test_a_conversation_has_a_bound_in_characters(make_client: ServiceFactory) -> None:
    """Items and metadata are refused once it is full; deleting it, and other conversations, go on."""
    client = make_client(session={"max_history_chars": 2000})
    full, other = (ask(client, "POST conversations", {}).json["id"] for _ in range(2))

    assert ask(client, f"POST conversations/{full}/items", say("a" * 1500)).status == 200
    refused = ask(client, f"POST conversations/{full}/items", say("a" * 500))
    question = ask(client, "POST responses", {"model": "llava", "input": "a" * 500, "conversation": full})
    metadata = ask(client, f"POST conversations/{full}", {"metadata": {"a": "b" * 500}})

    for answer in (refused, question, metadata):
        assert (answer.status, answer.error) == (400, "ContextTooLong")
        assert "session.max_history_chars" in answer.json["error"]["message"]
    assert len(ask(client, f"GET conversations/{full}/items").json["data"]) == 1
    assert ask(client, f"POST conversations/{other}/items", say("a" * 1500)).status == 200
    assert ask(client, f"DELETE conversations/{full}").status == 200


@pytest.mark.parametrize("body", [{"messages": [{}] * 600}, {"inputs": "," * 1200}, {"type": [[]] * 600}])
def test_a_body_of_many_values_is_refused_before_it_is_parsed(make_client: ServiceFactory, body: Any) -> None:
    """Each pair of brackets would take many times its bytes of memory; commas within texts count as well."""
    client = make_client(request={"max_json_values": 1000})

    answer = client.call(json.dumps(body).encode())

    assert (answer.status, answer.error) == (400, "InvalidRequest")
    assert "it may have 1000" in answer.json["error"]["message"]
