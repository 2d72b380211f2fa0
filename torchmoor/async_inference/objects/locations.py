"""Locations of results, failures and staged answers.

    {S3OutputPath}/{S3OutputPathExtension}/{Filename}         or {InferenceId}.out without a Filename
    {S3FailurePath}/{InferenceId}-error.out
    {S3OutputPath}/.torchmoor/{identity}.{attempt}            staged; beside the result if the path has changed since

Works on text only; the object store checks whether a location may be written.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from torchmoor.async_inference.objects.object_store import LocationRefused
from torchmoor.config.async_inference import AsyncEndpointSettings

STAGING = ".torchmoor"
OUTPUTS = "async-endpoint-outputs"  # as the SageMaker SDK names them
FAILURES = "async-endpoint-failures"
MAX_URL_CHARS = 1024  # of a response header


@dataclass(frozen=True, slots=True)
class ResultLocations:
    """URLs of the result and of the failure of one request."""

    output: str
    failure: str


def endpoint_paths(settings: AsyncEndpointSettings, root: str, endpoint: str) -> tuple[str, str]:
    """Return an endpoint's S3OutputPath and S3FailurePath.

    root: the parent of those that it does not set: s3://bucket, s3://bucket/prefix or file:///a/path.
    """
    output = settings.output_path or _below(root, f"{OUTPUTS}/{endpoint}")
    failure = settings.failure_path or _below(root or settings.output_path, f"{FAILURES}/{endpoint}")
    return output, failure


def locate_results(
    output_path: str, failure_path: str, inference_id: str, *, filename: str = "", extension: str = ""
) -> ResultLocations:
    """Return where a request's result or failure goes. Raises LocationRefused with a message for the client."""
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


def locate_staged(output_path: str, output_location: str, identity: str, attempt_id: str = "") -> str:
    """Return where an attempt's answer is staged: beside the results, so that publishing is a link.

    output_path: the endpoint's. output_location: where the result will be; elsewhere if the endpoint's path has changed
    since the submit. identity: the request's. attempt_id: no other attempt has it, so that a late write of a lost one
    replaces nothing; "" for the beginning of the names of all attempts.
    """
    folder = output_path.rstrip("/")
    if not output_location.startswith(f"{folder}/"):
        folder = output_location.rpartition("/")[0] or folder
    return _below(folder, f"{STAGING}/{identity}.{attempt_id}")


def _below(folder: str, name: str) -> str:
    """Append a name: unquoted to an S3 prefix, URL-quoted to a file URL."""
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
