"""boto3's client for an endpoint, and its errors translated."""

from __future__ import annotations

import base64
import json
import mimetypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.eventstream import ParserError
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    ProxyConnectionError,
    SSLError,
)
from botocore.utils import get_environ_proxies
from urllib3.exceptions import HTTPError

from torchmoor.clients.errors import CredentialsRefused, EndpointError, EndpointUnreachable
from torchmoor.clients.local import is_local
from torchmoor.wire.connection_errors import failure_reason

TRUST_HINT = "AWS_CA_BUNDLE names the certificate of a private authority"
ADDRESSES = ("http://", "https://", "data:", "s3://")


@contextmanager
def readable_errors(hint: str = "") -> Iterator[None]:
    """Translate boto3's errors to EndpointError. hint: what to do if the endpoint does not answer."""
    try:
        yield
    except ClientError as error:
        details = error.response["Error"]
        status = error.response.get("OriginalStatusCode")
        is_refused = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") in (401, 403)
        kind = CredentialsRefused if is_refused else EndpointError
        raise kind(explain(error.response), code=details.get("Code", ""), status=status) from error
    except HTTPError as error:
        raise EndpointError("the connection was lost before the answer was complete") from error
    except ParserError as error:
        raise EndpointError(f"the answer's event stream is damaged: {error}") from error
    except SSLError as error:
        found = f"no TLS connection to {error.kwargs['endpoint_url']}: {failure_reason(error)}"
        raise EndpointUnreachable(f"{found} ({TRUST_HINT})") from error
    except (ConnectionError, HTTPClientError) as error:
        raise EndpointUnreachable(f"{error}{hint}") from error
    except BotoCoreError as error:
        raise EndpointError(f"{error}{hint}") from error


def explain(response: Mapping[str, Any]) -> str:
    """Return the model's message if the model refused, otherwise the endpoint's; the status if there is none."""
    message: str = response["Error"].get("Message", "")
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    without_reason = f"the endpoint answers with status {status} and no reason: is this the runtime's address and port?"
    return own_words(response.get("OriginalMessage", "")) or message or without_reason


def own_words(text: str) -> str | None:
    """Return the message of a handler's error body, also if the platform's message quotes it, as in failure objects."""
    _, quote, quoted = text.partition('with message "')
    try:
        value, _ = json.JSONDecoder().raw_decode(quoted if quote else text)
        message = value["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return message if isinstance(message, str) else None


def find_credentials(session: boto3.Session) -> Credentials | None:
    """Return what boto3 finds; None also if it asks for EC2's metadata through an HTTP proxy that does not answer."""
    try:
        return session.get_credentials()
    except ProxyConnectionError:
        return None


def make_client(
    service: str = "sagemaker-runtime",
    *,
    endpoint_url: str | None = None,
    region_name: str | None = None,
    profile_name: str | None = None,
    keys: Mapping[str, str] | None = None,
    config: Config | None = None,
) -> Any:
    """Make boto3's client. With an endpoint_url, a user without AWS credentials gets placeholders, since the proxy may
    need none.

    keys: aws_access_key_id and the others, instead of boto3's own search. Raises ValueError for an invalid address,
    botocore's BotoCoreError for an unknown profile or region.
    """
    session = boto3.Session(profile_name=profile_name)
    keys = dict(keys or {})
    if not keys and endpoint_url is not None and find_credentials(session) is None:
        keys = {"aws_access_key_id": "local", "aws_secret_access_key": "local"}
    region = region_name or session.region_name
    if region is None and endpoint_url is not None:
        region = "us-east-1"
    if endpoint_url is not None and is_local(endpoint_url):
        config = (config or Config()).merge(Config(proxies={}))
    return session.client(service, endpoint_url=endpoint_url, region_name=region, config=config, **keys)


def proxies_for(url: str) -> dict[str, str]:
    """Return the HTTP proxies of the environment by scheme, as boto3 uses them; none for an address of this machine."""
    return {} if is_local(url) else get_environ_proxies(url)


def image_reference(image: str | bytes | Path) -> str:
    """Return an image's reference for a request body: an address unchanged, a file or bytes as a data URL.

    Raises OSError.
    """
    if isinstance(image, str) and image.startswith(ADDRESSES):
        return image
    kind = None
    if not isinstance(image, bytes):
        kind = mimetypes.guess_type(image)[0]
        image = Path(image).expanduser().read_bytes()
    return f"data:{kind or 'application/octet-stream'};base64,{base64.b64encode(image).decode()}"
