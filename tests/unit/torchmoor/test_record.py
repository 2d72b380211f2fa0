"""Paths of requests in records."""

import pytest

from torchmoor.proxy.dispatch.record import hide_ids


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        (b"/endpoints/llava/invocations", "/endpoints/llava/invocations"),
        (b"/v1/chat/completions", "/v1/chat/completions"),
        (b"/v1/responses", "/v1/responses"),
        (b"/v1/responses/compact", "/v1/responses/compact"),
        (b"/v1/responses/resp_1234", "/v1/responses/..."),
        (b"/v1/responses/resp_1234/input_items", "/v1/responses/.../input_items"),
        (b"/endpoints/llava/openai/v1/files/file-1/content", "/endpoints/llava/openai/v1/files/.../content"),
        (b"/endpoints/v1/openai/v1/responses/resp_1234", "/endpoints/v1/openai/v1/responses/..."),
        (b"/endpoints/files/invocations", "/endpoints/files/invocations"),
        (b"/v1/conversations/conv_1/items/msg_2", "/v1/conversations/.../items/..."),
        (b"/v1/models/llava", "/v1/models/llava"),
    ],
)
def test_ids_of_resources_are_hidden(path: bytes, shown: str) -> None:
    """Ids of resources are hidden; names of resources and operations stay."""
    assert hide_ids(path) == shown
