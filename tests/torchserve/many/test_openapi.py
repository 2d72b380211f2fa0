"""Requests generated from /openapi.json, on real instances with many models: answers match the document."""

import pytest
import requests

from tests.openapi_cases import find_violations, with_values
from tests.torchserve.many.fleet import TARGET_MODEL, ManyFleet

pytestmark = [pytest.mark.slow, pytest.mark.torchserve]
MODELS = ["writes.tar.gz", "classifier-0.tar.gz", "absent.tar.gz"]


def test_answers_of_a_running_product_are_as_the_document_says(many: ManyFleet) -> None:
    """Both planes match, with OpenAI's tasks, the container's API and the open inference protocol.

    No model is pinned.
    """
    named = dict.fromkeys(("model", "name", TARGET_MODEL.lower()), MODELS)
    values = {**named, "endpoint": ["many"], "action": ["load", "unload", "other"], "max_tokens": [1, 2]}
    for url in (many.fleet.runtime, many.fleet.admin):
        document = with_values(requests.get(f"{url}/openapi.json", timeout=60).json(), values)
        assert find_violations(document, url, max_examples=6) == []
