"""Requests generated from /openapi.json, on real TorchServe instances: answers match the document."""

import pytest
import requests

from tests.openapi_cases import find_violations, with_values
from tests.torchserve.conftest import Fleet

pytestmark = [pytest.mark.slow, pytest.mark.torchserve]
SHORT = [1, 2]  # tokens of an answer


def test_answers_of_a_running_product_are_as_the_document_says(fleet: Fleet) -> None:
    """Both planes match the document; routes that end an instance or a session get names that do not exist."""
    lengths = dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), SHORT)
    values = {"endpoint": ["llava"], "model": ["llava"], "action": ["pin", "unpin", "other"], **lengths}
    for url in (fleet.runtime, fleet.admin):
        document = with_values(requests.get(f"{url}/openapi.json", timeout=60).json(), values)
        assert find_violations(document, url, max_examples=8) == []
