"""Names of results: where an answer or a failure goes, and where an answer waits until it is decided that it counts.

    {S3OutputPath}/{S3OutputPathExtension}/{Filename}         or {InferenceId}.out without a Filename
    {S3FailurePath}/{InferenceId}-error.out
    {S3OutputPath}/.torchmoor/{InferenceId}.{attempt}         staged

Plain text only: whether a location may be written is the object store's to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from torchmoor.async_inference.objects.object_store import LocationRefused

STAGING = ".torchmoor"
OUTPUTS = "async-endpoint-outputs"  # as the SageMaker SDK names them
FAILURES = "async-endpoint-failures"
MAX_URL_CHARS = 1024  # of an answer's header


@dataclass(frozen=True, slots=True)
class ResultLocations:
    """URLs of one request's two possible results."""

    output: str
    failure: str


def default_output_path(root: str, endpoint: str) -> str:
    """S3OutputPath of an endpoint that does not name one. root: s3://bucket, s3://bucket/prefix or file:///a/path."""
    return _below(root, f"{OUTPUTS}/{endpoint}")


def default_failure_path(root: str, endpoint: str) -> str:
    """S3FailurePath of an endpoint that does not name one."""
    return _below(root, f"{FAILURES}/{endpoint}")


def locate_results(
    output_path: str, failure_path: str, inference_id: str, *, filename: str = "", extension: str = ""
) -> ResultLocations:
    """Where a request's answer or failure will be. Raises LocationRefused, with words for the client."""
    _check_name("InferenceId", inference_id)
    name = f"{inference_id}.out"
    if filename:
        _check_name("Filename", filename)
        name = filename
    if extension:
        extension = extension.strip("/")
        _check_name("S3OutputPathExtension", extension)
        name = f"{extension}/{name}"
    locations = ResultLocations(
        output=_below(output_path, name), failure=_below(failure_path, f"{inference_id}-error.out")
    )
    for url in (locations.output, locations.failure):
        if len(url) > MAX_URL_CHARS:
            raise LocationRefused(f"the result's location would have more than {MAX_URL_CHARS} characters")
    return locations


def locate_staged(output_path: str, inference_id: str, attempt: int) -> str:
    """Where the answer of one attempt waits. Beside the results, so that giving it its name costs no copying."""
    return _below(output_path, f"{STAGING}/{inference_id}.{attempt}")


def _below(folder: str, name: str) -> str:
    """A key of S3 is written as it is, a path with what a URL must quote."""
    return f"{folder.rstrip('/')}/{quote(name) if folder.startswith('file:') else name}"


def _check_name(what: str, name: str) -> None:
    parts = name.split("/")
    if not name.isascii() or not name.isprintable():
        raise LocationRefused(f"{what} must be printable ASCII, because the result is named after it")
    if any(part in ("", ".", "..") for part in parts) or STAGING in parts:
        raise LocationRefused(
            f"{what} must not begin or end with / and must not have //, /./, /../ or {STAGING} in it, "
            "because the result is named after it"
        )
