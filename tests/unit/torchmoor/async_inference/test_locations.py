"""Names of results."""

import pytest

from torchmoor.async_inference.objects.locations import endpoint_paths, locate_results, locate_staged
from torchmoor.async_inference.objects.object_store import LocationRefused
from torchmoor.config.async_inference import AsyncEndpointSettings

OUT, FAILED = "s3://answers/out/", "s3://answers/failed"


def test_results_are_named_after_the_inference_id() -> None:
    found = locate_results(OUT, FAILED, "id-1")

    assert found.output == "s3://answers/out/id-1.out"
    assert found.failure == "s3://answers/failed/id-1-error.out"


def test_a_file_name_and_an_extension_change_the_result_only() -> None:
    """Filename replaces the name and S3OutputPathExtension adds a path; failures keep the inference id."""
    found = locate_results(OUT, FAILED, "id-1", filename="answer.json", extension="team/one")

    assert found.output == "s3://answers/out/team/one/answer.json"
    assert found.failure == "s3://answers/failed/id-1-error.out"


def test_names_are_quoted_in_file_urls_and_raw_in_s3() -> None:
    """File URLs quote special characters; S3 keys contain them unchanged."""
    assert locate_results(OUT, FAILED, "a b#%?").output == "s3://answers/out/a b#%?.out"
    assert locate_results("file:///r", "file:///f", "a b#%?").output == "file:///r/a%20b%23%25%3F.out"


def test_what_is_staged_is_beside_the_results_and_of_one_attempt() -> None:
    """A staged object is beside the results, so that publishing is a rename, and its name is unique to the attempt."""
    assert locate_staged(OUT, f"{OUT}/team/id-1.out", "id-1", "a7") == "s3://answers/out/.torchmoor/id-1.a7"


@pytest.mark.parametrize("before", ["file:///r/a%20b", "s3://answers/outer", "s3://earlier"])
def test_what_is_staged_is_beside_the_result_if_the_path_has_changed(before: str) -> None:
    """Publishing works within one store, and a result's location stays as the client has got it."""
    assert locate_staged(OUT, f"{before}/id-1.out", "id-1", "a7") == f"{before}/.torchmoor/id-1.a7"


@pytest.mark.parametrize("name", ["../x", "a/../../x", "a//b", "/a", "a/", "a/./b", ".torchmoor/x", "é", "a\x7fb"])
def test_an_inference_id_that_would_lead_elsewhere_is_refused(name: str) -> None:
    """An inference id that leads out of its folder is refused with the reason; SageMaker's pattern allows it."""
    with pytest.raises(LocationRefused, match="InferenceId"):
        locate_results(OUT, FAILED, name)


@pytest.mark.parametrize("extension", ["../up", ".torchmoor", "a/.torchmoor/b", "a/../../b"])
def test_an_extension_that_would_lead_elsewhere_is_refused(extension: str) -> None:
    """An extension may lead neither out of the results nor to staged objects."""
    with pytest.raises(LocationRefused, match="S3OutputPathExtension"):
        locate_results(OUT, FAILED, "id-1", extension=extension)


def test_a_location_too_long_for_its_header_is_refused() -> None:
    """A location longer than its header, 1024 characters, is refused."""
    with pytest.raises(LocationRefused, match="1024"):
        locate_results(OUT, FAILED, "id-1", extension="a" * 1020)


def test_defaults_are_those_of_the_sagemaker_sdk() -> None:
    """Endpoints without an S3OutputPath have the SageMaker SDK's default location."""
    assert endpoint_paths(AsyncEndpointSettings(), "file:///state", "llava") == (
        "file:///state/async-endpoint-outputs/llava",
        "file:///state/async-endpoint-failures/llava",
    )


def test_failures_without_a_path_are_below_the_root_or_else_below_the_results() -> None:
    """A root is optional if the endpoint names where its results go."""
    settings = AsyncEndpointSettings(output_path="s3://answers/out")

    assert endpoint_paths(settings, "s3://bucket", "llava")[1] == "s3://bucket/async-endpoint-failures/llava"
    assert endpoint_paths(settings, "", "llava")[1] == "s3://answers/out/async-endpoint-failures/llava"
