"""Names of results."""

from __future__ import annotations

import pytest

from torchmoor.async_inference.objects.locations import (
    default_failure_path,
    default_output_path,
    locate_results,
    locate_staged,
)
from torchmoor.async_inference.objects.object_store import LocationRefused

OUT, FAILED = "s3://answers/out/", "s3://answers/failed"


def test_results_are_named_after_the_inference_id() -> None:
    """As SageMaker names them."""
    found = locate_results(OUT, FAILED, "id-1")

    assert found.output == "s3://answers/out/id-1.out"
    assert found.failure == "s3://answers/failed/id-1-error.out"


def test_a_file_name_and_an_extension_change_the_result_only() -> None:
    """Filename is the name, S3OutputPathExtension a path between; failures keep the inference id."""
    found = locate_results(OUT, FAILED, "id-1", filename="answer.json", extension="team/one")

    assert found.output == "s3://answers/out/team/one/answer.json"
    assert found.failure == "s3://answers/failed/id-1-error.out"


def test_names_are_quoted_in_file_urls_and_raw_in_s3() -> None:
    """A key of S3 is what it is; a path in a URL must quote what has a meaning there."""
    assert locate_results(OUT, FAILED, "a b#%?").output == "s3://answers/out/a b#%?.out"
    assert locate_results("file:///r", "file:///f", "a b#%?").output == "file:///r/a%20b%23%25%3F.out"


def test_what_is_staged_is_beside_the_results_and_of_one_attempt() -> None:
    """So that publishing it is a rename, and two attempts never meet."""
    assert locate_staged(OUT, "id-1", 2) == "s3://answers/out/.torchmoor/id-1.2"


@pytest.mark.parametrize("name", ["../x", "a/../../x", "a//b", "/a", "a/", "a/./b", ".torchmoor/x", "é", "a\x7fb"])
def test_an_inference_id_that_would_lead_elsewhere_is_refused(name: str) -> None:
    """SageMaker's pattern allows nearly everything; a name that leaves its folder is refused with a reason."""
    with pytest.raises(LocationRefused, match="InferenceId"):
        locate_results(OUT, FAILED, name)


@pytest.mark.parametrize("extension", ["../up", ".torchmoor", "a/.torchmoor/b", "a/../../b"])
def test_an_extension_that_would_lead_elsewhere_is_refused(extension: str) -> None:
    """Nor may it lead to what is staged."""
    with pytest.raises(LocationRefused, match="S3OutputPathExtension"):
        locate_results(OUT, FAILED, "id-1", extension=extension)


def test_a_location_too_long_for_its_header_is_refused() -> None:
    """The answer tells it in a header of 1024 characters."""
    with pytest.raises(LocationRefused, match="1024"):
        locate_results(OUT, FAILED, "id-1", extension="a" * 1020)


def test_defaults_are_those_of_the_sagemaker_sdk() -> None:
    """For endpoints without an S3OutputPath."""
    assert default_output_path("file:///state", "llava") == "file:///state/async-endpoint-outputs/llava"
    assert default_failure_path("s3://bucket", "llava") == "s3://bucket/async-endpoint-failures/llava"
