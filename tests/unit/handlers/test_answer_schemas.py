"""The answers of OpenAI's APIs have the schemas of the OpenAPI document."""

from io import BytesIO
from typing import Any

import jsonschema
import pytest
from PIL import Image

from torchmoor.proxy.api.reference import schemas, tgi_schemas
from torchmoor.wire import headers as wire

MESSAGES = [{"role": "user", "content": "hello"}]
RESPONSE: dict[str, Any] = {"input": "hello", "max_output_tokens": 4}


@pytest.mark.parametrize(
    ("path", "fields", "schema"),
    [
        ("chat/completions", {"messages": MESSAGES, "max_tokens": 4}, schemas.CHAT_ANSWER),
        ("chat/completions", {"messages": MESSAGES, "max_tokens": 4, "n": 2, "logprobs": True}, schemas.CHAT_ANSWER),
        ("completions", {"prompt": "hello", "max_tokens": 4, "logprobs": 2}, schemas.COMPLETION_ANSWER),
        ("generate", {"inputs": "hello", "parameters": {"details": True}}, tgi_schemas.GENERATED),
        ("responses", RESPONSE, schemas.RESPONSE_ANSWER),
        ("responses", {**RESPONSE, "background": True}, schemas.RESPONSE_ANSWER),
        (
            "responses",
            {**RESPONSE, "instructions": "be brief", "temperature": 0.5, "user": "me"},
            schemas.RESPONSE_ANSWER,
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
    page, response = schemas.page(schemas.ITEM), schemas.RESPONSE_ANSWER
    items = {"items": MESSAGES}
    named = {"model": "llava", **RESPONSE}
    for options in ({}, {"background": True}):
        path = f"responses/{check(client, 'POST responses', {**named, **options}, response)['id']}"
        check(client, f"GET {path}", {}, response)
        assert len(check(client, f"GET {path}/input_items", {}, page)["data"]) == 1
    check(client, f"POST {path}/cancel", {}, response)
    check(client, f"DELETE {path}", {}, schemas.DELETED)
    check(client, "POST responses/input_tokens", named, schemas.INPUT_TOKENS)
    check(client, "POST responses/compact", named, schemas.COMPACTION)

    talk = f"conversations/{check(client, 'POST conversations', items, schemas.CONVERSATION_ANSWER)['id']}"
    item = check(client, f"POST {talk}/items", items, page)["data"][0]["id"]
    assert len(check(client, f"GET {talk}/items", {}, page)["data"]) == 2
    check(client, f"GET {talk}", {}, schemas.CONVERSATION_ANSWER)
    check(client, f"GET {talk}/items/{item}", {}, schemas.ITEM)
    check(client, f"DELETE {talk}/items/{item}", {}, schemas.CONVERSATION_ANSWER)
    check(client, f"POST {talk}", {"metadata": {"a": "b"}}, schemas.CONVERSATION_ANSWER)
    check(client, f"DELETE {talk}", {}, schemas.DELETED)

    picture = BytesIO()
    red.save(picture, "PNG")
    form = {"file": picture.getvalue(), "purpose": b"vision"}
    path = f"files/{check(client, 'POST files', form, schemas.FILE_ANSWER)['id']}"
    check(client, f"GET {path}", {}, schemas.FILE_ANSWER)
    assert len(check(client, "GET files", {}, schemas.page(schemas.FILE_ANSWER))["data"]) == 1
    content = client.call({}, {wire.RESOURCE: f"GET {path}/content"})
    assert content.headers["Content-Type"] == "application/octet-stream"
    check(client, f"DELETE {path}", {}, schemas.DELETED)

    tokens = check(client, "POST tokenize", {"prompt": "hello", "return_token_strs": True}, schemas.TOKENS)["tokens"]
    assert check(client, "POST detokenize", {"tokens": tokens}, schemas.PROMPT)["prompt"]
