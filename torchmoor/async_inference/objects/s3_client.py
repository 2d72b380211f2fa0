"""boto3 client of the S3 store, and its errors as ObjectError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from boto3.exceptions import Boto3Error
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ParamValidationError
from urllib3.exceptions import HTTPError

from torchmoor.async_inference.objects.object_store import (
    LocationRefused,
    ObjectDenied,
    ObjectError,
    ObjectMissing,
    ObjectUnavailable,
)
from torchmoor.config.objects import ObjectSettings
from torchmoor.wire.connection_errors import failure_reason

RETRYABLE_CODES = {  # despite their status of 4xx
    *("RequestTimeTooSkewed", "ExpiredToken", "RequestTimeout", "SlowDown"),
    "ConditionalRequestConflict",  # another conditional write of the key was running
    *("BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody"),  # a body was damaged, or cut off, on its way
}


def open_session() -> boto3.session.Session:
    """Return a session with credentials. Raises NoCredentialsError; a later call may find some."""
    session = boto3.session.Session()
    if session.get_credentials() is None:  # a client would never look for them again
        raise NoCredentialsError
    return session


def make_client(settings: ObjectSettings) -> Any:
    """Connect to the store. Raises NoCredentialsError."""
    client = open_session().client(
        "s3",
        endpoint_url=settings.s3_endpoint_url or None,
        region_name=settings.s3_region or None,
        config=Config(
            connect_timeout=settings.connect_timeout_s,
            read_timeout=settings.read_timeout_s,
            retries={"mode": "standard", "total_max_attempts": settings.max_attempts},
            max_pool_connections=settings.max_in_flight,
            request_checksum_calculation="when_required",  # some compatible stores reject the newer checksums
            response_checksum_validation="when_required",
        ),
    )
    client.meta.events.register_last("before-call.s3", _drop_expect)
    return client


def _drop_expect(params: Any, **kwargs: Any) -> None:
    """Remove `Expect: 100-continue`, which costs one more round trip per part."""
    params["headers"].pop("Expect", None)


def bucket_and_key(url: str) -> dict[str, str]:
    """Return bucket and key, unquoted: an s3:// URL escapes nothing. Raises LocationRefused."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    if not url.startswith("s3://") or not bucket or not key:
        raise LocationRefused("an object's location must be s3://bucket/key")
    if not url.isprintable():
        raise LocationRefused("an object's location must have printable characters, and ASCII spaces only")
    if any(part in (".", "..") for part in key.split("/")):
        raise LocationRefused("an object's key must not have /./ or /../ in it: stores disagree on what it means")
    return {"Bucket": bucket, "Key": key}


def code_of(error: ClientError) -> str:
    """Return AWS's code of an error, such as NoSuchKey."""
    return str(error.response.get("Error", {}).get("Code", "unknown"))


def status_of(error: ClientError) -> int:
    """Return the HTTP status of an error; 0 without an answer."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Raise boto3's errors as ObjectError."""
    try:
        yield
    except ClientError as exc:
        raise _translate(url, exc) from exc
    except NoCredentialsError as exc:
        # Another try may find some: botocore also finds none if the machine's metadata service does not answer.
        raise ObjectUnavailable(f"{url}: there are no AWS credentials on this machine") from exc
    except ParamValidationError as exc:
        raise LocationRefused(f"{url} is not a valid bucket and key") from exc
    except (BotoCoreError, Boto3Error, HTTPError, OSError) as exc:
        raise ObjectUnavailable(f"{url}: the store cannot be reached ({failure_reason(exc)})") from exc


def _translate(url: str, error: ClientError) -> ObjectError:
    code, status = code_of(error), status_of(error)
    if code == "NotImplemented":
        return ObjectDenied(f"{url}: the store does not support {error.operation_name} with If-None-Match")
    if status >= 500 or status == 429 or code in RETRYABLE_CODES:
        return ObjectUnavailable(f"{url}: the store cannot serve it now ({code})")
    if code == "NoSuchBucket":
        return ObjectMissing(f"there is no bucket {bucket_and_key(url)['Bucket']}")
    if status == 404:
        return ObjectMissing(f"there is no {url}")
    if status == 412:
        return ObjectUnavailable(f"{url} was replaced or removed meanwhile")
    if status in (301, 307):
        return LocationRefused(f"{url} is in another region than the one that this endpoint uses")
    return ObjectDenied(f"{url}: the store refused {error.operation_name} ({code})")


def find_head(client: Any, url: str) -> dict[str, Any] | None:
    """Return an object's head; None if it does not exist."""
    try:
        found: dict[str, Any] = client.head_object(**bucket_and_key(url))
    except ClientError as error:
        if status_of(error) == 404:
            return None
        raise
    return found


def has_bucket(client: Any, url: str) -> bool:
    """Return whether a URL's bucket exists; True if the store does not say. A missing object's head does not tell."""
    try:
        client.head_bucket(Bucket=bucket_and_key(url)["Bucket"])
    except ClientError as error:
        return status_of(error) != 404
    return True
