"""The image's entry point."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from torchmoor.container.__main__ import main


class Executed(BaseException):
    """Raised where another program would replace the process."""


@pytest.mark.parametrize(("own", "found"), [(None, "eu-west-1"), ("eu-central-1", "eu-central-1")])
def test_region_of_the_platform_is_boto3s(monkeypatch: pytest.MonkeyPatch, own: str | None, found: str) -> None:
    """AWS_REGION, which SageMaker and Kubernetes set, becomes boto3's region unless boto3's own variable is set."""

    def execv(program: Path, words: Sequence[str]) -> None:
        assert words[1:] == ["serve", "--config", "torchmoor.yaml"]
        raise Executed

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setenv("AWS_DEFAULT_REGION", own or "")
    if own is None:
        monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")

    with pytest.raises(Executed):
        main(["proxy", "--config", "torchmoor.yaml"])

    assert os.environ["AWS_DEFAULT_REGION"] == found
