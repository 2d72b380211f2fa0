"""Bodies that would take long to parse, on an instance with little memory."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from tests.torchserve.conftest import Fleet

pytestmark = pytest.mark.torchserve


def test_bodies_of_millions_of_values_are_refused_before_anything_parses_them(small: Fleet) -> None:
    """Such a body, which would stall the worker at each step, is refused while others are answered."""
    dense = b'{"model": "llava", "messages": [' + b"{}," * 5_000_000 + b"{}]}"
    deep = b'{"model": "llava", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    short = json.dumps({"inputs": "Hello", "parameters": {"max_new_tokens": 2}}).encode()

    def post(path: str, body: bytes) -> requests.Response:
        return requests.post(f"{small.runtime}{path}", body, headers={"Content-Type": "application/json"}, timeout=90)

    with ThreadPoolExecutor(6) as threads:
        hostile = [threads.submit(post, "/v1/chat/completions", body) for body in (dense, dense, dense, deep)]
        others = [post("/endpoints/llava/invocations", short) for _ in range(5)]
        refused = [each.result() for each in hostile]

    assert [each.status_code for each in others] == [200] * 5
    assert [each.status_code for each in refused] == [400] * 4
    assert all("JSON values; the limit is" in each.json()["error"]["message"] for each in refused[:3])
    assert {instance["state"] for instance in small.instances()} == {"ready"}
