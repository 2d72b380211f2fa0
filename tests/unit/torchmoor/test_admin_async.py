"""Asynchronous requests as the admin plane shows them."""

import pytest

from torchmoor.admin.async_requests import describe
from torchmoor.async_inference.request import AsyncRecord, AsyncRequest, AsyncState


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("https://host.example/in?X-Amz-Signature=secret", "https://host.example/in"),
        ("s3://bucket/what?is=a-key", "s3://bucket/what?is=a-key"),
        ("file:///in/x", "file:///in/x"),
    ],
)
def test_what_signs_a_url_is_not_shown(location: str, shown: str) -> None:
    """A URL's signature is not shown, with which readers of the list could read the object."""
    request = AsyncRequest(
        inference_id="one",
        endpoint="llava",
        output_location="s3://o/x",
        failure_location="s3://f/x",
        input_location=location,
    )

    described = describe(
        AsyncRecord(request=request, arrival=1, state=AsyncState.WAITING, attempts=0, due_at=None, updated_at=0.0)
    )

    assert described["input_location"] == shown
