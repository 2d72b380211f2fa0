"""The answers of OpenAI's APIs have the schemas of the OpenAPI document."""

from typing import Any

import jsonschema
import pytest

from torchmoor.proxy.api.reference import schemas
from torchmoor.wire import headers as wire

MESSAGES = [{"role": "user", "content": "hello"}]
RESPONSE: dict[str, Any] = {"input": "hello", "max_output_tokens": 4}


@pytest.mark.parametrize(
    ("path", "fields", "schema"),
    [
        ("chat/completions", {"messages": MESSAGES, "max_tokens": 4}, schemas.CHAT_ANSWER),
        ("chat/completions", {"messages": MESSAGES, "max_tokens": 4, "n": 2, "logprobs": True}, schemas.CHAT_ANSWER),
        ("completions", {"prompt": "hello", "max_tokens": 4, "logprobs": 2}, schemas.COMPLETION_ANSWER),
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
    named = {wire.RESOURCE: f"POST {path}"} if path == "responses" else {}

    answer = client.call({"model": "llava", **fields}, named)

    assert answer.status == 200, answer.body
    jsonschema.validate(answer.json, schema)
    assert set(answer.json) == set(schema["properties"])
