"""The answers of OpenAI's APIs have the schemas of the OpenAPI document."""

from typing import Any

import jsonschema
import pytest
from PIL import Image

from tests.torchserve.drawings import encoded
from torchmoor.proxy.api.reference import data_schemas, openai_schemas, resource_schemas
from torchmoor.wire import headers as wire

MESSAGES = [{"role": "user", "content": "hello"}]
RESPONSE: dict[str, Any] = {"input": "hello", "max_output_tokens": 4}


@pytest.mark.parametrize(
    ("path", "fields", "schema"),
    [
        ("chat/completions", {"messages": MESSAGES, "max_tokens": 4}, openai_schemas.CHAT_ANSWER),
        (
            "chat/completions",
            {"messages": MESSAGES, "max_tokens": 4, "n": 2, "logprobs": True},
            openai_schemas.CHAT_ANSWER,
        ),
        ("completions", {"prompt": "hello", "max_tokens": 4, "logprobs": 2}, openai_schemas.COMPLETION_ANSWER),
        ("generate", {"inputs": "hello", "parameters": {"details": True}}, data_schemas.GENERATED),
        ("responses", RESPONSE, resource_schemas.RESPONSE_ANSWER),
        ("responses", {**RESPONSE, "background": True}, resource_schemas.RESPONSE_ANSWER),
        (
            "responses",
            {**RESPONSE, "instructions": "be brief", "temperature": 0.5, "user": "me"},
            resource_schemas.RESPONSE_ANSWER,
        ),
    ],
)
def test_an_answer_has_the_fields_of_its_schema(
    client: Any, path: str, fields: dict[str, Any], schema: dict[str, Any]
) -> None:
    """All of them, and no others."""
    named = {"responses": {wire.RESOURCE: f"POST {path}"}, "generate": {wire.TGI_ROUTE: wire.GENERATE}}

    answer = client.call({"model": "llava", **fields}, named.get(path, {}))

    assert answer.status == 200, answer.body
    jsonschema.validate(answer.json, schema)
    assert set(answer.json) == set(schema["properties"])


def check(client: Any, resource: str, body: Any, schema: dict[str, Any]) -> Any:
    """Send a request for a resource. Return its answer, which must have the fields of the schema."""
    answer = client.call(body, {wire.RESOURCE: resource})
    assert answer.status == 200, (resource, answer.body)
    jsonschema.validate(answer.json, schema)
    assert set(answer.json) >= set(schema["required"])
    return answer.json


def test_resources_have_the_fields_of_their_schemas(client: Any, red: Image.Image) -> None:
    """Responses, conversations, files and tokens have their schemas' fields when created, shown, listed and deleted."""
    page, response = resource_schemas.page(resource_schemas.ITEM), resource_schemas.RESPONSE_ANSWER
    items = {"items": MESSAGES}
    named = {"model": "llava", **RESPONSE}
    for options in ({}, {"background": True}):
        path = f"responses/{check(client, 'POST responses', {**named, **options}, response)['id']}"
        check(client, f"GET {path}", {}, response)
        assert len(check(client, f"GET {path}/input_items", {}, page)["data"]) == 1
    check(client, f"POST {path}/cancel", {}, response)
    check(client, f"DELETE {path}", {}, resource_schemas.DELETED)
    check(client, "POST responses/input_tokens", named, resource_schemas.INPUT_TOKENS)
    check(client, "POST responses/compact", named, resource_schemas.COMPACTION)

    talk = f"conversations/{check(client, 'POST conversations', items, resource_schemas.CONVERSATION_ANSWER)['id']}"
    item = check(client, f"POST {talk}/items", items, page)["data"][0]["id"]
    assert len(check(client, f"GET {talk}/items", {}, page)["data"]) == 2
    check(client, f"GET {talk}", {}, resource_schemas.CONVERSATION_ANSWER)
    check(client, f"GET {talk}/items/{item}", {}, resource_schemas.ITEM)
    check(client, f"DELETE {talk}/items/{item}", {}, resource_schemas.CONVERSATION_ANSWER)
    check(client, f"POST {talk}", {"metadata": {"a": "b"}}, resource_schemas.CONVERSATION_ANSWER)
    check(client, f"DELETE {talk}", {}, resource_schemas.DELETED)

    form = {"file": encoded(red), "purpose": b"vision"}
    path = f"files/{check(client, 'POST files', form, resource_schemas.FILE_ANSWER)['id']}"
    check(client, f"GET {path}", {}, resource_schemas.FILE_ANSWER)
    assert len(check(client, "GET files", {}, resource_schemas.page(resource_schemas.FILE_ANSWER))["data"]) == 1
    content = client.call({}, {wire.RESOURCE: f"GET {path}/content"})
    assert content.headers["Content-Type"] == "application/octet-stream"
    check(client, f"DELETE {path}", {}, resource_schemas.DELETED)

    prompt = {"prompt": "hello", "return_token_strs": True}
    tokens = check(client, "POST tokenize", prompt, openai_schemas.TOKENS)["tokens"]
    assert check(client, "POST detokenize", {"tokens": tokens}, openai_schemas.PROMPT)["prompt"]
