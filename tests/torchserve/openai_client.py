"""OpenAI's own client of the shared fleet.

Its requests take one way below each base URL, once the proxy has found the endpoint by the path or by the model's name.
So one test of each kind of request runs at both base URLs, and test_openai_methods.py calls every method there.
"""

from collections.abc import Iterator

import openai
import pytest

from tests.torchserve.conftest import Fleet

BASES = ("/v1", "/endpoints/llava/openai/v1")
at_both_bases = pytest.mark.parametrize("gpt", BASES, indirect=True)


@pytest.fixture
def gpt(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    """Return the client, configured with the address only: a base URL of `at_both_bases`, else the shorter one."""
    base: str = getattr(request, "param", BASES[0])
    with openai.OpenAI(base_url=fleet.runtime + base, api_key="any", timeout=90, max_retries=0) as client:
        yield client
