"""The asynchronous example, with scaling and LangChain."""

import pytest

from tests.torchserve.conftest import ROOT
from tests.torchserve.published.conftest import BUCKET, RunClient

pytestmark = [pytest.mark.torchserve, pytest.mark.s3, pytest.mark.slow]


def test_the_sdk_and_langchain_wait_for_results_from_create_to_delete(run_client: RunClient) -> None:
    """An endpoint with a scaling policy can be deleted at once, as at AWS."""
    told = run_client("asynchronous.py", str(ROOT / "models" / "tiny-llava"))

    assert told["output"].startswith(f"s3://{BUCKET}/async/output/")
    assert told["result"][0]["generated_text"] == told["langchain"]
    assert told["policies"] == "Invocations-ScalingPolicy"
