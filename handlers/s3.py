"""S3, or a store that speaks its protocol: the client, its errors, listings and resumed reads.

Endpoint, region and credentials come from the usual AWS variables and files.
"""

import io
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from handlers.errors import SettingsError
from torchmoor.wire.connection_errors import failure_reason

try:
    import boto3
    import botocore.session
    from boto3.exceptions import Boto3Error
    from botocore.config import Config
    from botocore.credentials import CredentialProvider, Credentials, ReadOnlyCredentials
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        ConnectTimeoutError,
        HTTPClientError,
        NoCredentialsError,
        ParamValidationError,
        ReadTimeoutError,
    )
    from urllib3.exceptions import HTTPError
except ImportError as exc:
    raise SettingsError("s3:// addresses need boto3: pip install boto3") from exc

ATTEMPTS = 3  # of a request, and of a body whose connection breaks, unless a whole piece came between
PIECE_BYTES = 1 << 20


class S3Error(OSError):
    """A failed request. status: HTTP status of the store's answer, 0 without one. code: S3's error code, or ""."""

    status = 0
    code = ""

    @property
    def is_missing(self) -> bool:
        """True if the object, or the requested range, does not exist in a bucket that does."""
        return self.status in (404, 416) and self.code != "NoSuchBucket"

    @property
    def is_precondition(self) -> bool:
        """True if the object exists, or has changed, against the request's condition."""
        return self.status == 412


class S3Replaced(S3Error):
    """The object has changed, as the answer shows: not every store checks a request's condition."""

    status = 412


class S3TimedOut(S3Error, TimeoutError):
    """The store did not answer in time."""


@contextmanager
def translated(store: str) -> Iterator[None]:
    """Raise the libraries' errors as S3Error. store: how the messages name it."""
    try:
        yield
    except ClientError as exc:
        code = str(exc.response.get("Error", {}).get("Code", "unknown"))
        error = S3Error(f"{store} refused {exc.operation_name} ({code})")
        error.status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        error.code = code
        raise error from exc
    except (ConnectTimeoutError, ReadTimeoutError) as exc:
        raise S3TimedOut(f"{store} did not answer in time") from exc
    except NoCredentialsError as exc:
        raise S3Error(
            f"{store} cannot be reached without AWS credentials ({failure_reason(exc)}): set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or use a profile or a role"
        ) from exc
    except ParamValidationError as exc:
        raise S3Error(f"the request to {store} is invalid: {' '.join(str(exc).split())}") from exc
    except (BotoCoreError, Boto3Error, HTTPError) as exc:
        raise S3Error(f"{store} cannot be reached ({failure_reason(exc)})") from exc


class _LaterCredentials(Credentials):  # type: ignore[misc]  # botocore has no types
    """Credentials that each request looks for until they are found. A client itself looks once, when it is made."""

    def __init__(self) -> None:
        super().__init__("", "")
        self._found: Credentials | None = None

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        if self._found is None:
            self._found = boto3.session.Session().get_credentials()
        if self._found is None:
            raise NoCredentialsError
        return self._found.get_frozen_credentials()


class _LaterProvider(CredentialProvider):  # type: ignore[misc]
    """Comes last in a session's search: if no other provider has credentials, each request looks for them again."""

    METHOD = "later"

    def load(self) -> Credentials:
        return _LaterCredentials()


def make_client(
    setting: str,
    connect_timeout_s: float,
    read_timeout_s: float,
    *,
    attempts: int = ATTEMPTS,
    connections: int = 10,
    verifies_checksums: bool = False,
) -> Any:
    """Make a client without a request. Raises SettingsError, which names the setting, on wrong AWS settings.

    verifies_checksums: compare what is read with the object's own checksum, if it has one.
    """
    try:
        session = botocore.session.get_session()
        session.get_component("credential_provider").providers.append(_LaterProvider())
        return boto3.session.Session(botocore_session=session).client(
            "s3",
            config=Config(
                connect_timeout=connect_timeout_s,
                read_timeout=read_timeout_s,
                retries={"mode": "standard", "total_max_attempts": attempts},
                max_pool_connections=connections,
                request_checksum_calculation="when_required",  # other stores do not support the newer checksums
                response_checksum_validation="when_supported" if verifies_checksums else "when_required",
            ),
        )
    except BotoCoreError as exc:
        raise SettingsError(f"{setting}: {exc}") from exc


def split_url(url: str) -> tuple[str, str]:
    """Return the bucket of s3://bucket/prefix, and the prefix, empty or with a slash at its end."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    prefix = prefix.strip("/")
    return bucket, f"{prefix}/" if prefix else ""


def list_objects(
    client: Any, bucket: str, prefix: str, *, after: str = "", page: int = 1000, delimiter: str = ""
) -> Iterator[dict[str, Any]]:
    """Yield the objects below a prefix, in order of their keys; requests a page at a time, as needed."""
    options = {"StartAfter": after, "Delimiter": delimiter}
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket=bucket,
        Prefix=prefix,
        PaginationConfig={"PageSize": page},
        **{name: value for name, value in options.items() if value},
    )
    for found in pages:
        yield from found.get("Contents", ())


def read_object(
    client: Any, place: dict[str, str], tag: str, num_bytes: int, check: Callable[[], object]
) -> Generator[bytes, None, None]:
    """Yield an object's bytes; after a broken connection, resume if its ETag is still `tag`.

    place: its Bucket and Key. check: called between pieces; may raise. Use inside `translated`.
    """
    at = num_failures = 0
    while at < num_bytes:
        check()
        try:
            answer = client.get_object(**place, IfMatch=tag, Range=f"bytes={at}-")
            with answer["Body"] as body:
                if answer.get("ETag", tag) != tag:
                    raise S3Replaced("the object was replaced while it was read")
                while data := body.read(PIECE_BYTES):
                    at += len(data)
                    if at > num_bytes:
                        raise S3Replaced("the object has more bytes than it had when it was found")
                    if len(data) == PIECE_BYTES:
                        num_failures = 0
                    yield data
                    check()
            if at < num_bytes:
                raise HTTPClientError(error="the body ended early")
        except (BotoCoreError, HTTPError):
            num_failures += 1
            if num_failures == ATTEMPTS:
                raise


class PieceReader(io.RawIOBase):
    """A raw stream over a generator of pieces, which it closes, and with it the connection."""

    def __init__(self, pieces: Generator[bytes, None, None]) -> None:
        self._pieces = pieces
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            self._left = memoryview(next(self._pieces, b""))
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size

    def close(self) -> None:
        self._pieces.close()
        super().close()
