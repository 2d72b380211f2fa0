"""The streaming examples with TGI's and LMI's images."""

import json

import pytest

from tests.torchserve.conftest import ROOT
from tests.torchserve.published.conftest import RunClient

pytestmark = [pytest.mark.torchserve, pytest.mark.s3, pytest.mark.slow]


def test_tgi_and_lmi_stream_from_create_to_delete(run_client: RunClient) -> None:
    """Settings for four GPUs have no effect, and LMI's older image streams one object without being asked."""
    told = run_client("streaming.py", str(ROOT / "models" / "tiny-llava"))

    events = [json.loads(line.removeprefix("data:")) for line in "".join(told["tgi"]).split("\n") if line]
    answer = events[-1]["generated_text"]
    assert told["whole"] == [{"generated_text": answer}]
    assert len(told["tgi"]) > 1
    assert len(told["lmi"]) > 1
    assert json.loads("".join(told["lmi"])) == {"generated_text": answer}
    assert "".join(told["lmi"]).startswith('{"generated_text": "')
